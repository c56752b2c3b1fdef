"""Bytes that a session holds between a bulk call and a command, as they travel.

What comes in stays in the messages that brought it until the command writes it into its tensor, and what
goes out is copied from the tensor into messages at once: each byte is copied once here, whichever of call
and command came first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from heliograph_backends import access
from heliograph_backends.contract import Tensor, host_bytes
from heliograph_proto.bulk import encode_download
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.core.tasks import ReadTask, WriteTask

#: Pieces below this are put together: an object for each would take more than its bytes.
SMALL_BYTES = 64 * 1024
#: What a message that is kept may have beside its piece.
HEADER_BYTES = 4096


class Received:
    """The bytes of an upload in the pieces in which they came."""

    def __init__(self) -> None:
        self.nbytes = 0
        #: Bytes of all pieces that were copied into other memory on their way to a tensor.
        self.copied_bytes = 0
        self._parts: list[memoryview | bytearray] = []

    def __repr__(self) -> str:
        return f"<Received {self.nbytes:,} bytes in {len(self._parts)} parts>"

    def add(self, data: memoryview) -> None:
        """The next piece. One that lies in memory which somebody may overwrite is copied."""
        self.nbytes += data.nbytes
        last = self._parts[-1] if self._parts else None
        if data.nbytes >= SMALL_BYTES and _keeps_little(data):
            self._parts.append(data)
        elif isinstance(last, bytearray) and len(last) < SMALL_BYTES:
            last += data
            self.copied_bytes += data.nbytes
        else:
            self._parts.append(bytearray(data))
            self.copied_bytes += data.nbytes

    def parts(self) -> Iterator[memoryview]:
        """All pieces, in order."""
        return map(memoryview, self._parts)

    def joined(self) -> memoryview:
        """All bytes in a row."""
        if len(self._parts) == 1:
            return memoryview(self._parts[0])
        self.copied_bytes += self.nbytes
        return memoryview(b"".join(self._parts))


class Messages:
    """The bytes of a read, encoded as the messages that carry them."""

    def __init__(self, nbytes: int) -> None:
        #: Of the tensor, without what is around them.
        self.nbytes = nbytes
        self.copied_bytes = 0
        self.encoded: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Messages {self.nbytes:,} bytes in {len(self.encoded)}>"

    def add(self, offset_bytes: int, data: memoryview) -> None:
        """The next message."""
        self.encoded.append(encode_download(offset_bytes, self.nbytes, data))
        self.copied_bytes += data.nbytes


def _keeps_little(data: memoryview) -> bool:
    """Whether it is nearly all of a message, which lives as long as it, and nobody can overwrite."""
    return isinstance(data.obj, bytes) and len(data.obj) - data.nbytes <= HEADER_BYTES


def write(task: WriteTask, data: memoryview) -> None:
    """Carries a write out whose bytes lie in a row."""
    if task.chunks is None:
        access.write(task.tensor.placed, task.offset_bytes, data)
    else:
        access.write_2d(task.tensor.placed, task.offset_bytes, data, task.chunks)


def write_received(task: WriteTask, data: Received) -> None:
    """Carries a write out, each piece straight to where it belongs if that is one place."""
    tensor = task.tensor.placed
    if task.chunks is not None or not tensor.is_contiguous:
        write(task, data.joined())
        return
    tensor.check_range(task.offset_bytes, data.nbytes)
    offset = task.offset_bytes
    for part in data.parts():
        access.write(tensor, offset, part)
        offset += part.nbytes


def read(task: ReadTask, out: memoryview) -> None:
    """Carries a read out, into memory in a row."""
    if task.chunks is None:
        access.read(task.tensor.placed, task.offset_bytes, out)
    else:
        access.read_2d(task.tensor.placed, task.offset_bytes, out, task.chunks)


def read_messages(task: ReadTask, chunk_bytes: int) -> Messages:
    """Carries a read out, into messages of so many bytes each; at least one."""
    made = Messages(task.size_bytes)
    whole = _in_a_row(task, made)
    for offset in range(0, max(1, task.size_bytes), chunk_bytes):
        size = min(chunk_bytes, task.size_bytes - offset)
        if whole is not None:
            made.add(offset, whole[offset : offset + size])
        else:
            part = host_bytes(np.empty(size, np.uint8))
            access.read(task.tensor.placed, task.offset_bytes + offset, part)
            made.add(offset, part)
    return made


def _in_a_row(task: ReadTask, made: Messages) -> memoryview | None:
    """All bytes of a read: in place, or copied together if they lie with gaps; None for a row of them that is
    not in this process's memory, which is fetched in parts."""
    tensor = task.tensor.placed
    if task.chunks is not None or not tensor.is_contiguous:
        whole = host_bytes(np.empty(task.size_bytes, np.uint8))
        read(task, whole)
        made.copied_bytes += task.size_bytes
        return whole
    tensor.check_range(task.offset_bytes, task.size_bytes)
    if not tensor.buffer.buffer_type.is_host:
        return None
    return _bytes_of(tensor, task.offset_bytes, task.size_bytes)


def _bytes_of(tensor: Tensor, offset_bytes: int, size_bytes: int) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    start = tensor.offset_bytes + offset_bytes
    return host_bytes(tensor.buffer.array(TensorType(DTYPES["u8"], (size_bytes,)), start, (1,)))
