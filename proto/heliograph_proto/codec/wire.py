"""Requests in several messages, by protobuf's wire format, without decoding. Pure.

Protobuf joins encoded messages that follow each other: it appends lists and merges fields that are
messages. So a request that is too large for one message travels as several messages of its type.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from heliograph_proto.codec.inline_forms import varint
from heliograph_proto.errors import LimitExceededError

#: The wire types: the sizes of fixed ones, and that of a length with so many bytes after it.
_FIXED = {1: 8, 5: 4}
_NUMBER, _BLOB = 0, 2
#: The most bytes of the tag and length around a piece of a field.
_HEAD_BYTES = 16


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number and the offset after it. Raises DecodeError."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise DecodeError("a number is cut off, or has more than 64 bits")


def field_at(data: bytes, place: int) -> tuple[int, int, int]:
    """Return the tag of the field at an offset, and the offsets of its value and after it.

    Raises DecodeError.
    """
    tag, place = read_varint(data, place)
    value = place
    if tag & 7 == _BLOB:
        size, value = read_varint(data, place)
        place = value + size
    elif tag & 7 == _NUMBER:
        _, place = read_varint(data, place)
    elif tag & 7 in _FIXED:
        place += _FIXED[tag & 7]
    else:
        raise DecodeError("a field of an unknown kind")
    if place > len(data):
        raise DecodeError("a field is cut off")
    return tag, value, place


def fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, offset, offset of the value, offset after it) of each field. Raises
    DecodeError."""
    place, end = 0, len(data)
    while place < end:
        start, tag = place, data[place]
        # Most fields have a tag and a length of one byte each.
        if tag & 0x87 == _BLOB and start + 1 < end and (size := data[start + 1]) < 0x80:
            value = start + 2
            if (place := value + size) > end:
                raise DecodeError("a field is cut off")
        else:
            tag, value, place = field_at(data, place)
        yield tag, start, value, place


def split(data: bytes, kind: Descriptor, most_bytes: int) -> list[bytes]:
    """Split an encoded message into messages of at most `most_bytes` that give it when joined.

    Raises LimitExceededError for a field that is larger and cannot be split.
    """
    if len(data) <= most_bytes:
        return [data]
    pieces: list[bytes] = []
    begin = 0
    for tag, start, value, end in fields(data):
        if begin < start and end - begin > most_bytes:
            pieces.append(data[begin:start])
            begin = start
        if end - start > most_bytes:
            pieces += _split_field(tag, data[value:end], kind, most_bytes)
            begin = end
    return [*pieces, data[begin:]] if begin < len(data) else pieces


def _split_field(tag: int, data: bytes, kind: Descriptor, most_bytes: int) -> Iterator[bytes]:
    field = kind.fields_by_number[tag >> 3]
    room = most_bytes - _HEAD_BYTES
    if field.message_type is None or field.is_repeated or room <= 0:
        raise LimitExceededError(
            f"{kind.name}.{field.name} has an element of {len(data):,} bytes; one message to this server "
            f"has at most {most_bytes:,}",
            advice="make it smaller, or raise message_bytes in the server's configuration",
        )
    for piece in split(data, field.message_type, room):
        yield varint(tag) + varint(len(piece)) + piece


def cut_out(data: bytes, path: tuple[int, ...]) -> tuple[bytes, bytes | None]:
    """Return a message without a field that is a message, given by the numbers of the messages
    around it and its own, and the encoded field; None if there is none. Raises DecodeError."""
    rest: list[bytes] = []
    found: list[bytes] = []
    for tag, start, value, end in fields(data):
        if tag != path[0] << 3 | _BLOB:
            rest.append(data[start:end])
        elif len(path) == 1:
            found.append(data[value:end])
        else:
            outer, inner = cut_out(data[value:end], path[1:])
            rest += [varint(tag), varint(len(outer)), outer]
            found += [] if inner is None else [inner]
    return b"".join(rest), b"".join(found) if found else None


def leading_bytes(data: bytes, path: tuple[int, ...]) -> bytes:
    """Return the bytes of a field that is the first one of a message, and of the messages around
    it, by their numbers. Empty if another field is first. Raises DecodeError."""
    for number in path:
        tag, place = read_varint(data, 0) if data else (0, 0)
        if tag != number << 3 | _BLOB:
            return b""
        size, place = read_varint(data, place)
        data = data[place : place + size]
    return data
