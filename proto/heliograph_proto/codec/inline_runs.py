"""Batches of commands and completions, with templates for inline runs.

A reader keeps the last few forms that it met. A message that matches one, except for its number and
the contents of the holes, is decoded by it. Protobuf decodes every other message; if that is an
inline run in the canonical encoding, the reader keeps its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from heliograph_proto import commands as c
from heliograph_proto.codec.commands import decode_completions, encode_command, encode_completions
from heliograph_proto.codec.fields import decode, encode
from heliograph_proto.codec.inline_forms import (
    FRAME_TAG,
    InlineResult,
    InlineRun,
    ResultForm,
    RunForm,
    varint,
)
from heliograph_proto.trace_context import TRACE_BYTES
from heliograph_proto.v1 import command_pb2

#: The maximum number of forms that a reader keeps.
KNOWN_FORMS = 64
#: The maximum message size of a kept form: longer messages take longer to copy than to decode.
MAX_FORM_BYTES = 2**18

_TAG, _SEQUENCE = FRAME_TAG[0], 0x08
_F = TypeVar("_F", RunForm, ResultForm)

#: The tags of `received` and `downloaded` in CommandBatch.
_RECEIVED_TAG, _DOWNLOADED_TAG = 0x28, 0x32
#: The most transfers of one `Acknowledged` that is read.
MOST_TOLD = 512
#: The most bytes of a batch that only acknowledges.
_LONGEST_RECEIVED = 11

#: A part of a batch from a reader: an inline run of a known form, another command, or what the
#: client acknowledges.
Received: TypeAlias = "InlineRun | command_pb2.Command | c.Acknowledged"


@dataclass(frozen=True, slots=True)
class First:
    """The first CommandBatch of a stream, without its commands."""

    session: bytes
    command_socket: bool = False
    attach: c.Attach | None = None


def encode_first(session: bytes, command_socket: bool = False, attach: c.Attach | None = None) -> bytes:
    """Encode the first CommandBatch of a stream."""
    return command_pb2.CommandBatch(
        session=session,
        command_socket=command_socket,
        attach=None if attach is None else encode(attach, command_pb2.Attach),
    ).SerializeToString()


def decode_first(data: bytes) -> First:
    """Decode the first CommandBatch of a stream, which has no commands then. Raises DecodeError."""
    message = command_pb2.CommandBatch.FromString(data)
    attach = decode(message.attach, c.Attach) if message.HasField("attach") else None
    return First(message.session, message.command_socket, attach)


def encode_commands(
    commands: Iterable[c.Command | InlineRun], acknowledged: c.Acknowledged | None = None
) -> bytes:
    """Encode a CommandBatch. The acknowledged comes first."""
    frames = [] if acknowledged is None else [encode_acknowledged(acknowledged)]
    for one in commands:
        if type(one) is InlineRun:
            frames.append(one.frame())
        else:
            assert isinstance(one, c.Command)
            message = encode_command(one).SerializeToString()
            frames.append(FRAME_TAG + varint(len(message)) + message)
    return b"".join(frames)


def encode_acknowledged(acknowledged: c.Acknowledged) -> bytes:
    """Encode what a client acknowledges, as a part of a CommandBatch."""
    data = b""
    if acknowledged.received:
        data = b"\x28" + varint(acknowledged.received)
    if acknowledged.downloaded:
        numbers = b"".join(map(varint, acknowledged.downloaded))
        data += b"\x32" + varint(len(numbers)) + numbers
    return data


def encode_results(batch: c.CompletionBatch) -> bytes:
    """Encode a CompletionBatch. Completions keep their order, in which waiters wake."""
    head = replace(batch, completions=())
    frames = [encode_completions(head).SerializeToString()]
    for one in batch.completions:
        if isinstance(one, InlineResult):
            frames.append(one.frame())
        else:
            frames.append(encode_completions(c.CompletionBatch(0, (one,))).SerializeToString())
    return b"".join(frames)


def encode_result(result: InlineResult) -> bytes:
    """Encode a CompletionBatch of one completion that acknowledges everything up to itself."""
    return b"\x08" + varint(result.sequence) + result.frame()


class _Forms(Generic[_F]):
    """The known forms of a reader, by the size of the part after the sequence number."""

    def __init__(self) -> None:
        self._forms: dict[int, list[_F]] = {}
        self._count = 0

    def find(self, buffer: bytes, start: int, end: int) -> tuple[_F, int, list[bytes]] | None:
        """Return the form of a message, its sequence number, and the contents of its holes."""
        if start + 1 >= end or buffer[start] != _SEQUENCE:
            return None
        sequence, at = _varint_at(buffer, start + 1, end)
        for form in self._forms.get(end - at, ()):
            if (holes := form.template.match(buffer, at)) is not None:
                return form, sequence, holes
        return None

    def add(self, form: _F) -> None:
        """Keep a form; beyond KNOWN_FORMS, drop all others."""
        if self._count >= KNOWN_FORMS:
            self._forms.clear()
            self._count = 0
        self._forms.setdefault(form.template.size_bytes, []).append(form)
        self._count += 1


def large_parts(data: bytes, size_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a CommandBatch that `CommandReader` decodes at once and that are larger
    than a size; each is a CommandBatch."""
    at = 0
    while at < len(data):
        frame = _frame_at(data, at)
        end = len(data) if frame is None else frame[1]
        if end - at > size_bytes:
            yield data[at:end]
        at = end


