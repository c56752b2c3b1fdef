"""Strided parts of contiguous memory, as the ops `reshape`, `slice` and `permute` make them.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nest:
    """A block in a contiguous array: the array in a shape in which it is one, and its start
    there."""

    #: The shape of the array's first `math.prod(shape)` units.
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    #: For each dimension of the part (slowest first), its place in `shape`; None: its size is 1.
    axes: tuple[int | None, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of the block in the part's order."""
        return tuple(one for one in self.axes if one is not None)


def merged(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return sizes and strides, slowest dimension first, with those dimensions joined that lie one
    in the other without gaps."""
    found_sizes: list[int] = []
    found_strides: list[int] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found_sizes and found_strides[-1] == size * stride:
            found_sizes[-1] *= size
            found_strides[-1] = stride
        else:
            found_sizes.append(size)
            found_strides.append(stride)
    return found_sizes, found_strides


def nest(total: int, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Nest | None:
    """Return a part of `total` units as a block; None if it is none.

    Sizes and strides, in units, have the slowest dimension first. Dimensions of size 1 do not
    count.
    """
    pairs = enumerate(zip(sizes, strides, strict=True))
    found = sorted(((stride, size, place) for place, (size, stride) in pairs if size != 1), reverse=True)
    shape: list[int] = []
    start: list[int] = []
    block: list[int] = []
    axes: list[int | None] = [None] * len(sizes)
    outer, rest = total, offset
    for stride, size, place in found:
        if stride <= 0 or (shape and outer % stride):
            return None
        room, first = outer // stride, rest // stride
        if first + size > room:
            return None
        axes[place] = len(shape)
        shape.append(room)
        start.append(first)
        block.append(size)
        outer, rest = stride, rest % stride
    if not shape or outer > 1 or rest:
        # Of each innermost piece one unit is left.
        if rest >= max(1, outer):
            return None
        shape.append(outer)
        start.append(rest)
        block.append(1)
    return Nest(tuple(shape), tuple(start), tuple(block), tuple(axes))
