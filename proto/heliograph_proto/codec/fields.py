"""Generic conversion of dataclasses to messages, field by field, for everything off the path of a
run.

A dataclass and its message have the same fields, except for those in DIFFERENT; a field's encoding
follows from its type. Enums have the contract's numbers, `X | None` is a field that may be absent,
and dataclasses are nested messages. Unset fields have protobuf's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from heliograph_proto.codec.types import (
    decode_checked_type,
    decode_error,
    decode_type,
    encode_error,
    encode_type,
)
from heliograph_proto.devices import BufferRole, Capabilities, DeviceType, Link, MemberState, OpPath
from heliograph_proto.errors import HeliographError
from heliograph_proto.models import ModelTensor
from heliograph_proto.plans import Cause, MemoryUse, PlanInfo, Route
from heliograph_proto.sessions import LEVELS, DrainState, DrainStatus, LogLine, Traffic
from heliograph_proto.types import TensorType
from heliograph_proto.v1 import device_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)
#: The conversion of a value; None: unchanged.
Change = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Different:
    """The encoding of a field that differs from its message's."""

    #: The message's field; empty: not encoded.
    name: str
    encode: Change = None
    decode: Change = None


_REACHABILITY = {
    None: device_pb2.REACHABILITY_UNSPECIFIED,
    True: device_pb2.REACHABILITY_REACHABLE,
    False: device_pb2.REACHABILITY_UNREACHABLE,
}
_REACHABLE = {number: reachable for reachable, number in _REACHABILITY.items()}
DIFFERENT: dict[type, dict[str, Different]] = {
    Capabilities: {
        "async_": Different("async"),  # a keyword in Python
        # Host memory is of one process: a session over a connection cannot wrap it.
        "buffer_from_host": Different(""),
    },
    DrainStatus: {
        "remaining_seconds": Different("remaining_ms", lambda it: round(it * 1e3), lambda it: it / 1e3)
    },
    LogLine: {
        "time": Different("time_us", lambda it: int(it * 1e6), lambda it: it / 1e6),
        "level": Different("level", None, lambda it: it if it in LEVELS else "info"),
        "dropped": Different(""),
    },
    ModelTensor: {"type": Different("type", encode_type, decode_checked_type)},
    PlanInfo: {"pipeline": Different("pipeline", None, lambda it: it or 1)},
    Traffic: {"written_bytes": Different("received_bytes"), "read_bytes": Different("sent_bytes")},
    Link: {
        "a": Different("source"),
        "b": Different("destination"),
        "reachable": Different("reachability", _REACHABILITY.__getitem__, _REACHABLE.get),
    },
}
#: The decoding of a number that only a newer peer knows.
NEWER: dict[type[Enum], Enum] = {
    BufferRole: BufferRole.EXTRA,
    # The weakest cause.
    Cause: Cause.FIRST_THAT_CAN,
    # Some route between hosts.
    Route: Route.DIRECT,
    DeviceType: DeviceType.ACCELERATOR,
    # A state that accepts no new sessions.
    DrainState: DrainState.DRAINING,
    MemberState: MemberState.JOINING,
    MemoryUse: MemoryUse.RESULTS,
    OpPath: OpPath.UNKNOWN,
}


def encode(found: Any, message: type[M]) -> M:
    """Encode a dataclass as a message of this type."""
    return cast(M, _codec(type(found), message).encode(found))


def decode(message: Message, kind: type[T]) -> T:
    """Decode a message into a dataclass. Raises InvalidArgumentError for invalid tensor types."""
    return cast(T, _codec(kind, type(message)).decode(message))


def encode_all(found: Iterable[Any], message: type[M]) -> list[M]:
    """Encode each dataclass as a message of this type."""
    return [encode(one, message) for one in found]


def decode_all(messages: Iterable[Message], kind: type[T]) -> tuple[T, ...]:
    """Decode each message into a dataclass."""
    return tuple(decode(one, kind) for one in messages)


class _Codec:
    """The conversion between a dataclass and a message, derived once."""

    def __init__(self, kind: type, message: type[Message]) -> None:
        self._kind = kind
        self._message = message
        hints, different = get_type_hints(kind), DIFFERENT.get(kind, {})
        encodings = {one.name: different.get(one.name, Different(one.name)) for one in fields(kind)}
        encodings = {attribute: one for attribute, one in encodings.items() if one.name}
        self._attributes = tuple(encodings)
        self._names = tuple(one.name for one in encodings.values())
        #: Conversions by the place of their field, and the fields that may be absent.
        self._encoders: list[tuple[int, Callable[[Any], Any]]] = []
        self._decoders: list[tuple[int, Callable[[Any], Any]]] = []
        self._optional: list[tuple[int, str]] = []
        for place, (attribute, one) in enumerate(encodings.items()):
            changes, hint = (one.encode, one.decode), hints[attribute]
            if changes == (None, None):
                inner: Any = message.DESCRIPTOR.fields_by_name[one.name].message_type
                if get_origin(hint) is UnionType:
                    self._optional.append((place, one.name))
                changes = _changes(hint, GetMessageClass(inner) if inner else None)
            for change, found in zip(changes, (self._encoders, self._decoders), strict=True):
                if change is not None:
                    found.append((place, change))

    def encode(self, found: Any) -> Message:
        values = [getattr(found, name) for name in self._attributes]
        for place, change in self._encoders:
            values[place] = change(values[place])
        return self._message(**dict(zip(self._names, values, strict=True)))

    def decode(self, message: Message) -> Any:
        values = [getattr(message, name) for name in self._names]
        for place, name in self._optional:
            if not message.HasField(name):
                values[place] = None
        for place, change in self._decoders:
            values[place] = change(values[place])
        return self._kind(**dict(zip(self._attributes, values, strict=True)))


_CODECS: dict[tuple[type, type], _Codec] = {}


def _codec(kind: type, message: type[Message]) -> _Codec:
    found = _CODECS.get((kind, message))
    if found is None:
        found = _CODECS[kind, message] = _Codec(kind, message)
    return found


def _changes(hint: Any, message: type[Message] | None) -> tuple[Change, Change]:
    """Return the conversions of a type to a field, whose messages have this type, and back."""
    inner = get_args(hint)
    if get_origin(hint) is UnionType:
        encoding, decoding = _changes(inner[0], message)
        return _unless_none(encoding), _unless_none(decoding)
    if get_origin(hint) is tuple:
        encoding, decoding = _changes(inner[0], message)
        return encoding and partial(map, encoding), partial(_as_tuple, decoding) if decoding else tuple
    if get_origin(hint) is Mapping:
        return None, dict
    if hint is TensorType:
        return encode_type, decode_type
    if hint is HeliographError:
        return encode_error, decode_error
    if message is not None and isinstance(hint, type) and is_dataclass(hint):
        inner_codec = _codec(hint, message)
        return inner_codec.encode, inner_codec.decode
    if issubclass(hint, Enum):
        known = {one.value: one for one in hint}
        return attrgetter("value"), lambda number: known.get(number, NEWER[hint])
    return None, None


def _as_tuple(change: Callable[[Any], Any], values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(change, values))


def _unless_none(change: Change) -> Change:
    return change and (lambda value: None if value is None else change(value))
