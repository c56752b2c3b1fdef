"""The arena: where intermediate results lie in one block of memory, by liveness and best fit.

After ggml's graph allocator: walk the steps in order; a result takes the smallest free block that
holds it; when its last reader has run, its block is free again and joins its neighbours.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class _Block:
    offset: int
    size: int


def plan_arena(lifetimes: Sequence[Lifetime], alignment: int = 64) -> Arena:
    """Packs lifetimes so that no two that overlap in time overlap in memory."""
    offsets = [0] * len(lifetimes)
    starts = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first_step, i))
    ends = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].last_step, i))
    free: list[_Block] = []
    top, ended = 0, 0
    for index in starts:
        while ended < len(ends) and lifetimes[ends[ended]].last_step < lifetimes[index].first_step:
            gone = ends[ended]
            release(free, offsets[gone], padded(lifetimes[gone].size_bytes, alignment))
            ended += 1
        size = padded(lifetimes[index].size_bytes, alignment)
        offsets[index], top = take(free, size, top)
    return Arena(tuple(offsets), top)


def padded(size: int, alignment: int) -> int:
    """The size rounded up; at least one unit, so that empty tensors have an address of their own."""
    return max(1, -(-size // alignment)) * alignment


def take(free: list[_Block], size: int, top: int) -> tuple[int, int]:
    """An offset for `size` bytes and the new end of the arena; the last free block may grow."""
    fitting = [block for block in free if block.size >= size]
    if fitting:
        best = min(fitting, key=lambda block: (block.size, block.offset))
        offset = best.offset
        best.offset, best.size = best.offset + size, best.size - size
        if not best.size:
            free.remove(best)
        return offset, top
    if free and free[-1].offset + free[-1].size == top:
        last = free.pop()
        return last.offset, last.offset + size
    return top, top + size


def release(free: list[_Block], offset: int, size: int) -> None:
    """Gives a block back and joins it with its free neighbours. `free` is sorted by offset."""
    place = next((i for i, block in enumerate(free) if block.offset > offset), len(free))
    free.insert(place, _Block(offset, size))
    for i in (place, place - 1):
        if 0 <= i < len(free) - 1 and free[i].offset + free[i].size == free[i + 1].offset:
            free[i].size += free.pop(i + 1).size
