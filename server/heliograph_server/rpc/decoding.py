"""Bounds what decoding a request takes, by walking its wire format before protobuf decodes it.

gRPC bounds the bytes of a message. That is not enough: an empty element of a list takes two bytes
on the wire and a hundred in memory. The fields to walk come from the descriptors, so every message
is covered.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

from heliograph_proto.codec.wire import cut_out, read_varint
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import graph_pb2

#: The approximate memory of a decoded message, and of another field, besides their bytes.
MESSAGE_BYTES, FIELD_BYTES = 96, 32
#: The approximate memory for each byte of packed numbers.
_NUMBER_BYTES = 8
#: The most memory of a decoded message for each of its bytes: an empty element of a list has two.
MOST_GROWTH = MESSAGE_BYTES // 2
#: The memory of a decoded request whose fields are counted on the event loop, in about 1 ms.
_QUICK_BYTES = 256 * 1024
#: The most memory of decoded commands for each byte of the largest message.
_COMMANDS_GROWTH = 16
#: The most memory of the fields of a message whose elements lie in few of them.
_FEW_FIELDS_BYTES = 16 * 2**20
#: Messages whose fields need not be counted: at worst they take 1 MB, and 2 ms.
_SMALL_BYTES = 16 * 1024
#: Other threads have their turn after so many elements, which take less than a millisecond.
_TURN = 256
#: The message that is not decoded with its request.
_GRAPH = graph_pb2.Graph.DESCRIPTOR.full_name
#: Bytes after the tags of fields with a fixed size.
_FIXED = {1: 8, 5: 4}

_LIMITS = Limits()

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field with a length."""

    #: Its memory, and that for each of its bytes.
    memory_bytes: int
    bytes_per_byte: int
    #: The fields of its message by tag; None if its bytes bound its memory.
    inside: dict[int, _Field] | None = None
    #: Its name if it is a list that occurs once in a request; otherwise empty.
    listed: str = ""


_OTHER = _Field(FIELD_BYTES, _NUMBER_BYTES)
_UNCOUNTED = _Field(FIELD_BYTES, 0)


@cache
def _fields_of(kind: Descriptor, occurs_once: bool = True) -> dict[int, _Field]:
    """Return the fields of a kind of message, by tag. `occurs_once`: it is not in a list."""
    found = {}
    for field in kind.fields:
        if (inner := field.message_type) is not None and inner.full_name == _GRAPH:
            # It stays encoded, and its pieces are few.
            found[field.number << 3 | 2] = _Field(MESSAGE_BYTES, 0, listed=field.name)
        elif inner is not None:
            once = occurs_once and not field.is_repeated
            lists = _fields_of(inner, once) if _has_lists(inner) else None
            listed = field.name if occurs_once and field.is_repeated else ""
            count = 1 + (_messages_in(inner) if lists is None else 0)
            found[field.number << 3 | 2] = _Field(MESSAGE_BYTES * count, _NUMBER_BYTES, lists, listed)
        elif field.type in (Field.TYPE_STRING, Field.TYPE_BYTES):
            # The bytes themselves count as those of the request.
            found[field.number << 3 | 2] = _Field(FIELD_BYTES, 0)
        elif field.name == "shape":
            # Its sizes are few, also where elements may be many.
            found[field.number << 3 | 2] = _OTHER
    return found


def _has_lists(kind: Descriptor) -> bool:
    """True if a message of this kind can have lists of messages or strings, at any depth."""
    return any(
        (one.is_repeated and one.cpp_type in (Field.CPPTYPE_MESSAGE, Field.CPPTYPE_STRING))
        or (one.message_type is not None and _has_lists(one.message_type))
        for one in kind.fields
    )


def _messages_in(kind: Descriptor) -> int:
    """The number of messages that one of this kind can have, at any depth, without its lists."""
    inner = [one.message_type for one in kind.fields if one.message_type is not None and not one.is_repeated]
    return sum(1 + _messages_in(one) for one in inner)


