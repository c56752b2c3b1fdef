"""Functions that move elements: the array API's names and rules."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.types import BOOL, I32, I64

__all__ = [
    "broadcast_arrays",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flatten",
    "flip",
    "matrix_transpose",
    "moveaxis",
    "permute_dims",
    "repeat",
    "reshape",
    "roll",
    "split",
    "squeeze",
    "stack",
    "take",
    "take_masked",
    "tile",
    "unstack",
]


def reshape(x: Operand, /, shape: Sequence[int] | int, *, copy: bool | None = None) -> Value:
    """The same elements in row-major order in another shape; one size may be -1. Values never
    change, so `copy` makes no difference."""
    return lowering.reshape(lowering.one_value(x), shape)


def permute_dims(x: Operand, /, axes: Sequence[int]) -> Value:
    """The dimensions in the order `axes`."""
    value = lowering.one_value(x)
    if len(axes) != value.ndim:
        raise invalid(f"permute_dims of {value.type} by {tuple(axes)}: every axis exactly once")
    return lowering.permute(value, axes)


def matrix_transpose(x: Operand, /) -> Value:
    """The last two dimensions exchanged."""
    return lowering.one_value(x).mT


def expand_dims(x: Operand, /, axis: int = 0) -> Value:
    """A new dimension of size 1 at the place `axis` of the result."""
    value = lowering.one_value(x)
    place = index(axis)
    if not -value.ndim - 1 <= place <= value.ndim:
        raise invalid(f"expand_dims of {value.type}: axis {axis} is outside the result")
    place %= value.ndim + 1
    return lowering.reshape(value, (*value.shape[:place], 1, *value.shape[place:]))


def squeeze(x: Operand, /, axis: int | Sequence[int]) -> Value:
    """Without the dimensions `axis`, each of size 1."""
    value = lowering.one_value(x)
    places = lowering.axes_of(value, axis)
    if wide := [place for place in places if value.shape[place] != 1]:
        raise invalid(f"squeeze of {value.type}: dimension {wide[0]} is not of size 1")
    return lowering.reshape(value, [size for place, size in enumerate(value.shape) if place not in places])


def flatten(x: Operand, /) -> Value:
    """One dimension, in row-major order."""
    value = lowering.one_value(x)
    return lowering.reshape(value, (value.size,))


def broadcast_to(x: Operand, /, shape: Sequence[int] | int) -> Value:
    """x repeated to a shape that it broadcasts to."""
    value, target = lowering.one_value(x), lowering.sizes(shape)
    return value if value.shape == target else lowering.apply("broadcast_to", value, shape=target)


def concat(arrays: Sequence[Operand], /, *, axis: int | None = 0) -> Value:
    """The arrays, promoted to one data type, joined along an axis; None joins them flattened."""
    values = lowering.promoted(*lowering.several(arrays, "concat"))
    if axis is None:
        values, axis = [flatten(value) for value in values], 0
    if len(values) == 1:
        lowering.axis_of(values[0], axis)
        return values[0]
    return lowering.apply("concat", *values, axis=index(axis))


def stack(arrays: Sequence[Operand], /, *, axis: int = 0) -> Value:
    """The arrays, all of one shape, joined along a new axis."""
    values = lowering.promoted(*lowering.several(arrays, "stack"))
    if wrong := [value for value in values if value.shape != values[0].shape]:
        raise invalid(f"stack of {values[0].type} and {wrong[0].type}: the shapes must be equal")
    return concat([expand_dims(value, axis=axis) for value in values], axis=axis)


def split(x: Operand, /, sections: int | Sequence[int], *, axis: int = 0) -> list[Value]:
    """Parts along an axis: so many equal ones, or cut before each of the given places (as
    NumPy's)."""
    value = lowering.one_value(x)
    place = lowering.axis_of(value, axis)
    size = value.shape[place]
    if isinstance(sections, int):
        if sections < 1 or size % sections:
            raise invalid(f"split of {value.type}: {size} does not divide into {sections} equal parts")
        cuts = [part * (size // sections) for part in range(1, sections)]
    else:
        cuts = [index(cut) for cut in sections]
    edges = [0, *cuts, size]
    whole = (slice(None),) * place
    return [value[(*whole, slice(*pair))] for pair in zip(edges, edges[1:], strict=False)]


def tile(x: Operand, repetitions: Sequence[int] | int, /) -> Value:
    """x repeated so many times along each dimension; an int is for the last one."""
    value, given = lowering.one_value(x), lowering.sizes(repetitions)
    rank = max(value.ndim, len(given))
    shape = (1,) * (rank - value.ndim) + value.shape
    times = (1,) * (rank - len(given)) + given
    pairs = list(zip(times, shape, strict=True))
    spread = lowering.reshape(value, [part for _, size in pairs for part in (1, size)])
    wide = broadcast_to(spread, [part for time, size in pairs for part in (time, size)])
    return lowering.reshape(wide, [time * size for time, size in pairs])


def moveaxis(x: Operand, source: int | Sequence[int], destination: int | Sequence[int], /) -> Value:
    """Dimensions moved to other places; the others keep their order."""
    value = lowering.one_value(x)
    taken, places = (
        [lowering.axis_of(value, axis) for axis in ([given] if isinstance(given, int) else given)]
        for given in (source, destination)
    )
    distinct = len(set(taken)) == len(taken) == len(places) == len(set(places))
    if not distinct:
        raise invalid(f"moveaxis of {value.type} from {source} to {destination}: each axis once")
    order = [axis for axis in range(value.ndim) if axis not in taken]
    for place, axis in sorted(zip(places, taken, strict=True)):
        order.insert(place, axis)
    return lowering.permute(value, order)


def unstack(x: Operand, /, *, axis: int = 0) -> tuple[Value, ...]:
    """The parts along an axis, without it."""
    value = lowering.one_value(x)
    place = lowering.axis_of(value, axis)
    whole = (slice(None),) * place
    return tuple(value[(*whole, number)] for number in range(value.shape[place]))


def broadcast_arrays(*arrays: Operand) -> list[Value]:
    """The arrays, each repeated to the shape that they broadcast to together; data types stay."""
    if not arrays:
        return []
    graph = lowering.graph_of(*arrays)
    values = [lowering.lift(graph, one) for one in arrays]
    try:
        shape = np.broadcast_shapes(*(value.shape for value in values))
    except ValueError:
        raise invalid(f"{', '.join(str(value.type) for value in values)} do not broadcast") from None
    return [broadcast_to(value, shape) for value in values]


def flip(x: Operand, /, *, axis: int | Sequence[int] | None = None) -> Value:
    """The elements in the opposite order along axes; None: along all."""
    value = lowering.one_value(x)
    return lowering.reverse(value, lowering.axes_of(value, axis))


def roll(x: Operand, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None) -> Value:
    """The elements moved along axes; what leaves at the end comes in at the beginning. None:
    flattened."""
    value = lowering.one_value(x)
    if axis is None:
        shifts = [shift] if isinstance(shift, int) else list(shift)
        return lowering.reshape(_rolled(flatten(value), sum(shifts), 0), value.shape)
    places = [lowering.axis_of(value, one) for one in ([axis] if isinstance(axis, int) else axis)]
    shifts = [shift] * len(places) if isinstance(shift, int) else list(shift)
    if len(shifts) != len(places):
        raise invalid(f"roll of {value.type}: {len(shifts)} shifts along {len(places)} axes")
    for place, by in zip(places, shifts, strict=True):
        value = _rolled(value, by, place)
    return value


def _rolled(x: Value, shift: int, axis: int) -> Value:
    size = x.shape[axis]
    cut = -shift % size if size else 0
    if not cut:
        return x
    whole = (slice(None),) * axis
    return concat([x[(*whole, slice(cut, None))], x[(*whole, slice(None, cut))]], axis=axis)


def repeat(
    x: Operand, repeats: int | Sequence[int] | np.ndarray[Any, Any], /, *, axis: int | None = None
) -> Value:
    """Each element so many times along an axis, or the first so many times and the second so many;
    None: of the flattened elements. `repeats` is known while the graph is built, since the shape
    depends on it."""
    if lowering.is_value(repeats):
        raise invalid(
            f"repeat by {repeats!r:.200}: the shape would depend on its elements, which only a run has",
            "repeat by an int or by a NumPy array",
        )
    value = lowering.one_value(x)
    if axis is None:
        value, axis = flatten(value), 0
    place, times = lowering.axis_of(value, axis), np.asarray(repeats)
    size = value.shape[place]
    if times.dtype.kind not in "iu" or times.shape not in ((), (1,), (size,)) or (times < 0).any():
        raise invalid(
            f"repeat of {value.type} by {repeats!r:.80} along axis {place}: ints from 0 on, 1 or {size}"
        )
    if times.size != 1:
        return take(value, np.repeat(np.arange(size), times), axis=place)
    return _repeated(value, place, int(times.reshape(())))


def _repeated(value: Value, place: int, times: int) -> Value:
    wide = expand_dims(value, axis=place + 1)
    wide = broadcast_to(wide, (*wide.shape[: place + 1], times, *wide.shape[place + 2 :]))
    return lowering.reshape(
        wide, (*value.shape[:place], value.shape[place] * times, *value.shape[place + 1 :])
    )


def take(
    x: Operand, indices: Operand | Sequence[int] | Sequence[Any], /, *, axis: int | None = None
) -> Value:
    """The elements of x at the indices (integers) along an axis.

    The result has the indices' shape in place of that dimension. Indices are an int, a list, an
    array, or a value of the graph. Those below 0 count from the end, unless a run computes them: an
    index of a value that is outside x, which includes those below 0, is an error of the run. `axis`
    may be left out when x has one dimension.
    """
    if isinstance(indices, (int, list, tuple)) and not isinstance(indices, bool):
        indices = _listed(indices)
    graph = lowering.graph_of(x, indices)
    value = lowering.lift(graph, x)
    if axis is None and value.ndim != 1:
        raise invalid(f"take from {value.type} needs an axis")
    place = lowering.axis_of(value, 0 if axis is None else axis)
    places = lowering.lift(graph, _from_the_end(indices, value, place))
    if not places.dtype.is_integer:
        raise invalid(f"take: the indices are {places.type}", "convert them first: hg.astype(i, 'i64')")
    if places.dtype.name not in ("i32", "i64"):
        places = lowering.cast(places, I64)
    return lowering.gather(value, places, place)


def take_masked(x: Operand, mask: Operand, /, *, count: int, axis: int | None = None) -> Value:
    """The `count` elements of x where a mask is true, in row-major order.

    The mask has the shape of x, or with an axis is a vector along that. It may be a value of the
    graph; a run whose mask has another count of true elements fails, as with any index out of
    range.
    """
    graph = lowering.graph_of(x, mask)
    value, truths = lowering.lift(graph, x), lowering.lift(graph, mask)
    if axis is None:
        value, truths = flatten(_same_sizes(value, truths)), flatten(truths)
    place = 0 if axis is None else lowering.axis_of(value, axis)
    size = value.shape[place]
    if truths.dtype is not BOOL or truths.shape != (size,):
        raise invalid(f"take_masked: a mask {truths.type} for {size} elements", "a mask is bool: x > 0")
    if not 0 <= (wanted := index(count)) <= size:
        raise invalid(f"take_masked: {wanted} of {size} elements")
    if not wanted:
        return value[(*[slice(None)] * place, slice(0, 0))]
    order = lowering.apply("argsort", lowering.cast(truths, I32), descending=True)
    total = lowering.apply("reduce_sum", lowering.cast(truths, I64), axes=(), keepdims=False)
    outside = graph._scalar(size, I32)
    places = lowering.apply("where", total == wanted, order[:wanted], outside)
    return lowering.gather(value, places, place)


def _same_sizes(x: Value, mask: Value) -> Value:
    if x.shape != mask.shape:
        raise invalid(f"take_masked: a mask {mask.type} for {x.type}", "or name the axis of a vector: axis=0")
    return x


def _listed(indices: int | Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the array of listed indices. Raises InvalidGraphError unless they are ints."""
    try:
        found = np.asarray(indices)
    except ValueError:
        found = np.empty((), object)
    if found.size and found.dtype.kind not in "iu":
        raise invalid(f"take: {indices!r:.80} is no list of indices", "indices are ints: [0, 2, -1]")
    return found if found.size else found.astype(np.int64)


def _from_the_end(indices: Any, x: Value, axis: int) -> Any:
    """Return indices that are known, all from 0 on. Raises OutOfRangeError."""
    if not isinstance(indices, (np.ndarray, np.generic)) or indices.dtype.kind not in "iu":
        return indices
    places: np.ndarray[Any, Any] = np.asarray(indices)
    size = x.shape[axis]
    if (outside := places[(places < -size) | (places >= size)]).size:
        raise invalid(
            f"take: index {outside.flat[0]} is outside dimension {axis} of {x.type}",
            f"indices go from {-size} to {size - 1}" if size else "the dimension is empty",
            OutOfRangeError,
        )
    return np.where(places < 0, places.astype(np.int64) + size, places) if (places < 0).any() else places
