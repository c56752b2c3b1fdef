"""Bulk messages, encoded and decoded by hand: one copy instead of protobuf's three.

What is written has the bytes that protobuf would write for `UploadRequest` and `DownloadResponse`, and
every encoding of them is understood; tests hold both against protobuf's own code. Pure: bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from heliograph_proto.codec.inline_forms import varint
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2

#: Tags: (field number << 3) | wire type.
_TARGET, _UPLOAD_OFFSET = 0x0A, 0x10
_DOWNLOAD_OFFSET, _DOWNLOAD_SIZE = 0x08, 0x10
_DATA = 0x7A
_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class UploadPiece:
    """A decoded UploadRequest."""

    #: The encoded UploadTarget; None where the message has none.
    target: bytes | None
    offset_bytes: int
    #: A view of the message.
    data: memoryview
    #: The whole message.
    message_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class DownloadPiece:
    """A decoded DownloadResponse."""

    offset_bytes: int
    size_bytes: int
    #: A view of the message.
    data: memoryview


def encode_upload(target: bytes | None, offset_bytes: int, data: memoryview) -> bytes:
    """One UploadRequest; `target` is an encoded UploadTarget. Copies the data once."""
    head = b"" if target is None else bytes((_TARGET,)) + varint(len(target)) + target
    return _with_data(head + _number(_UPLOAD_OFFSET, offset_bytes), data)


def encode_download(offset_bytes: int, size_bytes: int, data: memoryview) -> bytes:
    """One DownloadResponse. Copies the data once."""
    head = _number(_DOWNLOAD_OFFSET, offset_bytes) + _number(_DOWNLOAD_SIZE, size_bytes)
    return _with_data(head, data)


def _number(tag: int, value: int) -> bytes:
    return bytes((tag,)) + varint(value) if value else b""


def _with_data(head: bytes, data: memoryview) -> bytes:
    if not data.nbytes:
        return head
    return b"".join((head, bytes((_DATA,)), varint(data.nbytes), data))


def decode_upload(message: bytes) -> UploadPiece:
    """Raises ProtocolError."""
    target: bytes | None = None
    offset = 0
    for tag, value, begin in _fields(message, (_UPLOAD_OFFSET,), (_TARGET, _DATA)):
        if tag == _UPLOAD_OFFSET:
            offset = value
        elif tag == _TARGET and begin + value < len(message):
            target = message[begin : begin + value]
        elif tag == _DATA and begin + value == len(message):
            return UploadPiece(target, offset, memoryview(message)[begin:], len(message))
        else:
            break
    found = _slowly(bulk_pb2.UploadRequest, message)
    given = found.target.SerializeToString() if found.HasField("target") else None
    return UploadPiece(given, found.offset_bytes, memoryview(found.data), len(message))


def decode_download(message: bytes) -> DownloadPiece:
    """Raises ProtocolError."""
    offset = size = 0
    for tag, value, begin in _fields(message, (_DOWNLOAD_OFFSET, _DOWNLOAD_SIZE), (_DATA,)):
        if tag == _DOWNLOAD_OFFSET:
            offset = value
        elif tag == _DOWNLOAD_SIZE:
            size = value
        elif begin + value == len(message):
            return DownloadPiece(offset, size, memoryview(message)[begin:])
        else:
            break
    found = _slowly(bulk_pb2.DownloadResponse, message)
    return DownloadPiece(found.offset_bytes, found.size_bytes, memoryview(found.data))


def _fields(
    message: bytes, numbers: tuple[int, ...], blobs: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """(tag, value, where what follows begins) of fields in the form that we write, each once: of a blob the
    value is its length. Ends at whatever else there is, which protobuf then reads, and much faster."""
    place, left = 0, {*numbers, *blobs}
    while place < len(message):
        tag = message[place]
        found = _read_varint(message, place + 1)
        if found is None or tag not in left:
            return
        left.remove(tag)
        value, place = found
        yield tag, value, place
        if tag in blobs:
            place += value


def _read_varint(message: bytes, place: int) -> tuple[int, int] | None:
    """A number and where what follows begins; None where it is cut off or has more than 64 bits."""
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return (value, place) if value <= _U64 else None
    return None


def _slowly(kind: type[bulk_pb2.UploadRequest] | type[bulk_pb2.DownloadResponse], message: bytes) -> Any:
    """For encodings that nobody known writes, but that protobuf allows. Raises ProtocolError."""
    try:
        return kind.FromString(message)
    except Exception:
        raise ProtocolError("a piece of a transfer could not be read") from None
