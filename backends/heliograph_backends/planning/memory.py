"""The arena: where intermediate results lie in one block of memory, by liveness and best fit.

After ggml's graph allocator: walk the steps in order; a result takes the smallest free block that
holds it; when its last reader has run, its block is free again and joins its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A result: its size, the step that writes it, and the last step that needs it."""

    size_bytes: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets, one for each lifetime, and the size of the block."""

    offsets: tuple[int, ...]
    size_bytes: int


def plan_arena(lifetimes: Sequence[Lifetime], alignment: int = 64) -> Arena:
    """Packs lifetimes so that no two that overlap in time overlap in memory. n log n."""
    offsets = [0] * len(lifetimes)
    sizes = [padded(lifetime.size_bytes, alignment) for lifetime in lifetimes]
    starts = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first_step, i))
    ends = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].last_step, i))
    space = _Space()
    ended = 0
    for index in starts:
        while lifetimes[ends[ended]].last_step < lifetimes[index].first_step:
            gone = ends[ended]
            space.release(offsets[gone], sizes[gone])
            ended += 1
        offsets[index] = space.take(sizes[index])
    return Arena(tuple(offsets), space.top)


def padded(size: int, alignment: int) -> int:
    """The size rounded up; at least one unit, so that empty tensors have an address of their own."""
    return max(1, -(-size // alignment)) * alignment


class _Space:
    """Memory from 0 to `top`, which grows, and the free blocks in it; no two of them touch."""

    def __init__(self) -> None:
        self.top = 0
        #: (size, offset), sorted, for best fit; the lowest of equals first.
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._offset_before: dict[int, int] = {}

    def take(self, size: int) -> int:
        """An offset for `size` bytes; the last free block may grow."""
        place = bisect_left(self._by_size, (size, 0))
        if place < len(self._by_size):
            found, offset = self._by_size[place]
            self._remove(offset)
            if found > size:
                self._add(offset + size, found - size)
            return offset
        offset = self._offset_before.get(self.top, self.top)
        if offset < self.top:
            self._remove(offset)
        self.top = offset + size
        return offset

    def release(self, offset: int, size: int) -> None:
        """Gives a block back and joins it with its free neighbours."""
        end = offset + size
        if end in self._size_at:
            end += self._remove(end)
        if offset in self._offset_before:
            offset = self._offset_before[offset]
            self._remove(offset)
        self._add(offset, end - offset)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._offset_before[offset + size] = offset

    def _remove(self, offset: int) -> int:
        size = self._size_at.pop(offset)
        del self._offset_before[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size
