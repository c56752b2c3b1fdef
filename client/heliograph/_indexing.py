"""Basic indexing, x[...]: integers, slices with a positive step, None and Ellipsis.

The same normal form serves values of a graph (a slice, then a reshape) and tensors on a server (an
offset and strides).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

from heliograph_proto.errors import HeliographError, InvalidArgumentError, OutOfRangeError

_ADVICE = "an index is made of ints, slices with a positive step, None and ...; to gather, use hg.take"


@dataclass(frozen=True, slots=True)
class BasicIndex:
    """A start, stop and step for every dimension, and the shape without the dropped ones."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    step: tuple[int, ...]
    #: For each dimension of the result: the source's dimension, or None for a new one of size 1.
    kept: tuple[int | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length along each of the source's dimensions."""
        triples = zip(self.start, self.stop, self.step, strict=True)
        return tuple(len(range(*triple)) for triple in triples)

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        sizes = self.sizes
        return tuple(1 if place is None else sizes[place] for place in self.kept)


def basic_index(shape: tuple[int, ...], key: Any) -> BasicIndex:
    """The normal form of x[key]. Raises OutOfRangeError or InvalidArgumentError, without origin."""
    parts = _spread(shape, key if isinstance(key, tuple) else (key,))
    ranges: list[tuple[int, int, int]] = []
    kept: list[int | None] = []
    for part in parts:
        if part is None:
            kept.append(None)
            continue
        dimension = len(ranges)
        if isinstance(part, slice):
            ranges.append(_slice(part, shape[dimension]))
            kept.append(dimension)
        else:
            place = _integer(part, shape[dimension], dimension)
            ranges.append((place, place + 1, 1))
    start, stop, step = zip(*ranges, strict=True) if ranges else ((), (), ())
    return BasicIndex(start, stop, step, tuple(kept))


def _spread(shape: tuple[int, ...], key: tuple[Any, ...]) -> list[Any]:
    """The key with a part for every dimension."""
    ellipses = sum(part is Ellipsis for part in key)
    if ellipses > 1:
        raise InvalidArgumentError("an index has at most one ...", advice=_ADVICE)
    used = sum(part is not None and part is not Ellipsis for part in key)
    if used > len(shape):
        raise OutOfRangeError(f"{used} indices for a shape of {len(shape)} dimensions: {shape}")
    rest = [slice(None)] * (len(shape) - used)
    if not ellipses:
        return [*key, *rest]
    place = next(place for place, part in enumerate(key) if part is Ellipsis)
    return [*key[:place], *rest, *key[place + 1 :]]


def _slice(part: slice, size: int) -> tuple[int, int, int]:
    try:
        start, stop, step = part.indices(size)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"slice {part}: {error}", advice=_ADVICE) from None
    if step < 1:
        raise InvalidArgumentError(f"slice {part}: the step must be positive", advice=_ADVICE)
    return start, max(start, stop), step


def _integer(part: Any, size: int, dimension: int) -> int:
    try:
        place = index(part)
        if isinstance(part, bool):
            raise TypeError
    except TypeError:
        raise InvalidArgumentError(f"{type(part).__name__} is no index", advice=_ADVICE) from None
    if not -size <= place < size:
        raise OutOfRangeError(f"index {place} is outside dimension {dimension}, which has {size} elements")
    return place % size


def with_origin(
    shape: tuple[int, ...], key: Any, blame: Callable[[str, str, type[HeliographError]], HeliographError]
) -> BasicIndex:
    """As basic_index; errors get an origin by `blame(message, advice, kind)`."""
    try:
        return basic_index(shape, key)
    except HeliographError as error:
        raise blame(error.message, error.advice, type(error)) from None
