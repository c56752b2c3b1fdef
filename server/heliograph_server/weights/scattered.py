"""A content that no device has room for as a whole: its bytes over several devices while they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heliograph_backends.contract import Buffer, Device, MultiBuffer, Usage
from heliograph_proto.errors import OutOfMemoryError
from heliograph_server.scheduler.slices import Slice

#: Slices begin at multiples of this many bytes.
GRAIN_BYTES = 4096


class ScatteredBuffer(MultiBuffer):
    """Buffers whose bytes, one after the other, are a content's. It is written, and not read."""

    def set(self, offset_bytes: int, data: memoryview) -> None:
        data = data.cast("B")
        for piece, part in self.pieces():
            start, stop = max(offset_bytes, piece.start), min(offset_bytes + data.nbytes, piece.stop)
            if start < stop:
                part.set(start - piece.start, data[start - offset_bytes : stop - offset_bytes])

    def pieces(self) -> Iterator[tuple[Slice, Buffer]]:
        """Which of the bytes lie in which buffer."""
        start = 0
        for part in self.parts:
            yield Slice(start, start + part.size_bytes, self.size_bytes), part
            start += part.size_bytes


def scattered(devices: Sequence[Device], size_bytes: int) -> ScatteredBuffer | None:
    """Memory for so many bytes of all that devices have free; None: that does not suffice."""
    sizes = list(_shares(devices, size_bytes))
    if sum(sizes) < size_bytes:
        return None
    parts: list[Buffer] = []
    try:
        for device, share_bytes in zip(devices, sizes, strict=True):
            if share_bytes:
                parts.append(device.buffer_type.allocate(share_bytes, Usage.WEIGHTS))
    except BaseException as error:
        for part in parts:
            part.free()
        if isinstance(error, OutOfMemoryError):
            # Somebody was faster.
            return None
        raise
    return ScatteredBuffer(parts[0].buffer_type, parts) if parts else None


def _shares(devices: Sequence[Device], size_bytes: int) -> Iterator[int]:
    """What each device takes: all that it has free until there is enough."""
    for device in devices:
        free_bytes = min(device.memory().free_bytes, device.buffer_type.max_size)
        share_bytes = min(size_bytes, free_bytes // GRAIN_BYTES * GRAIN_BYTES)
        size_bytes -= share_bytes
        yield share_bytes
