"""Bulk messages, encoded and decoded by hand: one copy instead of protobuf's three.

The bytes equal those of `bulk_pb2.UploadRequest`, and every encoding of `bulk_pb2.DownloadResponse` is
understood; tests hold both against protobuf's own code.
"""

from __future__ import annotations

from collections.abc import Iterator

from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2

#: Tags: (field number << 3) | wire type.
_UPLOAD_TARGET, _UPLOAD_OFFSET = b"\x0a", b"\x10"
_DOWNLOAD_OFFSET, _DOWNLOAD_SIZE = 0x08, 0x10
_DATA = 0x7A


def varint(value: int) -> bytes:
    """A number of 0 or more in protobuf's base-128 form."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def upload_messages(
    target: bulk_pb2.UploadTarget, data: memoryview, chunk_bytes: int, start_bytes: int = 0
) -> Iterator[bytes]:
    """Encoded UploadRequests for bytes, from byte `start_bytes` on; at least one."""
    header = target.SerializeToString()
    first = _UPLOAD_TARGET + varint(len(header)) + header
    for offset in range(start_bytes, max(data.nbytes, start_bytes + 1), chunk_bytes):
        chunk = data[offset : offset + chunk_bytes]
        yield encode_upload(first if offset == start_bytes else b"", offset, chunk)


def encode_upload(target: bytes, offset: int, chunk: memoryview) -> bytes:
    """One UploadRequest; `target` is its encoded first field, or empty."""
    parts = [target]
    if offset:
        parts += [_UPLOAD_OFFSET, varint(offset)]
    if chunk.nbytes:
        parts += [bytes((_DATA,)), varint(chunk.nbytes)]
    return b"".join((*parts, chunk))


def upload_target(session: bytes, target: int | bytes, size_bytes: int) -> bulk_pb2.UploadTarget:
    """What an upload is for: a transfer's number, or a content's digest."""
    if isinstance(target, bytes):
        return bulk_pb2.UploadTarget(session=session, digest=target, size_bytes=size_bytes)
    return bulk_pb2.UploadTarget(session=session, transfer=target, size_bytes=size_bytes)


def decode_download(message: bytes) -> tuple[int, int, memoryview]:
    """(offset, size in all, bytes) of a DownloadResponse. Raises ProtocolError."""
    offset = size = 0
    place, end = 0, len(message)
    while place < end:
        tag = message[place]
        if tag not in (_DOWNLOAD_OFFSET, _DOWNLOAD_SIZE, _DATA):
            return _decode_slowly(message)
        value, place = _read_varint(message, place + 1)
        if tag == _DOWNLOAD_OFFSET:
            offset = value
        elif tag == _DOWNLOAD_SIZE:
            size = value
        elif place + value == end:
            return offset, size, memoryview(message)[place:]
        else:
            return _decode_slowly(message)
    return offset, size, memoryview(b"")


def _decode_slowly(message: bytes) -> tuple[int, int, memoryview]:
    """For encodings that no known server writes, but that protobuf allows."""
    try:
        decoded = bulk_pb2.DownloadResponse.FromString(message)
    except Exception:
        raise ProtocolError("a piece of a download could not be read") from None
    return decoded.offset_bytes, decoded.size_bytes, memoryview(decoded.data)


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ProtocolError("a piece of a download is cut off")


class Receiver:
    """Puts the pieces of a download into memory, checking that they come in order and fit."""

    def __init__(self, out: memoryview) -> None:
        self._out = out
        self._received_bytes = 0

    def piece(self, message: bytes) -> None:
        """The next piece. Raises ProtocolError."""
        offset, size, data = decode_download(message)
        end = offset + data.nbytes
        if offset != self._received_bytes or size != self._out.nbytes or end > size:
            raise ProtocolError(
                f"a download of {self._out.nbytes} bytes: bytes {offset} to {end} of {size} came"
            )
        self._out[offset:end] = data
        self._received_bytes = end

    def finish(self) -> None:
        """No more pieces come. Raises ProtocolError if some are missing."""
        if self._received_bytes != self._out.nbytes:
            raise ProtocolError(f"{self._received_bytes} of {self._out.nbytes} bytes came")
