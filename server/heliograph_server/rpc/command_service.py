"""CommandService: the command stream.

The reader decodes each message and submits its commands straight from the event loop. Completions
come from the devices' threads. A `CompletionWriter` takes them to the loop, many at a time, and the
handler writes them. While too many bytes of completions are unwritten, nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto import codec
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.codec.inline_runs import (
    CommandReader,
    First,
    Received,
    decode_first,
    encode_result,
    large_parts,
    received_only,
)
from heliograph_proto.codec.wire import leading_bytes
from heliograph_proto.commands import Acknowledged, Command, Skip
from heliograph_proto.eager import begin
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError, UnavailableError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import command_pb2
from heliograph_server.resources.failures import typed
from heliograph_server.rpc.command_socket.sockets import CommandSocket, CommandSockets
from heliograph_server.rpc.completion_writer import CompletionWriter
from heliograph_server.rpc.decoding import check
from heliograph_server.rpc.ending import end_session
from heliograph_server.rpc.errors import forgetting
from heliograph_server.rpc.leases.conversations import Conversation, Stream
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


#: Where the first message names the session.
_SESSION = (command_pb2.CommandBatch.SESSION_FIELD_NUMBER,)

_BATCH: Any = command_pb2.CommandBatch.DESCRIPTOR

#: gRPC reports the end of a broken connection's messages first, and shortly afterwards the break: on
#: a busy machine, not so shortly. Only a half-close waits for all of this time, and our clients call
#: `Close` instead.
BREAK_SECONDS = 0.5

#: The tasks that read. Each ends with its call, and the loop alone would not keep it.
_readers: set[asyncio.Task[None]] = set()


class CommandService:
    """Runs command streams. A session lives as long as its stream, or by its lease."""

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
        self._conversations: dict[Session, Conversation] = {}

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, command_pb2.DESCRIPTOR.services_by_name["CommandService"], self)

    @takes_bytes
    @gives_bytes
    async def Execute(self, _requests: object, context: Context) -> None:
        seconds = self._slot.host.limits.attach_timeout_ms / 1e3
        message: Any = await first_of(context.read(), seconds)
        if message is aio.EOF:
            raise ProtocolError("the command stream ended before it named its session")
        session = self._slot.session(leading_bytes(message, _SESSION))
        first = _first(message)
        conversation = self._conversation(session, first)
        # Not kept for the life of the session: it may be large.
        unread = [message]
        del message
        stream, wire = None, None
        try:
            wire = self._sockets.take(session, first.command_socket)
            stream = conversation.begin(wire or context, first.attach)
            await _converse(stream, unread, self._decoders, self._turn_size)
        finally:
            is_end = conversation.leave(stream) if stream is not None else first.attach is None
            if is_end:
                conversation.outbox.close()
            elif stream is None:
                conversation.leave_unused()
            if wire is not None:
                wire.close()
            if is_end:
                try:
                    await self._close(session, CancelledError("the command stream ended"))
                finally:
                    # Logged even if the handler is cancelled while it closes.
                    conversation.over()

    def _conversation(self, session: Session, first: First) -> Conversation:
        """Return the conversation of a session, new for its first stream.

        Raises HandleExistsError for a second stream that does not attach, or the error with which
        an attach is refused.
        """
        if session.closed is not None:
            raise session.closed.anew()
        self._slot.host.moves.check(session)
        found = self._conversations.get(session)
        if first.attach is None or found is None:
            has_messages = first.attach is not None and first.attach.received and not session.is_restored
            if first.attach is not None and (not session.lease_seconds or has_messages):
                raise ProtocolError("nothing attaches to a session that has had no stream, or has no lease")
            found = Conversation(
                session,
                self._close,
                lambda one: self._conversations.pop(one, None),
                self._slot.host.incarnation,
            )
            self._conversations[session] = found
        else:
            found.check(first.attach)
        return found

    async def _close(self, session: Session, error: HeliographError) -> None:
        """Close the session. This goes on even if the handler is cancelled again."""
        await asyncio.shield(end_session(session, self._closers, error))


def _first(message: bytes) -> First:
    """Decode the first message. One with many commands attaches to nothing, and has no socket."""
    if len(message) > SMALL_BYTES:
        return First(b"")
    try:
        return decode_first(message)
    except DecodeError:
        # The reader reports it.
        return First(b"")


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


async def _converse(stream: Stream, unread: list[bytes], decoders: Executor, turn_size: TurnSize) -> None:
    """Read and write until the client half-closes and all is done, or the stream or session ends.

    The reader is not cancelled: gRPC would keep the message that comes next for good. It ends with
    the call.
    """
    reading = asyncio.create_task(forgetting(_Reader(stream, decoders, turn_size).read(unread)))
    _readers.add(reading)
    reading.add_done_callback(_readers.discard)
    outbox = stream.outbox
    while (batch := await outbox.take(stream.number)) is not None:
        try:
            await stream.wire.write(batch)
        except Exception as error:
            logger.debug("the client is gone: %s", error)
            if stream.session.lease_seconds:
                stream.break_off(UnavailableError("the client took no more messages; attach again"))
            break
    if stream.error is not None:
        raise stream.error
    if outbox.error is not None:
        raise outbox.error.anew()


class _Reader:
    """Takes the commands of one stream."""

    def __init__(self, stream: Stream, decoders: Executor, turn_size: TurnSize) -> None:
        self._stream, self._session, self._outbox = stream, stream.session, stream.outbox
        self._wire, self._decoders, self._turn_size = stream.wire, decoders, turn_size
        self._reader = CommandReader()
        #: The last number that was read.
        self._last = stream.session.commands

    async def read(self, unread: list[bytes]) -> None:
        """Submit the commands of the unread message and those that come, until the stream is over.

        Pass the end of the session to the outbox; raise only cancellation.
        """
        outbox, wire, stream = self._outbox, self._wire, self._stream
        try:
            is_socket = isinstance(wire, CommandSocket)
            read = partial(wire.read, self._at_once) if isinstance(wire, CommandSocket) else wire.read
            data: Any = unread.pop()
            while data is not aio.EOF and not stream.is_over:
                if not self._at_once(data):
                    if len(data) > SMALL_BYTES:
                        await self._check(data)
                    await self._submit(self._reader.read(data))
                # The last message is not kept while the next one is awaited.
                data = b""
                data = await read()
            if self._session.lease_seconds and not stream.is_over:
                if is_socket:
                    raise UnavailableError("the command socket ended; attach again, or close the session")
                await asyncio.sleep(BREAK_SECONDS)
            if not stream.is_over:
                self._session.end_of_commands()
                outbox.finish_at(self._last)
        except DecodeError:
            self._end(ProtocolError("a message could not be decoded"))
        except UnavailableError as error:
            if self._session.lease_seconds:
                stream.break_off(error)
            else:
                self._end(error)
        except Exception as error:
            # After the end gRPC raises errors of its own.
            if not stream.is_over:
                self._end(typed(error, "reading commands"))

    def _end(self, error: HeliographError) -> None:
        if not self._stream.is_over:
            self._outbox.end(error)

    async def _check(self, data: bytes) -> None:
        for part in large_parts(data, SMALL_BYTES):
            await check(part, _BATCH, self._session.limits, self._decoders)

    def _at_once(self, message: bytes) -> bool:
        """Deal with a message without a turn of the loop. False if that is not possible."""
        run = self._reader.single(message)
        if run is None:
            if not (received := received_only(message)):
                return False
            self._outbox.acknowledge(received)
            return True
        if self._stream.is_over or not self._answer(run):
            return False
        self._last = run.sequence
        return True

    def _answer(self, run: InlineRun) -> bool:
        """Perform a run that came alone, and write its answer. False if that is not possible."""
        outbox = self._outbox

        def give(result: InlineResult) -> None:
            answer = encode_result(result)
            number = outbox.begin_write(result.sequence, answer)
            begin(self._wire.write(answer), partial(_answered, outbox, number))

        # Asked again once no completion is on its way to the outbox.
        return outbox.may_write() and self._session.answer(run, give, outbox.may_write)

    async def _submit(self, parts: Iterable[Received]) -> None:
        """Submit a batch in turns, between which other streams run."""
        turn_size, stream = self._turn_size, self._stream
        turn_size.streams += 1
        try:
            for number, turn in enumerate(_turns(parts, turn_size)):
                if number:
                    await asyncio.sleep(0)
                if stream.is_over:
                    return
                self._submit_turn(turn)
                # A stream that waits for its reader takes no turns from others.
                turn_size.streams -= 1
                try:
                    await self._outbox.has_room()
                finally:
                    turn_size.streams += 1
        finally:
            turn_size.streams -= 1

    def _submit_turn(self, received: Sequence[Received]) -> None:
        """Submit commands. An undecodable one fails alone."""
        session, commands = self._session, list[Command | InlineRun]()
        for message in received:
            if isinstance(message, Acknowledged):
                self._acknowledge(message)
                continue
            self._last = message.sequence
            if isinstance(message, InlineRun):
                commands.append(message)
                continue
            try:
                check_command(message, session.limits)
                command = codec.decode_command(message)
                commands.append(command)
                if isinstance(command.kind, Skip):
                    self._last = max(self._last, command.kind.through)
            except HeliographError as error:
                session.submit(commands)
                commands = []
                tensors, buffer = _created_by(message, session.limits)
                session.refuse(message.sequence, error, tensors, buffer)
        if commands:
            session.submit(commands)

    def _acknowledge(self, told: Acknowledged) -> None:
        if told.received:
            self._outbox.acknowledge(told.received)
        for transfer in told.downloaded:
            self._session.downloaded(transfer)


def _answered(outbox: CompletionWriter, stream: int, error: BaseException | None) -> None:
    if error is not None:
        # The next read or write fails too.
        logger.debug("an answer was not written: %s", error)
    outbox.end_write(stream)


def _turns(received: Iterable[Received], turn_size: TurnSize) -> Iterator[list[Received]]:
    """Group commands into turns of the present size. A longer command is a group of its own."""
    turn: list[Received] = []
    weight = 0
    for message in received:
        turn.append(message)
        weight += 1
        if isinstance(message, Acknowledged):
            weight += len(message.downloaded) // HANDLES_A_COMMAND
        elif not isinstance(message, InlineRun):
            match message.WhichOneof("kind"):
                case "free":
                    weight += len(message.free.handles) // HANDLES_A_COMMAND
                case "skip":
                    weight += len(message.skip.lost) // HANDLES_A_COMMAND
                case "allocate_tensors":
                    # Creating a tensor takes several times as long as freeing one.
                    weight += 8 * len(message.allocate_tensors.tensors) // HANDLES_A_COMMAND
        if weight >= turn_size.commands:
            yield turn
            turn, weight = [], 0
    if turn:
        yield turn


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
