"""ggml's data types, and the table of buffers: their handles, their addresses, and checks of what a
client places in them. Pure.

A client computes with addresses. Those that it gets here are numbers without memory behind them:
each buffer has a range of its own, with a gap to the next one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from heliograph_proto.types import DTYPES, DType
from heliograph_server.gateways.ggml_rpc import wire

#: ggml's numbers of data types.
TYPES: dict[int, DType] = {
    number: DTYPES[name]
    for number, name in {
        0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k",
        11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs",
        18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16",
        26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
        40: "nvfp4", 41: "q1_0", 42: "q2_0",
    }.items()
    if name in DTYPES
}  # fmt: skip

#: The alignment of tensors that clients are told.
ALIGNMENT = 64
_FIRST_ADDRESS = 1 << 40
_GAP = 1 << 20
#: The end of addresses; above it are none.
_LAST_ADDRESS = 1 << 62


class RefusedError(ValueError):
    """A valid message with a content that cannot be taken; its connection ends."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a client."""

    #: The number by which the client names it.
    handle: int
    device: int
    base: int
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a buffer: checked, with the fastest dimension first as ggml has it."""

    buffer: Buffer
    #: Of its first byte.
    offset: int
    dtype: DType
    #: In elements.
    ne: tuple[int, ...]
    nb: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes in blocks."""
        return (self.ne[0] // self.dtype.block_size, *self.ne[1:])

    @property
    def is_empty(self) -> bool:
        return 0 in self.ne

    @property
    def span(self) -> int:
        """The bytes from its first one to the end of its last one."""
        return span_of(self.dtype, self.ne, self.nb)

    @property
    def end(self) -> int:
        return self.offset + self.span

    @property
    def is_contiguous(self) -> bool:
        """True if its bytes lie without gaps in the order of its elements."""
        step = self.dtype.block_bytes
        for size, stride in zip(self.blocks, self.nb, strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def span_of(dtype: DType, ne: tuple[int, ...], nb: tuple[int, ...]) -> int:
    """Return the bytes of a tensor from its first one to the end of its last one, as ggml
    counts."""
    if 0 in ne:
        return 0
    blocks = (ne[0] // dtype.block_size, *ne[1:])
    return dtype.block_bytes + sum((size - 1) * stride for size, stride in zip(blocks, nb, strict=True))


class Buffers:
    """The buffers of a connection."""

    def __init__(self) -> None:
        self._found: dict[int, Buffer] = {}
        self._next_handle = 1
        self._next_base = _FIRST_ADDRESS

    def __len__(self) -> int:
        return len(self._found)

    def add(self, device: int, size: int) -> Buffer:
        """Add a buffer. Raises RefusedError when the addresses are used up."""
        end = self._next_base + size
        if end > _LAST_ADDRESS:
            raise RefusedError("the addresses of this connection are used up")
        found = Buffer(self._next_handle, device, self._next_base, size)
        self._next_handle += 1
        self._next_base = -(-(end + _GAP) // _GAP) * _GAP
        self._found[found.handle] = found
        return found

    def get(self, handle: int) -> Buffer:
        """Return a buffer. Raises RefusedError."""
        if handle not in self._found:
            raise RefusedError(f"there is no buffer {handle:#x}")
        return self._found[handle]

    def remove(self, handle: int) -> Buffer:
        """Remove a buffer and return it. Raises RefusedError."""
        found = self.get(handle)
        del self._found[handle]
        return found

    def place(self, tensor: wire.Tensor) -> Place:
        """Check a tensor and return its place. Raises RefusedError."""
        dtype, ne, nb = _checked_type(tensor)
        buffer = self.get(tensor.buffer)
        offset, span = tensor.data - buffer.base, span_of(dtype, ne, nb)
        if not 0 <= offset <= buffer.size or offset + span > buffer.size:
            raise RefusedError(
                f"{tensor.name!r} of {span:,} bytes at byte {offset:,} of a buffer of {buffer.size:,} bytes"
            )
        return Place(buffer, offset, dtype, ne, nb)

    def part(self, tensor: wire.Tensor, offset: int, size: int) -> tuple[Buffer, int]:
        """Return the buffer, and the offset in it of some bytes of a tensor. Raises
        RefusedError."""
        place = self.place(tensor)
        if offset + size > place.span:
            raise RefusedError(
                f"bytes {offset:,} to {offset + size:,} of {tensor.name!r}, which has {place.span:,}"
            )
        return place.buffer, place.offset + offset


def alloc_size(tensor: wire.Tensor) -> int:
    """Return the bytes that a tensor needs in a buffer. Raises RefusedError."""
    return span_of(*_checked_type(tensor))


def _checked_type(tensor: wire.Tensor) -> tuple[DType, tuple[int, ...], tuple[int, ...]]:
    dtype = TYPES.get(tensor.type)
    if dtype is None:
        raise RefusedError(f"{tensor.name!r} has data type {tensor.type}, which is unknown here")
    if tensor.ne[0] % dtype.block_size:
        raise RefusedError(f"{tensor.name!r}: {tensor.ne[0]} elements are no whole blocks of {dtype}")
    return dtype, tuple(tensor.ne), tuple(tensor.nb)


class Spans:
    """Ranges of bytes that do not overlap, each with a value; a later one takes over from earlier
    ones what it covers."""

    def __init__(self) -> None:
        #: (start, end, value), in order.
        self._found: list[tuple[int, int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(self._found)

    def overlapping(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return the ranges with bytes in a range."""
        first, last = self._bounds(start, end)
        return self._found[first:last]

    def set(self, start: int, end: int, value: int) -> None:
        """Give a range a value."""
        if start >= end:
            return
        first, last = self._bounds(start, end)
        kept = [(start, end, value)]
        for old_start, old_end, old in self._found[first:last]:
            if old_start < start:
                kept.insert(0, (old_start, start, old))
            if old_end > end:
                kept.append((end, old_end, old))
        self._found[first:last] = sorted(kept)

    def _bounds(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_right(self._found, start, key=lambda one: one[1])
        last = first
        while last < len(self._found) and self._found[last][0] < end:
            last += 1
        return first, last
