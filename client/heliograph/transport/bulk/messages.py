"""Cutting the bytes of a transfer into messages, and joining them again, for both gRPC shells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from heliograph.graph.files.mapped_files import readable
from heliograph_proto.codec.bulk import decode_download, encode_upload
from heliograph_proto.codec.packing import Bytes, Encoding, check_piece, unpack
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2

#: Returns a piece as it is sent.
Pack: TypeAlias = Callable[[memoryview], tuple[Encoding, Bytes]]


def as_it_is(piece: memoryview) -> tuple[Encoding, Bytes]:
    """Return a piece that is not packed."""
    return Encoding.PLAIN, piece


def upload_messages(
    target: bulk_pb2.UploadTarget,
    data: memoryview,
    chunk_bytes: int,
    start_bytes: int = 0,
    pack: Pack = as_it_is,
) -> Iterator[bytes]:
    """Yield encoded UploadRequests for bytes, from byte `start_bytes` on; at least one."""
    header = target.SerializeToString()
    for offset in range(start_bytes, max(data.nbytes, start_bytes + 1), chunk_bytes):
        chunk = readable(data[offset : offset + chunk_bytes])
        encoding, packed = pack(chunk)
        yield encode_upload(header if offset == start_bytes else None, offset, packed, encoding, chunk.nbytes)


def upload_target(
    session: bytes, target: int | bytes, size_bytes: int, attempt: int = 0
) -> bulk_pb2.UploadTarget:
    """Return the target of an upload: a transfer's number, or a content's digest."""
    if isinstance(target, bytes):
        return bulk_pb2.UploadTarget(session=session, digest=target, size_bytes=size_bytes)
    return bulk_pb2.UploadTarget(session=session, transfer=target, size_bytes=size_bytes, attempt=attempt)


class Receiver:
    """A writer of a download's pieces into memory, which checks that they come in order and fit.

    `encodings` are those that packed pieces may have. The bytes before `start_bytes` are there.
    """

    def __init__(self, out: memoryview, encodings: Collection[int] = (), start_bytes: int = 0) -> None:
        self._out, self._encodings = out, encodings
        self._received_bytes = start_bytes
        #: The bytes that came in messages, packed or not, and those that were copied out of them.
        self.came_bytes = self.copied_bytes = 0

    def piece(self, message: bytes) -> None:
        """Write the next piece. Raises ProtocolError."""
        found = decode_download(message)
        data, size, offset = found.data, self._out.nbytes, found.offset_bytes
        end = offset + (found.plain_bytes if found.encoding else data.nbytes)
        if offset != self._received_bytes or found.size_bytes != size or end > size:
            raise ProtocolError(
                f"a download of {size} bytes got bytes {offset} to {end} of {found.size_bytes}"
            )
        if found.encoding:
            check_piece(found.encoding, found.plain_bytes, data.nbytes, size, self._encodings)
            data = memoryview(unpack(found.encoding, data, found.plain_bytes))
        self._out[offset:end] = data
        self.came_bytes += found.data.nbytes
        self.copied_bytes += data.nbytes
        self._received_bytes = end

    @property
    def received_bytes(self) -> int:
        """The bytes that are there."""
        return self._received_bytes

    def finish(self) -> None:
        """End the download. Raises ProtocolError if pieces are missing."""
        if self._received_bytes != self._out.nbytes:
            raise ProtocolError(f"{self._received_bytes} of {self._out.nbytes} bytes arrived")
