"""An asyncio session over gRPC: its links, its calls, and the tasks that read and write."""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc

from heliograph.core.connection_state import ConnectionState, Dial, Follow, GiveUp
from heliograph.core.effects import (
    Call,
    ReceiveDownload,
    StartUpload,
)
from heliograph.core.future import Deadline, Outcome, Transfer, logger
from heliograph.core.methods import MOVE as MOVE_METHOD
from heliograph.core.tracing import CONNECT_SPAN, as_current, call_metadata
from heliograph.procedures.replay import repeat
from heliograph.transport import handshake
from heliograph.transport.aio import AioShell, AsyncLogSource
from heliograph.transport.bulk.aio import AioBulk, moved
from heliograph.transport.bulk.link import CompressionArgument, Link
from heliograph.transport.calls import Unary, unary
from heliograph.transport.channels import (
    NO_CREDENTIALS,
    Options,
    fetch_pinned,
    open_aio_channel,
)
from heliograph.transport.command_socket.on_loop import LoopSocket
from heliograph.transport.command_socket.opening import MOST_BYTES, open_command_socket
from heliograph.transport.following import LOOK_SECONDS as LOOK_SECONDS_THERE
from heliograph.transport.following import (
    MOVED,
    Destination,
    followed,
    info_there,
    named_destination,
    renewed,
)
from heliograph.transport.log_lines import FOLLOW_LOG, AioRemoteLog, follow_request
from heliograph.transport.moving import aio_move, aio_move_when_asked
from heliograph.transport.reconnecting import (
    DURABLE,
    GOODBYE_PAUSES,
    GOODBYE_SECONDS,
    WHY_SECONDS,
    Tries,
    attach_seconds,
    check_granted,
    has_died,
    is_cut,
    journal_of,
    reader_defect,
    reconnecting_of,
    tell_attached,
    tell_break,
)
from heliograph.transport.shared_memory import (
    SharedMemoryArgument,
    SharedSpace,
    memory_of,
    seconds_for,
    share,
)
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec.inline_runs import CompletionReader, encode_commands, encode_first
from heliograph_proto.commands import Attach, CompletionBatch
from heliograph_proto.eager import begin
from heliograph_proto.errors import (
    HeliographError,
    InternalError,
    MovedError,
    UnavailableError,
)
from heliograph_proto.sessions import SessionInfo, SessionMove

T = TypeVar("T")

#: The nodes of a graph that is encoded on the event loop, in about 2 ms.
MOST_NODES = 500

#: The errors of calls: a status, or those of a channel that was closed.
_CALL_ERRORS = (grpc.RpcError, grpc.aio.UsageError, ValueError)


