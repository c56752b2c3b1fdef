"""CommandService: the command stream.

The reader decodes each message and submits its commands straight from the event loop. Completions
come from the devices' threads. A `CompletionWriter` takes them to the loop, many at a time, and the
handler writes them. While too many bytes of completions are unwritten, nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto import codec
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.codec.inline_runs import CommandReader, Received, encode_result, large_parts
from heliograph_proto.codec.wire import leading_bytes
from heliograph_proto.commands import Command
from heliograph_proto.eager import begin
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import command_pb2
from heliograph_server.resources.failures import typed
from heliograph_server.rpc.command_socket.sockets import CommandSocket, CommandSockets
from heliograph_server.rpc.completion_writer import CompletionWriter
from heliograph_server.rpc.decoding import check
from heliograph_server.rpc.ending import end_session
from heliograph_server.rpc.errors import forgetting
from heliograph_server.rpc.message_limits import MAX_LISTED, check_command
from heliograph_server.rpc.receiving import first_of
from heliograph_server.rpc.requests import SMALL_BYTES, Context, Requests, gives_bytes, takes_bytes
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.session import Session

logger = logging.getLogger(__name__)

#: The commands of batches that are decoded before a stream with a single one has its turn: about
#: 2 ms.
COMMANDS_A_TURN = 64
#: The fewest commands of a batch in a turn, however many streams have batches.
LEAST_COMMANDS_A_TURN = 4
#: The handles that take as long to free as one other command.
HANDLES_A_COMMAND = 8


#: The messages of a stream: those of its call, or of its socket. Both are encoded, so that small
#: runs need no message objects.
Wire: TypeAlias = "Context | CommandSocket"

#: Where the first message names the session.
_SESSION = (command_pb2.CommandBatch.SESSION_FIELD_NUMBER,)

_BATCH: Any = command_pb2.CommandBatch.DESCRIPTOR

#: The tasks that read. Each ends with its call, and the loop alone would not keep it.
_readers: set[asyncio.Task[None]] = set()


class CommandService:
    """Runs command streams. A session lives as long as its stream."""

    def __init__(
        self, slot: HostSlot, closers: Executor, decoders: Executor, sockets: CommandSockets
    ) -> None:
        """The fields of large messages are counted on the threads of `decoders`; `sockets` has the
        connections of clients on this host."""
        self._slot = slot
        self._sockets = sockets
        self._closers = closers
        self._decoders = decoders
        self._turn_size = TurnSize()

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, command_pb2.DESCRIPTOR.services_by_name["CommandService"], self)

    @takes_bytes
    @gives_bytes
    async def Execute(self, _requests: object, context: Context) -> None:
        seconds = self._slot.host.limits.attach_timeout_ms / 1e3
        first: Any = await first_of(context.read(), seconds)
        if first is aio.EOF:
            raise ProtocolError("the command stream ended before it named its session")
        session = self._slot.session(leading_bytes(first, _SESSION))
        outbox = CompletionWriter(asyncio.get_running_loop(), session.limits)
        session.attach(outbox.put, outbox.end, at_once=True)
        began, wire = time.monotonic(), None
        # Not kept for the life of the session: it may be large.
        unread, announces_socket = [first], _announces_socket(first)
        del first
        try:
            wire = self._sockets.take(session, announces_socket)
            await _converse(
                _Stream(session, outbox, wire or context, self._decoders, self._turn_size), unread
            )
        finally:
            outbox.close()
            if wire is not None:
                wire.close()
            try:
                await self._close(session)
            finally:
                outbox.close()
                # Logged even if the handler is cancelled while it closes.
                seconds, commands = time.monotonic() - began, f"{session.commands:,}"
                message = "%s ended after %.1f s and %s commands"
                logger.info(message, session, seconds, commands, extra=session.log_fields)

    async def _close(self, session: Session) -> None:
        """Close the session. This goes on even if the handler is cancelled again."""
        error = CancelledError("the command stream ended")
        await asyncio.shield(end_session(session, self._closers, error))


def _announces_socket(first: bytes) -> bool:
    """True if the first message says that the others go over a socket; it is short then."""
    if len(first) > SMALL_BYTES:
        return False
    with suppress(DecodeError):
        return command_pb2.CommandBatch.FromString(first).command_socket
    return False


class TurnSize:
    """The number of commands that a stream submits before others have their turn.

    Streams in the middle of a batch share one turn, so that their number does not make others wait.
    """

    def __init__(self) -> None:
        self.streams = 0

    @property
    def commands(self) -> int:
        """The commands of a stream's turn now."""
        return max(LEAST_COMMANDS_A_TURN, COMMANDS_A_TURN // max(1, self.streams))


@dataclass(frozen=True, slots=True)
class _Stream:
    """One command stream: the session, the ways of messages out and in, and how they are taken."""

    session: Session
    outbox: CompletionWriter
    wire: Wire
    decoders: Executor
    turn_size: TurnSize


async def _converse(stream: _Stream, unread: list[bytes]) -> None:
    """Read and write until the client half-closes and all is done, or the session ends.

    The reader is not cancelled: gRPC would keep the message that comes next for good. It ends with
    the call.
    """
    reading = asyncio.create_task(forgetting(_read(stream, unread)))
    _readers.add(reading)
    reading.add_done_callback(_readers.discard)
    outbox = stream.outbox
    while (batch := await outbox.take()) is not None:
        try:
            await stream.wire.write(batch)
        except Exception as error:
            logger.debug("the client is gone: %s", error)
            break
    if outbox.error is not None:
        raise outbox.error.anew()


async def _read(stream: _Stream, unread: list[bytes]) -> None:
    """Submit the commands of the unread message and those that come, until the outbox is closed.

    Pass the end to the outbox; raise only cancellation.
    """
    session, outbox, wire = stream.session, stream.outbox, stream.wire
    try:
        reader, last = CommandReader(), 0

        def at_once(message: bytes) -> bool:
            nonlocal last
            run = reader.single(message)
            if run is None or not _answer(session, outbox, run, wire):
                return False
            last = run.sequence
            return True

        read = partial(wire.read, at_once) if isinstance(wire, CommandSocket) else wire.read
        data: Any = unread.pop()
        while data is not aio.EOF and not outbox.is_closed:
            if not at_once(data):
                if len(data) > SMALL_BYTES:
                    await _check(data, session.limits, stream.decoders)
                last = await _submit(stream, reader.read(data), last)
            # The last message is not kept while the next one is awaited.
            data = b""
            data = await read()
        if not outbox.is_closed:
            session.end_of_commands()
            outbox.finish_at(last)
    except DecodeError:
        outbox.end(ProtocolError("a message could not be decoded"))
    except Exception as error:
        if not outbox.is_closed:
            outbox.end(typed(error, "reading commands"))


async def _check(data: bytes, limits: Limits, decoders: Executor) -> None:
    for part in large_parts(data, SMALL_BYTES):
        await check(part, _BATCH, limits, decoders)


def _answer(session: Session, outbox: CompletionWriter, run: InlineRun, wire: Wire) -> bool:
    """Perform a run that came alone, and write its answer without a turn of the loop.

    False if that is not possible.
    """

    def give(result: InlineResult) -> None:
        outbox.begin_write(result.sequence)
        begin(wire.write(encode_result(result)), partial(_answered, outbox))

    # Asked again once no completion is on its way to the outbox.
    return outbox.may_write() and session.answer(run, give, outbox.may_write)


def _answered(outbox: CompletionWriter, error: BaseException | None) -> None:
    if error is not None:
        # The next read or write fails too.
        logger.debug("an answer was not written: %s", error)
    outbox.end_write()


async def _submit(stream: _Stream, commands: Iterable[Received], last: int) -> int:
    """Submit a batch in turns, between which other streams run. Return the last number."""
    turn_size = stream.turn_size
    turn_size.streams += 1
    try:
        for number, turn in enumerate(_turns(commands, turn_size)):
            if number:
                await asyncio.sleep(0)
            last = _submit_turn(stream.session, turn, last)
            # A stream that waits for its reader takes no turns from others.
            turn_size.streams -= 1
            try:
                await stream.outbox.has_room()
            finally:
                turn_size.streams += 1
    finally:
        turn_size.streams -= 1
    return last


def _turns(received: Iterable[Received], turn_size: TurnSize) -> Iterator[list[Received]]:
    """Group commands into turns of the present size. A longer command is a group of its own."""
    turn: list[Received] = []
    weight = 0
    for message in received:
        turn.append(message)
        weight += 1
        if not isinstance(message, InlineRun):
            match message.WhichOneof("kind"):
                case "free":
                    weight += len(message.free.handles) // HANDLES_A_COMMAND
                case "allocate_tensors":
                    # Creating a tensor takes several times as long as freeing one.
                    weight += 8 * len(message.allocate_tensors.tensors) // HANDLES_A_COMMAND
        if weight >= turn_size.commands:
            yield turn
            turn, weight = [], 0
    if turn:
        yield turn


def _submit_turn(session: Session, received: Sequence[Received], last: int) -> int:
    """Submit commands, and return the last number. An undecodable command fails alone."""
    commands: list[Command | InlineRun] = []
    for message in received:
        last = message.sequence
        if isinstance(message, InlineRun):
            commands.append(message)
            continue
        try:
            check_command(message, session.limits)
            commands.append(codec.decode_command(message))
        except HeliographError as error:
            session.submit(commands)
            commands = []
            tensors, buffer = _created_by(message, session.limits)
            session.refuse(message.sequence, error, tensors, buffer)
    if commands:
        session.submit(commands)
    return last


def _created_by(message: command_pb2.Command, limits: Limits) -> tuple[tuple[int, ...], int]:
    """The tensors and the buffer that an undecodable command would have created.

    A list that is too long to succeed counts as empty.
    """
    match message.WhichOneof("kind"):
        case "allocate":
            return (message.allocate.tensor,), 0
        case "view":
            return (message.view.tensor,), 0
        case "place_tensor":
            return (message.place_tensor.tensor,), 0
        case "allocate_buffer":
            return (), message.allocate_buffer.buffer
        case "allocate_tensors":
            several = message.allocate_tensors
            few = len(several.tensors) <= min(MAX_LISTED, limits.tensors)
            return tuple(one.tensor for one in several.tensors) if few else (), several.buffer
    return (), 0