def received_only(data: bytes) -> int:
    """Return the number that a CommandBatch acknowledges if it has nothing else; otherwise 0."""
    if not 2 <= len(data) <= _LONGEST_RECEIVED or data[0] != _RECEIVED_TAG:
        return 0
    number, at = _varint_at(data, 1, len(data))
    return number if at == len(data) else 0


def _acknowledged_at(data: bytes, at: int) -> tuple[c.Acknowledged, int] | None:
    """Return a part of a batch that acknowledges, and the offset after it; None if it is another
    part."""
    if data[at] == _RECEIVED_TAG:
        number, at = _varint_at(data, at + 1, len(data))
        return (c.Acknowledged(number), at) if at <= len(data) else None
    if data[at] != _DOWNLOADED_TAG:
        return None
    length, at = _varint_at(data, at + 1, len(data))
    end, numbers = at + length, list[int]()
    if end > len(data) or length > MOST_TOLD:
        # Protobuf decodes a long list far sooner.
        return None
    while at < end:
        number, at = _varint_at(data, at, end)
        numbers.append(number)
    return (c.Acknowledged(0, tuple(numbers)), end) if at == end else None


def _rest(data: bytes) -> tuple[Iterable[c.Acknowledged], Iterable[command_pb2.Command]]:
    """Decode a batch by protobuf: what it acknowledges, and its commands."""
    message = command_pb2.CommandBatch.FromString(data)
    return _told_in(message), message.commands


def _told_in(message: command_pb2.CommandBatch) -> Iterator[c.Acknowledged]:
    """Yield what a batch acknowledges: of a long list, a part at a time."""
    if message.received or message.downloaded:
        yield c.Acknowledged(message.received, tuple(message.downloaded[:MOST_TOLD]))
    for start in range(MOST_TOLD, len(message.downloaded), MOST_TOLD):
        yield c.Acknowledged(0, tuple(message.downloaded[start : start + MOST_TOLD]))


class CommandReader:
    """A decoder of the CommandBatches of one stream."""

    def __init__(self) -> None:
        self._forms: _Forms[RunForm] = _Forms()

    def read(self, data: bytes) -> Iterator[Received]:
        """Yield the parts of a batch, whose commands may be very many. Raises DecodeError."""
        at = 0
        while at < len(data):
            frame = _frame_at(data, at)
            if frame is None:
                if (found := _acknowledged_at(data, at)) is not None:
                    at = found[1]
                    yield found[0]
                    continue
                # Another field of the batch; the rest of a message is a message.
                more, commands = _rest(data[at:])
                yield from more
                yield from commands
                return
            at = frame[1]
            yield self._read_one(data, *frame)

    def single(self, data: bytes) -> InlineRun | None:
        """Return the run if the batch is exactly one run of a known form, else None."""
        frame = _frame_at(data, 0) if data else None
        if frame is None or frame[1] != len(data):
            return None
        found = self._forms.find(data, *frame)
        if found is None:
            return None
        form, sequence, holes = found
        return InlineRun.traced(*found) if form.is_traced else InlineRun(form, holes, sequence)

    def _read_one(self, data: bytes, start: int, end: int) -> Received:
        if (found := self._forms.find(data, start, end)) is not None:
            form, sequence, holes = found
            known = InlineRun.traced(*found) if form.is_traced else InlineRun(form, holes, sequence)
            if known is not None:
                return known
        frame = data[start:end]
        message = command_pb2.Command.FromString(frame)
        run = _inline_run(message) if len(frame) <= MAX_FORM_BYTES else None
        if run is not None and run.frame().endswith(frame):
            self._forms.add(run.form)
        return message