class AioGrpcShell(AioShell):
    """A session over grpc.aio: one channel for commands and calls, one for bulk data."""

    def __init__(
        self,
        address: Address,
        info: SessionInfo,
        channel: grpc.aio.Channel,
        channel_options: Options,
        credentials: Credentials = NO_CREDENTIALS,
        connection: socket.socket | str = "it was not requested",
        tcp_silence_seconds: float | None = None,
        link: Link | None = None,
        shared_memory: SharedMemoryArgument = "auto",
    ) -> None:
        """`connection`: the command socket, or why there is none. TCP connections break after
        `tcp_silence_seconds`; None: none are opened."""
        super().__init__(address, info)
        self.tcp_silence_seconds = tcp_silence_seconds
        self.speed = link or Link(address, info, "off")
        self._channel, self.credentials = channel, credentials
        self.channel_options = channel_options
        self._shared_memory = shared_memory
        #: True once another daemon has the session, until it has made its offers.
        self._is_elsewhere = False
        self.core.has_lease = info.lease_ms > 0
        self.core.journal = journal_of(info)
        #: The task that makes plans again on a daemon that was restarted.
        self._repeater: asyncio.Task[None] | None = None
        self._reconnecting = reconnecting_of(info)
        #: The number of the present link, and the outcome that is done while it is up.
        self.link = 0
        self._up = Outcome()
        self._up.settle()
        #: The error of an attach that the core refused.
        self._refusal: HeliographError | None = None
        #: The daemon to which the session is to move.
        self.destination: Destination | None = None
        #: True while it moves.
        self.moves = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._bulk = AioBulk(self)
        self._bell = asyncio.Event()
        self.core.speaks_bytes = True
        self._start_link(connection)
        self._reader = self.spawn(self._keep_reading())

    def _start_link(self, connection: socket.socket | str, attach: Attach | None = None) -> None:
        """Begin the command stream, or go on with it, over the present channel and a socket."""
        execute: Any = self._channel.stream_stream(handshake.EXECUTE)
        self._stream: Any = execute()
        self._completions = CompletionReader()
        self._socket: LoopSocket | None = None
        #: Done once the link is over.
        self._link_end: asyncio.Future[None] = self._loop.create_future()
        #: Done once the socket has ended.
        self._socket_end: asyncio.Future[None] = self._loop.create_future()
        self.core.why_no_socket = connection if isinstance(connection, str) else ""
        if not isinstance(connection, str):
            ended = partial(self._socket_ended, self._socket_end)
            self._socket = LoopSocket(connection, MOST_BYTES, self._received, ended)
            self._socket.read_on()
        #: The socket, or call, of commands, after the first message.
        self._wire: Any = self._socket or self._stream
        #: True while a write is in progress; further commands wait for the next one.
        self._writing = True
        self.spawn(self._write(self.link, attach))

    @classmethod
    async def open(
        cls,
        address: Address,
        timeout: float,
        shared_memory: SharedMemoryArgument = "auto",
        silence_seconds: float = handshake.SILENCE_SECONDS,
        credentials: Credentials = NO_CREDENTIALS,
        direct: bool = True,
        compression: CompressionArgument = "auto",
        wish: handshake.Wish = handshake.NO_WISH,
    ) -> AioGrpcShell:
        """Connect and perform the handshake. Raises the errors of `hg.connect`."""
        end, tcp_silence = time.monotonic() + timeout, silence_seconds if direct else None
        if address.pin:
            await moved(partial(fetch_pinned, address, credentials, timeout))
        options = handshake.channel_options(silence_seconds)
        channel = open_aio_channel(address, options, credentials)
        try:
            while True:
                with as_current(CONNECT_SPAN):
                    answer = await cls._greet(channel, address, timeout, end, credentials, wish)
                if not isinstance(answer, HeliographError):
                    info = handshake.decode_open(answer, address)
                    check_granted(address, wish, info)
                    shared, connection = await cls._share(
                        channel, address, info, shared_memory, tcp_silence, end
                    )
                    link = await moved(partial(Link, address, info, compression))
                    made = cls(
                        address,
                        info,
                        channel,
                        options,
                        credentials,
                        connection,
                        tcp_silence,
                        link,
                        shared_memory,
                    )
                    made.core.set_shared(shared)
                    return made
                if not handshake.is_starting(answer) or time.monotonic() + handshake.START_SECONDS > end:
                    raise answer
                await asyncio.sleep(handshake.START_SECONDS)
        except BaseException:
            await channel.close()
            raise

    @staticmethod
    async def _share(
        channel: grpc.aio.Channel,
        address: Address,
        info: SessionInfo,
        shared_memory: SharedMemoryArgument,
        tcp_silence_seconds: float | None,
        end: float,
    ) -> tuple[SharedSpace | str, socket.socket | str]:
        """Return shared memory and the command socket, or the reasons why there is none.

        If the memory is required, the session ends without it.
        """
        try:
            # Memory that is shared is lost with the daemon.
            sharing = partial(share, address, info, shared_memory, seconds_for(end))
            shared = DURABLE if info.durable else await moved(sharing)
            opening = partial(
                open_command_socket, address, info, shared_memory, tcp_silence_seconds, seconds_for(end)
            )
            return shared, await moved(opening)
        except BaseException:
            close: Any = channel.unary_unary(handshake.CLOSE, None, None)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await close(handshake.close_request(info.session), timeout=handshake.CLOSE_SECONDS)
            raise

    @staticmethod
    async def _greet(
        channel: grpc.aio.Channel,
        address: Address,
        timeout: float,
        end: float,
        credentials: Credentials,
        wish: handshake.Wish,
    ) -> bytes | HeliographError:
        """Return the server's answer to the handshake, or the error."""
        call: Any = channel.unary_unary(handshake.OPEN, None, None)
        try:
            seconds = max(0.0, end - time.monotonic())
            request, metadata = handshake.open_request(wish), call_metadata()
            answer: bytes = await call(request, timeout=seconds, metadata=metadata)
            return answer
        except grpc.aio.AioRpcError as error:
            return await asyncio.to_thread(handshake.open_error, error, address, timeout, credentials)

    async def _write(self, link: int, attach: Attach | None) -> None:
        stream, wire = self._stream, self._wire
        try:
            first = encode_first(self.info.session, self._socket is not None, attach)
            await self.write_first(stream, first)
            self._wrote(link)
            while self.core.lost is None and link == self.link:
                if not self._writing and (message := self._message()):
                    self._writing = True
                    await wire.write(message)
                    self._wrote(link)
                else:
                    await self._wait_for_output()
        except (grpc.RpcError, asyncio.InvalidStateError, OSError):
            logger.debug("the command stream ended; the reader reports why")

    async def write_first(self, call: Any, message: bytes) -> None:
        """Write the first message of a call. Raises UnavailableError, an OSError, if the link ends.

        In grpc.aio it waits for ever on a channel that is closed before the call has begun.
        """
        if not self.core.has_lease:
            await call.write(message)
            return
        writing: asyncio.Future[None] = asyncio.ensure_future(call.write(message))
        try:
            await asyncio.wait([writing, self._link_end], return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise handshake.broken(self.address, "its channel was closed")
            writing.result()
        finally:
            writing.cancel()

    def _wrote(self, link: int) -> None:
        if link == self.link:
            self._writing = False

    def flush(self) -> None:
        if not self._writing and (message := self._message()):
            self._writing = True
            begin(self._wire.write(message), partial(self._was_sent, self.link))

    def _was_sent(self, link: int, error: BaseException | None) -> None:
        if error is not None:
            logger.debug("the command stream ended; the reader reports why: %s", error)
        self._wrote(link)
        if self.core.has_output:
            self._ring()

    def _message(self) -> bytes:
        """Return the next message to send; empty if there is none."""
        commands = self.core.take(self.info.limits.message_bytes // 2)
        told = self.core.take_acknowledgement(commands)
        return encode_commands(commands, told) if commands or told else b""

    async def _wait_for_output(self) -> None:
        self._bell.clear()
        if not self.core.has_only_garbage:
            await self._bell.wait()
        if not self.core.has_only_garbage:
            return
        # Frees may gather for a moment, unless something else is to be sent.
        self._bell.clear()
        try:
            async with asyncio.timeout(handshake.GATHER_SECONDS):
                await self._bell.wait()
        except TimeoutError:
            pass

    def _ring(self) -> None:
        self._bell.set()

    async def _keep_reading(self) -> None:
        """Read one link after another, until the session ends."""
        try:
            while await self._reconnect(await self._read()):
                pass
        except Exception as defect:
            # Without a reader, callers would wait for ever. A session that closes also ends channels.
            if self.core.lost is None:
                self._lose(reader_defect(defect))
        self._ring()

    async def _read(self) -> HeliographError:
        """Read the present link until it ends, and return the reason."""
        error: Any = None
        stream, has_lease = self._stream, self.core.has_lease
        if has_lease and self._socket is not None:
            self._socket_end.add_done_callback(lambda _: self._watch(stream, WHY_SECONDS))
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._received((message,))
        except grpc.aio.AioRpcError as broken:
            error = broken
        except asyncio.CancelledError:
            # A call that was cancelled here raises this too.
            if (task := asyncio.current_task()) is None or task.cancelling() or not has_lease:
                raise
            return self._refusal or handshake.broken(self.address, "the server did not answer")
        except Exception as defect:
            self._misread(defect)
        if self._socket is not None:
            self._socket.drain()
        if self._refusal is not None:
            return self._refusal
        return handshake.stream_error(error, self.address, has_lease=has_lease)

    def _watch(self, stream: Any, seconds: float) -> None:
        """Cancel a stream after a time, unless another watch begins, or the link is up."""
        self._unwatch()
        self._watchdog = self._loop.call_later(seconds, stream.cancel)

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    async def _reconnect(self, error: HeliographError) -> bool:
        """Connect again after a break. Returns False when the session has ended."""
        while self.core.lost is None:
            self._unwatch()
            is_near = self.core.shared is not None
            is_gone = self._reconnecting.is_down and await moved(
                partial(has_died, self.address, self.info, is_near)
            )
            instruction = self._reconnecting.broke(error, time.monotonic(), has_died=is_gone)
            if isinstance(instruction, GiveUp):
                self._lose(instruction.error)
                break
            if self.core.is_attached:
                self._detach(error)
            if isinstance(instruction, Dial):
                await asyncio.sleep(instruction.pause_seconds)
            try:
                if isinstance(instruction, Follow):
                    await self._follow(instruction.moved)
                self._reconnecting.dialling()
                await self._dial()
                return True
            except HeliographError as failed:
                error = failed
        return False

    async def _follow(self, error: MovedError) -> None:
        """Take another daemon for the session's. Raises PermissionDeniedError."""
        there = followed(error, self.address, self.credentials, self.destination)
        await moved(partial(fetch_pinned, there.address, there.credentials, LOOK_SECONDS_THERE))
        self.address, self.credentials = there.address, there.credentials
        self.info = info_there(self.info, error)
        self.speed = await moved(partial(Link, self.address, self.info, self.speed.compression))
        self.core.leave_shared(MOVED)
        self._is_elsewhere = True

    async def move(self, url: str, wait_seconds: float | None, deadline: Deadline) -> SessionMove:
        there = named_destination(url, self.address, self.credentials)
        return await aio_move(self, there, wait_seconds, deadline)

    def _detach(self, error: HeliographError) -> None:
        """Let nothing leave until the session has a connection again."""
        self.core.detached()
        self.link += 1
        self._up = Outcome()
        self._end_link()
        tell_break(error, self._reconnecting.seconds, self.when_disconnected)

    def _end_link(self) -> None:
        self._ring()
        if not self._link_end.done():
            self._link_end.set_result(None)
        if self._socket is not None:
            self._socket.close()
        if not self._stream.done():
            self._stream.cancel()

    async def _dial(self) -> None:
        """Begin another link, which is read next. Raises UnavailableError."""
        end = time.monotonic() + attach_seconds(self._reconnecting)
        before = self._channel
        self._channel = open_aio_channel(self.address, self.channel_options, self.credentials)
        self.link += 1
        self._end_link()
        await before.close()
        if self._is_elsewhere or self.info.durable:
            await self._renew_offers(end)
        await self._bulk.renew()
        how = self._shared_memory, self.tcp_silence_seconds, seconds_for(end)
        connection = await moved(partial(open_command_socket, self.address, self.info, *how))
        self._start_link(connection, self.core.attach(self.info.incarnation))
        self._watch(self._stream, max(0.05, end - time.monotonic()))

    async def _renew_offers(self, end: float) -> None:
        """Ask a daemon that may be another one for its offers, as a handshake does."""
        call: Any = self._channel.unary_unary(handshake.OFFERS, None, None)
        request, seconds = handshake.offers_request(self.info.session), max(0.0, end - time.monotonic())
        try:
            answer: Any = await call(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            answer = error
        work = partial(renewed, self.address, self.info, answer, self._shared_memory, end)
        self.info, shared = await moved(work)
        self.core.set_shared(shared)
        self._is_elsewhere = False

    async def await_up(self, deadline: Deadline) -> None:
        """Wait while the session has no connection.

        Raises the error that ended the session, and DeadlineExceededError.
        """
        while not self._up.done and asyncio.current_task() is not self._repeater:
            await self.wait(self._up, deadline)
        self.core.check()

    @property
    def connection_state(self) -> ConnectionState:
        return self._reconnecting.state

    def _lose(self, error: HeliographError) -> bool:
        is_first = super()._lose(error)
        self._reconnecting.close()
        self._unwatch()
        self._up.finish()
        return is_first

    def apply(self, batch: CompletionBatch, size_bytes: int = 0) -> None:
        if batch.attached is None:
            super().apply(batch, size_bytes)
            if batch.move_to:
                self.spawn(aio_move_when_asked(self, batch.move_to))
            return
        try:
            self.core.attached(batch.attached)
        except HeliographError as error:
            self._refusal = error
            raise
        self._reconnecting.attached()
        self._unwatch()
        seconds = time.monotonic() - self._reconnecting.broke_at
        tell_attached(self.address, seconds, self.core.unreceived, has_restarted=batch.attached.restored)
        if batch.attached.incarnation:
            self.info = replace(self.info, incarnation=batch.attached.incarnation)
        if self.core.repetition.is_of_restart:
            self._repeater = self.spawn(self._repeat())
        else:
            self._up.finish()
        self._ring()

    async def _repeat(self) -> None:
        """Make plans again that a restarted daemon lacks. Calls wait for it."""
        try:
            await self.drive(repeat(self.core))
        except UnavailableError as error:
            logger.debug("the connection broke again: %s", error)
        except HeliographError as error:
            self._lose(error)
            self._ring()
        else:
            if asyncio.current_task() is self._repeater:
                self._up.finish()

    def _received(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.apply(self._completions.read(message), len(message))

    def _socket_ended(self, end: asyncio.Future[None], defect: Exception | None) -> None:
        if not end.done():
            end.set_result(None)
        self._misread(defect)

    def _misread(self, defect: Exception | None) -> None:
        """End the session for a defect of its messages; after any other end the call tells why."""
        is_defect = defect is not None and not isinstance(defect, UnavailableError)
        if is_defect and self._refusal is None:
            logger.error("a completion could not be understood", exc_info=defect)
            self._lose(InternalError(f"a completion could not be understood: {defect}"))
            self._ring()

    def abandon(self) -> None:
        super().abandon()
        self._bulk.abandon()
        if self._socket is not None:
            self._socket.abandon()

    async def follow_log(self, level: str) -> AsyncLogSource:
        self.core.check()

        def begin_call() -> Any:
            method: Any = self._channel.unary_stream(FOLLOW_LOG, None, None)
            return method(follow_request(self.info, level))

        made = AioRemoteLog(self, begin_call)
        try:
            await made.begin()
        except BaseException:
            made.close()
            raise
        return made

    async def _call(self, call: Call, deadline: Deadline) -> Any:
        session, made = await self._encoded(call)
        tries = Tries()
        while True:
            await self.await_up(deadline)
            if self.info.session != session:
                if call.method is MOVE_METHOD:
                    raise MovedError("the session has moved")
                session, made = await self._encoded(call)
            link = self.link
            try:
                return await self._ask(made, deadline)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
                self.core.check()
                if isinstance(error, asyncio.CancelledError):
                    # A channel that closes cancels its calls; their task was not cancelled.
                    task = asyncio.current_task()
                    is_cut_short = self.core.has_lease and task is not None and not task.cancelling()
                else:
                    is_elsewhere = self.info.session != session
                    is_cut_short = self.core.has_lease and (is_cut(error) or is_elsewhere)
                pause = tries.again(link) if is_cut_short else None
                if pause is None:
                    if isinstance(error, grpc.aio.AioRpcError):
                        raise handshake.typed_error(error, self.address, call.method.name) from None
                    raise
            await asyncio.sleep(pause)

    async def _encoded(self, call: Call) -> tuple[bytes, Unary]:
        """Encode a call. Returns it with the session's secret in it."""
        session = self.info.session
        encode = partial(unary, call, session, self.info.limits)
        # The loop goes on while a large graph is encoded.
        return session, await asyncio.to_thread(encode) if _is_long(call.request) else encode()

    async def _ask(self, made: Unary, deadline: Deadline) -> Any:
        how: dict[str, Any] = {"timeout": deadline.remaining(), "metadata": call_metadata()}
        one = len(made.messages) == 1
        make: Any = self._channel.unary_unary if one else self._channel.stream_unary
        calling = make(made.path, None, None)(made.messages[0] if one else iter(made.messages), **how)
        made.sent()
        return made.decode(await calling)

    async def call(self, call: Call, deadline: Deadline) -> Any:
        """Call a method of the server; see `_call`."""
        return await self._call(call, deadline)

    def _start_upload(self, upload: StartUpload) -> Transfer:
        return self._bulk.start_upload(upload)

    async def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        await self._bulk.download(download, deadline)

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return memory_of(self.address, self.info, tensor, seconds)

    async def _disconnect(self, was_open: bool) -> None:
        self._ring()
        is_up = self.core.is_attached
        if not is_up:
            # It would connect again.
            self._reader.cancel()
        try:
            if was_open:
                await self._say_goodbye(handshake.CLOSE_SECONDS if is_up else GOODBYE_SECONDS)
                # The server ends the stream now. Cancelling the call instead would leave a task and
                # a thread of grpc.aio behind if the loop ends soon after.
                await asyncio.wait([self._reader], timeout=handshake.CLOSE_SECONDS)
        except _CALL_ERRORS as error:
            logger.debug("closing the session: %s", error)
        finally:
            if not self._stream.done():
                self._stream.cancel()

    async def _say_goodbye(self, seconds: float) -> None:
        """End the session at the server. Raises one of the errors of calls."""
        request = handshake.close_request(self.info.session)
        for pause in (*GOODBYE_PAUSES, None):
            try:
                close: Any = self._channel.unary_unary(handshake.CLOSE, None, None)
                await close(request, timeout=seconds)
                return
            except _CALL_ERRORS as error:
                if pause is None or not is_cut(error):
                    raise
                await asyncio.sleep(pause)

    async def close(self) -> None:
        if self._process != os.getpid():
            return
        try:
            await super().close()
        finally:
            if self._socket is not None:
                self._socket.close()
            await self._bulk.close()
            await self._channel.close()


def _is_long(request: object) -> bool:
    """True if encoding a request takes long, since its graph has many nodes."""
    graph = getattr(request, "graph", None)
    return len(getattr(graph, "nodes", ())) > MOST_NODES
