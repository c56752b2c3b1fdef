"""Indexing by arrays: x[[2, 0]], x[rows, columns], x[mask], as NumPy has it.

Index arrays broadcast together. Their dimensions come where the first of them stands, or in front
if slices stand between them. A mask is an array whose count is known: its places become indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.source_lines import invalid
from heliograph.graph.symbol import Symbol
from heliograph_proto.errors import InvalidArgumentError, OutOfRangeError
from heliograph_proto.ops.rules import broadcast_shapes
from heliograph_proto.types import BOOL, I64

if TYPE_CHECKING:
    from heliograph.graph.value import Value

_ADVICE = "an index is made of ints, slices, None, ..., and arrays of integers or bools"


def has_arrays(key: Any) -> bool:
    """True if a key has an index array, a list, or a value of a graph."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(one, (list, Symbol)) or getattr(one, "ndim", 0) > 0 for one in parts)


def gathered(x: Value, key: Any) -> Value:
    """Return x[key] for a key with index arrays. Raises InvalidGraphError, OutOfRangeError."""
    parts = _spread(x, [_part(one) for one in (key if isinstance(key, tuple) else (key,))])
    plain: list[Any] = []
    places: list[int] = []
    indices: list[Any] = []
    for part in parts:
        if part is None or isinstance(part, slice):
            plain.append(part)
        else:
            places.append(len(plain))
            indices.append(part)
            plain.append(slice(None))
    base = x[tuple(plain)]
    sizes = [base.shape[place] for place in places]
    flat = _flat(x, indices, sizes)
    others = [axis for axis in range(base.ndim) if axis not in places]
    rows = lowering.permute(base, [*places, *others])
    merged = lowering.reshape(rows, (math.prod(sizes), *(base.shape[axis] for axis in others)))
    found = lowering.gather(merged, flat, 0)
    # The new dimensions are in front.
    together = places == list(range(places[0], places[0] + len(places)))
    before = sum(axis < places[0] for axis in others) if together else 0
    new, old = list(range(flat.ndim)), list(range(flat.ndim, found.ndim))
    return lowering.permute(found, [*old[:before], *new, *old[before:]])


def _part(part: Any) -> Any:
    """Return a list, or an array of another library, as an array."""
    if not isinstance(part, list):
        is_other = getattr(part, "ndim", 0) > 0 and not isinstance(part, (np.ndarray, Symbol))
        return np.asarray(part) if is_other else part
    try:
        found = np.asarray(part)
    except ValueError:
        found = np.empty((), object)
    return found if found.size else found.astype(np.int64)


def _spread(x: Value, parts: Sequence[Any]) -> list[Any]:
    """Return a part for each dimension, masks as their places."""
    if sum(one is Ellipsis for one in parts) > 1:
        raise invalid("an index has at most one ...", _ADVICE, InvalidArgumentError)
    used = sum(_width(one) for one in parts)
    if used > x.ndim:
        raise invalid(f"{used} indices for {x.type}", _ADVICE, OutOfRangeError)
    rest = [slice(None)] * (x.ndim - used)
    spread = [one for part in parts for one in (rest if part is Ellipsis else [part])]
    if not any(part is Ellipsis for part in parts):
        spread += rest
    found: list[Any] = []
    axis = 0
    for part in spread:
        if _is_mask(part):
            found += _places_of(part, x, axis)
        else:
            found.append(part)
        axis += _width(part)
    return found


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == bool and part.ndim > 0


def _width(part: Any) -> int:
    """The number of dimensions that a part takes."""
    return 0 if part is None or part is Ellipsis else part.ndim if _is_mask(part) else 1


def _places_of(mask: Any, x: Value, axis: int) -> list[Any]:
    shape = x.shape[axis : axis + mask.ndim]
    if mask.shape != shape:
        raise invalid(
            f"a mask of shape {mask.shape} for dimensions {shape} of {x.type}", kind=OutOfRangeError
        )
    return list(np.nonzero(mask))


def _flat(x: Value, indices: Sequence[Any], sizes: Sequence[int]) -> Value:
    """Return the places in the merged dimensions, as one value."""
    checked = [_index(x, one, size) for one, size in zip(indices, sizes, strict=True)]
    shapes = [one.shape for one in checked]
    common = lowering.checked(lambda: broadcast_shapes(*shapes))
    total = math.prod(sizes)
    narrow = np.int32 if total < 2**31 else np.int64
    if not any(isinstance(one, Symbol) for one in checked):
        flat = np.zeros(common, np.int64)
        for one, size in zip(checked, sizes, strict=True):
            flat = flat * size + one
        return x.graph.constant(flat.astype(narrow))
    found: Any = None
    outside: Any = None
    for one, size in zip(checked, sizes, strict=True):
        value = _from_front(one, size) if isinstance(one, Symbol) else x.graph.constant(one)
        if isinstance(one, Symbol):
            wrong = (value < 0) | (value >= size)
            outside = wrong if outside is None else outside | wrong
        found = value if found is None else found * size + value
    if len(sizes) > 1:
        # A place outside of its own dimension would be one inside of others.
        last = x.graph._scalar(total, I64)
        found = lowering.apply("where", outside, last, found)
    return found if found.shape == common else lowering.apply("broadcast_to", found, shape=common)


def _from_front(value: Any, size: int) -> Any:
    wide = lowering.cast(value, I64)
    return wide if value.dtype.kind == "uint" else lowering.apply("where", wide < 0, wide + size, wide)


def _index(x: Value, part: Any, size: int) -> Any:
    """Return an index as a value, or as an array of places from 0 on."""
    if isinstance(part, Symbol):
        if part.graph is not x.graph:
            raise invalid(f"{part!r} belongs to another graph", kind=InvalidArgumentError)
        if part.dtype is BOOL:
            raise invalid(
                f"a mask {part.type}, whose elements only a run has",
                "its count must be known: hg.take_masked(x, mask, count=n); or hg.where(mask, x, 0.0)",
            )
        if not part.dtype.is_integer:
            raise invalid(f"indices are {part.type}", "convert them first: hg.astype(i, 'i64')")
        return part
    found = np.asarray(part)
    if found.ndim == 0:
        try:
            if isinstance(part, (bool, np.bool_)):
                raise TypeError
            found = np.asarray(index(part))
        except TypeError:
            raise invalid(f"{type(part).__name__} is no index", _ADVICE, InvalidArgumentError) from None
    if found.dtype.kind not in "iu":
        raise invalid(f"an index array of {found.dtype}", _ADVICE, InvalidArgumentError)
    if (outside := found[(found < -size) | (found >= size)]).size:
        raise invalid(
            f"index {outside.flat[0]} is outside of a dimension of {size} of {x.type}",
            f"indices go from {-size} to {size - 1}" if size else "the dimension is empty",
            OutOfRangeError,
        )
    return np.where(found < 0, found.astype(np.int64) + size, found).astype(np.int64)
