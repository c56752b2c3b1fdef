"""Mutations that know the structure: fields by their descriptors, the wire's bytes, the order of messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from fuzzing.conversations import METHODS, Conversation, Step, request_class

#: Numbers at the edges of what a field, an index, a size or a handle can be.
EDGES = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, 3.5e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "cpu0", "fake0", "\x00", "é" * 300, "../../etc/passwd", "%s%n", "a" * 5000, "\x1b[2J")
_F = FieldDescriptor
_RANGES = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
}
#: The deepest nesting of a message that is filled at random.
DEPTH = 4


class Mutator:
    """Makes new conversations of old ones. Everything random comes from `chance`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def mutated(self, one: Conversation, others: Sequence[Conversation]) -> Conversation:
        """Return a conversation with one to four changes, some of them with parts of others."""
        made = Conversation(one.name, list(one.methods), list(one.steps))
        for _ in range(self._chance.choice((1, 1, 2, 4))):
            change = self._chance.choices((self._message, self._order, self._foreign), (7, 2, 1))[0]
            change(made, others)
        return made

    def invented(self, method: str) -> Conversation:
        """Return a conversation of one call, with messages filled at random."""
        made = Conversation(f"invented {method}", [method])
        streams = METHODS[method].client_streaming
        for _ in range(self._chance.randrange(1, 4) if streams else 1):
            message = request_class(method)()
            self._fill(message, 0)
            made.steps.append(Step(0, message.SerializeToString()))
        made.steps.append(Step(0, None))
        return made

    # Whole messages

    def _message(self, made: Conversation, others: Sequence[Conversation]) -> None:
        places = [place for place, step in enumerate(made.steps) if step.message is not None]
        if not places:
            return
        place = self._chance.choice(places)
        step = made.steps[place]
        assert step.message is not None
        if self._chance.random() < 0.2:
            made.steps[place] = Step(step.call, self._torn(step.message))
            return
        message = request_class(made.methods[step.call])()
        try:
            message.ParseFromString(step.message)
        except DecodeError:
            made.steps[place] = Step(step.call, self._torn(step.message))
            return
        for _ in range(self._chance.choice((1, 1, 3))):
            self._field(message)
        try:
            made.steps[place] = Step(step.call, message.SerializeToString())
        except ValueError:
            # Text that cannot be encoded.
            made.steps[place] = Step(step.call, self._torn(step.message))

    def _order(self, made: Conversation, others: Sequence[Conversation]) -> None:
        """Drop, repeat, move or swap messages, or end a call early."""
        steps, chance = made.steps, self._chance
        if len(steps) < 2:
            return
        place, other = chance.randrange(len(steps)), chance.randrange(len(steps))
        match chance.randrange(5):
            case 0:
                del steps[place]
            case 1:
                steps.insert(other, steps[place])
            case 2:
                steps.insert(other, steps.pop(place))
            case 3:
                steps[place], steps[other] = steps[other], steps[place]
            case 4:
                steps.insert(place, Step(steps[place].call, None))

    def _foreign(self, made: Conversation, others: Sequence[Conversation]) -> None:
        """Take a message of another conversation, in a call of its own or in one that is there."""
        other = self._chance.choice(others)
        if not other.steps:
            return
        step = self._chance.choice(other.steps)
        place = self._chance.randrange(len(made.steps) + 1)
        same = [number for number, method in enumerate(made.methods) if method == other.methods[step.call]]
        if same and self._chance.random() < 0.7:
            call = self._chance.choice(same)
        else:
            call = len(made.methods)
            made.methods.append(other.methods[step.call])
        made.steps.insert(place, Step(call, step.message))

    def _torn(self, data: bytes) -> bytes:
        """Change bytes without regard to their meaning."""
        chance, torn = self._chance, bytearray(data)
        match chance.randrange(6):
            case 0:
                return bytes(torn[: chance.randrange(len(torn) + 1)])
            case 1 if torn:
                for _ in range(chance.choice((1, 1, 4))):
                    torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(8)
            case 2:
                place = chance.randrange(len(torn) + 1)
                torn[place:place] = chance.randbytes(chance.choice((1, 4, 40)))
            case 3:
                # A length that reaches far beyond the end.
                torn += bytes([chance.randrange(1, 20) << 3 | 2]) + b"\xff\xff\xff\xff\x07"
            case 4:
                # Nesting deeper than any decoder follows.
                inner = b""
                for _ in range(chance.choice((50, 150))):
                    inner = bytes([chance.choice((1, 2, 3)) << 3 | 2]) + _varint(len(inner)) + inner
                torn += inner
            case _:
                return chance.randbytes(chance.randrange(64))
        return bytes(torn)

    # Fields

    def _field(self, message: Message) -> None:
        """Change one field, at any depth."""
        holders = list(_messages_in(message))
        holder = self._chance.choice(holders)
        fields = list(holder.DESCRIPTOR.fields)
        if not fields:
            return
        present = [field for field, _ in holder.ListFields()]
        field = self._chance.choice(present if present and self._chance.random() < 0.7 else fields)
        if self._chance.random() < 0.12:
            holder.ClearField(field.name)
        elif field.is_repeated:
            self._repeated(holder, field)
        elif field.message_type is not None:
            self._fill(getattr(holder, field.name), DEPTH - 2)
            getattr(holder, field.name).SetInParent()
        else:
            setattr(holder, field.name, self._value(field, getattr(holder, field.name)))

    def _repeated(self, holder: Message, field: FieldDescriptor) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        held, chance = getattr(holder, field.name), self._chance
        choice = chance.randrange(5)
        if choice == 0 and len(held):
            del held[chance.randrange(len(held))]
        elif choice == 1 and len(held):
            copies = chance.choice((1, 1, 50))
            one = held[chance.randrange(len(held))]
            for _ in range(copies):
                held.add().CopyFrom(one) if field.message_type else held.append(one)
        elif choice == 2 and len(held) > 1:
            one, other = chance.sample(range(len(held)), 2)
            if field.message_type is None:
                held[one], held[other] = held[other], held[one]
            else:
                held[one].CopyFrom(held[other])
        elif field.message_type is not None:
            self._fill(held.add(), DEPTH - 2)
        elif len(held) and choice == 3:
            place = chance.randrange(len(held))
            held[place] = self._value(field, held[place])
        else:
            held.append(self._value(field, None))

    def _value(self, field: FieldDescriptor, old: Any) -> Any:
        chance = self._chance
        match field.cpp_type:
            case _F.CPPTYPE_BOOL:
                return not old
            case _F.CPPTYPE_ENUM:
                known = [value.number for value in field.enum_type.values]
                return chance.choice([*known, 99, 2**31 - 1, -1])
            case _F.CPPTYPE_FLOAT | _F.CPPTYPE_DOUBLE:
                return chance.choice(FLOATS)
            case _F.CPPTYPE_STRING:
                if field.type == _F.TYPE_BYTES:
                    return (
                        self._torn(old or b"")
                        if chance.random() < 0.5
                        else chance.randbytes(chance.choice((0, 16, 32, 400)))
                    )
                return chance.choice(TEXTS)
        low, high = _RANGES[field.cpp_type]
        value = (
            chance.choice(EDGES)
            if old is None or chance.random() < 0.6
            else old + chance.choice((-1, 1, 7, 4096))
        )
        return min(high, max(low, value))

    def _fill(self, message: Message, depth: int) -> None:
        """Set fields at random."""
        descriptor: Descriptor = message.DESCRIPTOR
        for field in descriptor.fields:
            if self._chance.random() < 0.5 or (field.message_type is not None and depth >= DEPTH):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                held = getattr(message, field.name)
                for _ in range(self._chance.randrange(3)):
                    if field.message_type is not None:
                        self._fill(held.add(), depth + 1)
                    else:
                        held.append(self._value(field, None))
            elif field.message_type is not None:
                self._fill(getattr(message, field.name), depth + 1)
                getattr(message, field.name).SetInParent()
            else:
                setattr(message, field.name, self._value(field, None))


def _messages_in(message: Message) -> list[Message]:
    """The message and those inside it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else [value]:
            found += _messages_in(inner)
    return found


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
