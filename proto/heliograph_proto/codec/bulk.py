"""Bulk messages, encoded and decoded by hand: one copy instead of protobuf's three.

The encoders write the same bytes as protobuf for `UploadRequest` and `DownloadResponse`, and the
decoders accept every valid encoding; tests compare both with protobuf. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from heliograph_proto.codec.inline_forms import varint
from heliograph_proto.codec.packing import Bytes
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import bulk_pb2

#: Tags: (field number << 3) | wire type.
_TARGET, _UPLOAD_OFFSET = 0x0A, 0x10
_DOWNLOAD_OFFSET, _DOWNLOAD_SIZE = 0x08, 0x10
_ENCODING, _PLAIN = 0x18, 0x20
_DATA = 0x7A
_UPLOAD_NUMBERS = _UPLOAD_OFFSET, _ENCODING, _PLAIN
_DOWNLOAD_NUMBERS = _DOWNLOAD_OFFSET, _DOWNLOAD_SIZE, _ENCODING, _PLAIN
_U64 = 2**64 - 1
#: The fewest bytes of a piece of a file that is put in a keeper, but for the last one.
LEAST_PIECE_BYTES = 4096
#: Enums have 32 bits; protobuf cuts larger ones.
_LARGEST_ENCODING = 2**31 - 1


@dataclass(frozen=True, slots=True)
class UploadPiece:
    """A decoded UploadRequest."""

    #: The encoded UploadTarget; None if the message has none.
    target: bytes | None
    offset_bytes: int
    #: A view of the message.
    data: memoryview
    #: The size of the whole message.
    message_bytes: int = field(default=0, compare=False)
    #: The form of the data, and of a packed piece its plain bytes.
    encoding: int = 0
    plain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DownloadPiece:
    """A decoded DownloadResponse."""

    offset_bytes: int
    size_bytes: int
    #: A view of the message.
    data: memoryview
    #: The form of the data, and of a packed piece its plain bytes.
    encoding: int = 0
    plain_bytes: int = 0


def encode_upload(
    target: bytes | None, offset_bytes: int, data: Bytes, encoding: int = 0, plain_bytes: int = 0
) -> bytes:
    """Encode an UploadRequest; `target` is an encoded UploadTarget. Copies the data once."""
    head = b"" if target is None else bytes((_TARGET,)) + varint(len(target)) + target
    return _with_data(head + _number(_UPLOAD_OFFSET, offset_bytes), data, encoding, plain_bytes)


def encode_download(
    offset_bytes: int, size_bytes: int, data: Bytes, encoding: int = 0, plain_bytes: int = 0
) -> bytes:
    """Encode a DownloadResponse. Copies the data once."""
    head = _number(_DOWNLOAD_OFFSET, offset_bytes) + _number(_DOWNLOAD_SIZE, size_bytes)
    return _with_data(head, data, encoding, plain_bytes)


def _number(tag: int, value: int) -> bytes:
    return bytes((tag,)) + varint(value) if value else b""


def _with_data(head: bytes, data: Bytes, encoding: int, plain_bytes: int) -> bytes:
    if encoding:
        head += _number(_ENCODING, encoding) + _number(_PLAIN, plain_bytes)
    if not (size := memoryview(data).nbytes):
        return head
    return b"".join((head, bytes((_DATA,)), varint(size), data))


def decode_upload(message: bytes) -> UploadPiece:
    """Raises ProtocolError."""
    target: bytes | None = None
    numbers = {_UPLOAD_OFFSET: 0, _ENCODING: 0, _PLAIN: 0}
    for tag, value, begin in _fields(message, _UPLOAD_NUMBERS, (_TARGET, _DATA)):
        if tag == _ENCODING and value > _LARGEST_ENCODING:
            break
        if tag in numbers:
            numbers[tag] = value
        elif tag == _TARGET and begin + value < len(message):
            target = message[begin : begin + value]
        elif tag == _DATA and begin + value == len(message):
            offset, encoding, plain = numbers.values()
            return UploadPiece(target, offset, memoryview(message)[begin:], len(message), encoding, plain)
        else:
            break
    found = _decode_any(bulk_pb2.UploadRequest, message)
    given = found.target.SerializeToString() if found.HasField("target") else None
    data = memoryview(found.data)
    return UploadPiece(given, found.offset_bytes, data, len(message), int(found.encoding), found.plain_bytes)


def decode_download(message: bytes) -> DownloadPiece:
    """Raises ProtocolError."""
    numbers = {_DOWNLOAD_OFFSET: 0, _DOWNLOAD_SIZE: 0, _ENCODING: 0, _PLAIN: 0}
    for tag, value, begin in _fields(message, _DOWNLOAD_NUMBERS, (_DATA,)):
        if tag == _ENCODING and value > _LARGEST_ENCODING:
            break
        if tag in numbers:
            numbers[tag] = value
        elif begin + value == len(message):
            offset, size, encoding, plain = numbers.values()
            return DownloadPiece(offset, size, memoryview(message)[begin:], encoding, plain)
        else:
            break
    found = _decode_any(bulk_pb2.DownloadResponse, message)
    data = memoryview(found.data)
    return DownloadPiece(found.offset_bytes, found.size_bytes, data, int(found.encoding), found.plain_bytes)


def _fields(
    message: bytes, numbers: tuple[int, ...], blobs: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield (tag, value, offset after the value) of fields in the form of the encoders, each once.

    The value of a blob is its length. Stops at anything else; protobuf then decodes the message,
    much faster than this would.
    """
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
    """Return a number and the offset after it; None if it is cut off or has more than 64 bits."""
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return (value, place) if value <= _U64 else None
    return None


def _decode_any(kind: type[bulk_pb2.UploadRequest] | type[bulk_pb2.DownloadResponse], message: bytes) -> Any:
    """Decode a valid encoding that no known peer writes. Raises ProtocolError."""
    try:
        return kind.FromString(message)
    except Exception:
        raise ProtocolError("a piece of a transfer cannot be decoded") from None


def encode_piece(data: Bytes) -> bytes:
    """Encode a `PutRequest` or `GetResponse` that has data alone. Copies the data once."""
    return _with_data(b"", data, 0, 0)


def decode_piece(message: bytes) -> memoryview | None:
    """Return the data of such a message, as a view of it; None for any other message, which
    protobuf decodes."""
    if message[:1] == bytes((_DATA,)):
        found = _read_varint(message, 1)
        if found is not None and sum(found) == len(message):
            return memoryview(message)[found[1] :]
    return None