class CompletionReader:
    """A decoder of the CompletionBatches of one stream."""

    def __init__(self) -> None:
        self._forms: _Forms[ResultForm] = _Forms()

    def read(self, data: bytes) -> c.CompletionBatch:
        """Decode a batch. Raises DecodeError."""
        through, at = 0, 0
        if data[:1] == b"\x08":
            through, at = _varint_at(data, 1, len(data))
        found: list[InlineResult] = []
        while at < len(data):
            frame = _frame_at(data, at)
            one = None if frame is None else self._forms.find(data, *frame)
            if frame is None or one is None:
                return self._read_all(data)
            form, sequence, holes = one
            found.append(InlineResult.matched(form, sequence, holes))
            at = frame[1]
        if at > len(data):
            return self._read_all(data)
        return c.CompletionBatch(through, tuple(found))

    def _read_all(self, data: bytes) -> c.CompletionBatch:
        message = command_pb2.CompletionBatch.FromString(data)
        batch = decode_completions(message)
        if len(data) <= MAX_FORM_BYTES:
            for one, encoded in zip(batch.completions, message.completions, strict=True):
                self._learn(one, encoded)
        return batch

    def _learn(self, one: c.Completion | InlineResult, encoded: command_pb2.Completion) -> None:
        is_result = (
            one.error is None and one.outputs and one.device_us and all(data for _, data in one.outputs)
        )
        if not is_result or one.sequence < 1:
            return
        frame = encoded.SerializeToString()
        form = ResultForm([(place, len(data)) for place, data in one.outputs])
        result = InlineResult(form, one.sequence, [bytes(data) for _, data in one.outputs], one.device_us)
        if result.frame().endswith(frame) and self._forms.find(frame, 0, len(frame)) is None:
            self._forms.add(form)


def _inline_run(message: command_pb2.Command) -> InlineRun | None:
    """Return a message as an inline run, or None if it has more than that can express."""
    run = message.run
    if not message.notify or message.stream or message.sequence < 1:
        return None
    if (
        not run.outputs
        or run.pause
        or run.exchange_run
        or not all(one.HasField("data") for one in run.inputs)
    ):
        return None
    inputs = [(one.input, len(one.data)) for one in run.inputs]
    trace = run.trace_parent
    if trace and not (len(trace) == TRACE_BYTES and trace.isascii()):
        return None
    outputs = [one.output for one in run.outputs]
    form = RunForm(run.plan, inputs, outputs, message.timeout_ms, is_traced=bool(trace))
    return InlineRun(form, [one.data for one in run.inputs], message.sequence, trace)


def _frame_at(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the start and the end of an element of a batch; None if something else is there."""
    end = len(data)
    if data[at] != _TAG or at + 1 >= end:
        return None
    length = data[at + 1]
    at += 2
    if length >= 0x80:
        length, at = _varint_at(data, at - 1, end)
    return (at, at + length) if at + length <= end else None


def _varint_at(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and the offset after it; `end + 1` as offset if it is cut off or too long."""
    if at + 3 <= end:
        # The fast path: most have one or two bytes.
        if (first := data[at]) < 0x80:
            return first, at + 1
        if (second := data[at + 1]) < 0x80:
            return first & 0x7F | second << 7, at + 2
    number, shift = 0, 0
    for place in range(at, min(at + 9, end)):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place + 1
        shift += 7
    return 0, end + 1