class Meter:
    """Estimates the memory of a decoded request, and refuses it beyond the limits."""

    def __init__(self, limits: Limits, most_bytes: int = 0, *, counts_numbers: bool = True) -> None:
        """`counts_numbers`: false for messages whose packed numbers may be as many as fit."""
        self._other = _OTHER if counts_numbers else _UNCOUNTED
        self._most_items = max(limits.graph_nodes, limits.in_flight_commands)
        self._most_bytes = self._left = most_bytes or limits.decoded_bytes
        self._counts: Counter[str] = Counter()
        self._until_turn = _TURN

    @property
    def counted_bytes(self) -> int:
        """The estimate so far."""
        return self._most_bytes - self._left

    def check(self, data: bytes, kind: Descriptor) -> None:
        """Count a message of the request. Raises LimitExceededError, DecodeError."""
        try:
            self._walk(data, 0, len(data), _fields_of(kind))
        except IndexError:
            raise DecodeError("a field is cut off") from None

    def _walk(self, data: bytes, place: int, end: int, fields: dict[int, _Field]) -> None:
        get, other = fields.get, self._other
        while place < end:
            tag = data[place]
            place += 1
            if tag >= 0x80:
                tag, place = read_varint(data, place - 1)
            kind = tag & 7
            if kind == 2:
                size = data[place]
                place += 1
                if size >= 0x80:
                    size, place = read_varint(data, place - 1)
                stop = place + size
                if stop > end:
                    raise DecodeError("a field is cut off")
                field = get(tag, other)
                self._left -= field.memory_bytes
                if field.listed:
                    self._count(field.listed)
                if field.inside is None:
                    self._left -= field.bytes_per_byte * size
                elif size:
                    self._walk(data, place, stop, field.inside)
                place = stop
            else:
                self._left -= FIELD_BYTES
                if kind == 0:
                    while data[place] >= 0x80:
                        place += 1
                    place += 1
                elif kind in _FIXED:
                    place += _FIXED[kind]
                else:
                    raise DecodeError("a field of an unknown kind")
            if self._left < 0:
                raise LimitExceededError(
                    "the request has too many fields: decoded it would take too much memory",
                    advice="send a smaller one",
                )

    def _count(self, name: str) -> None:
        self._counts[name] += 1
        if self._counts[name] > self._most_items:
            raise LimitExceededError(
                f"more than {self._most_items:,} {name} in one request", advice="send fewer"
            )
        self._until_turn -= 1
        if not self._until_turn:
            self._until_turn = _TURN
            time.sleep(0)


async def check(data: bytes, kind: Descriptor, limits: Limits, threads: Executor) -> None:
    """Count the fields of a message of commands on the event loop, or on a thread if they are many.

    Raises LimitExceededError, DecodeError.
    """
    try:
        Meter(limits, _QUICK_BYTES).check(data, kind)
    except LimitExceededError:
        meter = Meter(limits, _COMMANDS_GROWTH * limits.message_bytes)
        counting = threads.submit(meter.check, data, kind)
        await asyncio.wrap_future(counting)


async def decode_tensors(kind: type[M], data: bytes) -> M:
    """Decode a message that may have many elements, in few fields. Others are counted as by
    `check`, but in small messages.

    Raises LimitExceededError, DecodeError.
    """
    if len(data) <= _SMALL_BYTES:
        return kind.FromString(data)
    described: Any = kind.DESCRIPTOR
    try:
        Meter(_LIMITS, _QUICK_BYTES, counts_numbers=False).check(data, described)
    except LimitExceededError:
        meter = Meter(_LIMITS, _FEW_FIELDS_BYTES, counts_numbers=False)
        await asyncio.to_thread(meter.check, data, described)
    return kind.FromString(data)


def decode(
    parts: list[bytes], kind: type[M], limits: Limits, reserve: Callable[[int], None]
) -> tuple[M, bytes | None]:
    """Decode a request of one or several messages, which `parts` gives up, without its graph, which
    stays encoded. On a thread, as it takes long.

    `reserve` counts the memory that it will take. Raises LimitExceededError, DecodeError.
    """
    meter, message = Meter(limits), kind()
    descriptor: Any = kind.DESCRIPTOR
    for part in parts:
        meter.check(part, descriptor)
    graphs: list[bytes] = []
    if path := graph_path(descriptor):
        for place, part in enumerate(parts):
            parts[place], graph = cut_out(part, path)
            graphs += [] if graph is None else [graph]
    reserve(meter.counted_bytes + (sum(map(len, graphs)) if len(graphs) > 1 else 0))
    parts.reverse()
    while parts:
        message.MergeFromString(parts.pop())
        time.sleep(0)
    return message, b"".join(graphs) if graphs else None


@cache
def graph_path(kind: Descriptor) -> tuple[int, ...]:
    """Return the numbers of the fields that lead to the graph of a request; empty if it has
    none."""
    for one in kind.fields:
        if (inner := one.message_type) is None or one.is_repeated:
            continue
        if inner.full_name == _GRAPH:
            return (one.number,)
        if found := graph_path(inner):
            return (one.number, *found)
    return ()
