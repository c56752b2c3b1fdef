"""CommandService: the command stream.

The reader turns each message into commands and submits them straight from the event loop. Completions
come from the devices' threads; an `Outbox` takes them to the loop, many at a time, and the handler
writes them. Back-pressure: while too many bytes of completions are unwritten, nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Executor

from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto import messages
from heliograph_proto.commands import Command
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.v1 import command_pb2, command_pb2_grpc
from heliograph_server.core.execution import typed
from heliograph_server.core.runtime import Session
from heliograph_server.services.outbox import Outbox
from heliograph_server.services.refusals import HostSlot, refusals

logger = logging.getLogger(__name__)


class CommandService(command_pb2_grpc.CommandServiceServicer):
    """Runs command streams; a session lives as long as its stream."""

    def __init__(self, slot: HostSlot, closers: Executor) -> None:
        self._slot = slot
        self._closers = closers

    @refusals
    async def Execute(  # type: ignore[override]  # the stubs know generators alone
        self,
        requests: AsyncIterator[command_pb2.CommandBatch],
        context: aio.ServicerContext[command_pb2.CommandBatch, command_pb2.CompletionBatch],
    ) -> None:
        first = await anext(requests, None)
        if first is None:
            raise ProtocolError("the command stream ended before it named its session")
        session = self._slot.host.session(first.session)
        outbox = Outbox(asyncio.get_running_loop())
        session.attach(outbox.put, outbox.end)
        logger.info("%r began", session)
        try:
            await _converse(session, outbox, first, requests, context)
        finally:
            await self._close(session)
            logger.info("%r ended", session)

    async def _close(self, session: Session) -> None:
        """Closing goes on in its thread even if this handler is cancelled once more."""
        closing = self._closers.submit(session.close, CancelledError("the command stream ended"))
        await asyncio.shield(asyncio.wrap_future(closing))


async def _converse(
    session: Session,
    outbox: Outbox,
    first: command_pb2.CommandBatch,
    requests: AsyncIterator[command_pb2.CommandBatch],
    context: aio.ServicerContext[command_pb2.CommandBatch, command_pb2.CompletionBatch],
) -> None:
    """Reads and writes until the client half-closes and all is done, or the session ends."""
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(_read(session, outbox, first, requests))
        await _write(outbox, context)
        reader.cancel()
    if outbox.error is not None:
        raise outbox.error


async def _write(
    outbox: Outbox, context: aio.ServicerContext[command_pb2.CommandBatch, command_pb2.CompletionBatch]
) -> None:
    """Writes what is done until the stream ends, or nobody is there to read it."""
    while (batch := await outbox.take()) is not None:
        try:
            await context.write(batch)
        except Exception as error:
            logger.info("the client is gone: %s", error)
            return


async def _read(
    session: Session,
    outbox: Outbox,
    first: command_pb2.CommandBatch,
    requests: AsyncIterator[command_pb2.CommandBatch],
) -> None:
    """Submits what comes; tells the outbox how it ended. Raises nothing but cancellation."""
    try:
        batch: command_pb2.CommandBatch | None = first
        last = 0
        while batch is not None:
            last = _submit(session, batch, last)
            await outbox.has_room()
            batch = await anext(requests, None)
        outbox.finish_at(last)
    except DecodeError:
        outbox.end(ProtocolError("a message could not be decoded"))
    except Exception as error:
        outbox.end(typed(error, "reading commands"))


def _submit(session: Session, batch: command_pb2.CommandBatch, last: int) -> int:
    """Submits a batch; the last sequence number so far. What cannot be decoded fails by itself."""
    commands: list[Command] = []
    for message in batch.commands:
        last = message.sequence
        try:
            commands.append(messages.decode_command(message))
        except HeliographError as error:
            session.submit(commands)
            commands = []
            session.refuse(message.sequence, error, _tensors_of(message))
    if commands:
        session.submit(commands)
    return last


def _tensors_of(message: command_pb2.Command) -> tuple[int, ...]:
    """The tensors that a command was to make, for one that cannot be decoded."""
    match message.WhichOneof("kind"):
        case "allocate":
            return (message.allocate.tensor,)
        case "view":
            return (message.view.tensor,)
    return ()


