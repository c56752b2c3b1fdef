"""The chunks of a prompt, one run of a plan each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heliograph.llm.decoding_step import PADDING

#: The sizes of chunks, each a plan.
SIZES = (512, 128, PADDING)
#: The share of a chunk that is worth a run of its size.
WORTH = 0.75


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens from a position on; `size` - `count` more pad the chunk."""

    start: int
    count: int
    size: int


def cut(start: int, end: int, rows: int, sizes: Sequence[int] = SIZES) -> Iterator[Chunk]:
    """Yield the chunks of the positions from `start` to before `end`, in order.

    A chunk with its padding ends within `rows`. Only the last may be padded.
    """
    while start < end:
        left = end - start
        fitting = [size for size in sizes if size * WORTH <= left and start + size <= rows]
        size = fitting[0] if fitting else sizes[-1]
        count = min(size, left)
        yield Chunk(start, count, size)
        start += count


def smaller_than(size: int, sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes that are left where there is no memory for the plan of one. The size of a
    chunk changes no bits."""
    return [one for one in sizes if one < size]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
