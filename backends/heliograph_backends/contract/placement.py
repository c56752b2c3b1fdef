"""Places for a list of tensors, over as many buffers as the maximum size requires.

After ggml's allocation of a list of tensors: in their order, each at the next aligned offset, with
a new buffer where the running size would exceed the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_proto.errors import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A tensor's buffer, by number, and its offset in it."""

    buffer: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The sizes of the buffers, at least one, and the place of each tensor."""

    buffer_bytes: tuple[int, ...]
    places: tuple[BufferPlace, ...]


def place(sizes_bytes: Sequence[int], alignment: int, max_size: int) -> Placement:
    """Place tensors of these sizes. Raises OutOfMemoryError for one larger than any buffer."""
    buffers: list[int] = []
    places: list[BufferPlace] = []
    end = 0
    for size in sizes_bytes:
        if size > max_size:
            raise OutOfMemoryError(
                f"a tensor of {size:,} bytes; one buffer has at most {max_size:,}", advice="split the tensor"
            )
        start = -(-end // alignment) * alignment
        if start + size > max_size:
            buffers.append(end)
            start = 0
        places.append(BufferPlace(len(buffers), start))
        end = start + size
    return Placement((*buffers, end), tuple(places))
