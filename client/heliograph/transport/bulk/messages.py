"""Cutting the bytes of a transfer into messages, and joining them again, for both gRPC shells."""

from __future__ import annotations

from collections.abc import Iterator

from heliograph_proto.codec.bulk import decode_download, encode_upload
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2


def upload_messages(
    target: bulk_pb2.UploadTarget, data: memoryview, chunk_bytes: int, start_bytes: int = 0
) -> Iterator[bytes]:
    """Yield encoded UploadRequests for bytes, from byte `start_bytes` on; at least one."""
    header = target.SerializeToString()
    for offset in range(start_bytes, max(data.nbytes, start_bytes + 1), chunk_bytes):
        chunk = data[offset : offset + chunk_bytes]
        yield encode_upload(header if offset == start_bytes else None, offset, chunk)


def upload_target(session: bytes, target: int | bytes, size_bytes: int) -> bulk_pb2.UploadTarget:
    """Return the target of an upload: a transfer's number, or a content's digest."""
    if isinstance(target, bytes):
        return bulk_pb2.UploadTarget(session=session, digest=target, size_bytes=size_bytes)
    return bulk_pb2.UploadTarget(session=session, transfer=target, size_bytes=size_bytes)


class Receiver:
    """A writer of a download's pieces into memory, which checks that they come in order and fit."""

    def __init__(self, out: memoryview) -> None:
        self._out = out
        self._received_bytes = 0
        #: The bytes that were copied out of messages.
        self.copied_bytes = 0

    def piece(self, message: bytes) -> None:
        """Write the next piece. Raises ProtocolError."""
        found = decode_download(message)
        size, end = self._out.nbytes, found.offset_bytes + found.data.nbytes
        if found.offset_bytes != self._received_bytes or found.size_bytes != size or end > size:
            raise ProtocolError(
                f"a download of {size} bytes got bytes {found.offset_bytes} to {end} of {found.size_bytes}"
            )
        self._out[found.offset_bytes : end] = found.data
        self.copied_bytes += found.data.nbytes
        self._received_bytes = end

    def finish(self) -> None:
        """End the download. Raises ProtocolError if pieces are missing."""
        if self._received_bytes != self._out.nbytes:
            raise ProtocolError(f"{self._received_bytes} of {self._out.nbytes} bytes arrived")
