"""The asyncio shell: one session over grpc.aio on one event loop.

The core and the procedures are those of the blocking shell; only the waiting for effects differs.
The core is used only on the loop's thread, so there is no lock. Destructors in other threads only
append to the core's garbage and ring. The tasks are a writer, a reader, and one for each upload and
each submission that must wait for credit; all of them end with the session.
"""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from heliograph.core.effects import (
    Call,
    Compute,
    Effect,
    MapMemory,
    MoveBytes,
    Procedure,
    ReceiveDownload,
    StartUpload,
    WaitFor,
)
from heliograph.core.future import ANSWER, Deadline, Outcome, Pending, Transfer, What, logger
from heliograph.core.inline_run import InlinePlan
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import forked
from heliograph.core.tracing import CONNECT_SPAN, as_current, call_metadata
from heliograph.core.watching import Watchers
from heliograph.transport import handshake
from heliograph.transport.bulk.aio import AioBulk, moved
from heliograph.transport.bulk.link import CompressionArgument, Link
from heliograph.transport.calls import unary
from heliograph.transport.channels import (
    FORKED,
    NO_CREDENTIALS,
    Options,
    fetch_pinned,
    open_aio_channel,
)
from heliograph.transport.command_socket.on_loop import LoopSocket
from heliograph.transport.command_socket.opening import MOST_BYTES, open_command_socket
from heliograph.transport.log_lines import FOLLOW_LOG, follow_request, is_end, lines_of
from heliograph.transport.shared_memory import (
    SharedMemoryArgument,
    SharedSpace,
    memory_of,
    seconds_for,
    share,
)
from heliograph_proto import DIRECT_WEIGHTS
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.codec.inline_runs import CompletionReader, encode_commands, encode_first
from heliograph_proto.commands import Command, CompletionBatch
from heliograph_proto.eager import begin
from heliograph_proto.errors import HeliographError, InternalError, SessionClosedError, UnavailableError
from heliograph_proto.sessions import LogLine, SessionInfo

T = TypeVar("T")

#: The nodes of a graph that is encoded on the event loop, in about 2 ms.
MOST_NODES = 500


class AsyncLogSource(Protocol):
    """The source of a server's log lines."""

    async def take(self) -> list[LogLine] | None:
        """Wait for more lines; None at the end."""

    def close(self) -> None:
        """End the source. Idempotent; `take` is not called any more."""


class AioRemoteLog:
    """The log call to a daemon, which `begin` starts."""

    def __init__(self, shell: AioGrpcShell, call: Any) -> None:
        self._shell, self._call = shell, call

    async def begin(self) -> None:
        """Wait for the server's acceptance. Raises the error with which it refuses."""
        if await self.take() is None:
            raise SessionClosedError("the session was closed")

    async def take(self) -> list[LogLine] | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            refused = handshake.typed_error(error, self._shell.address, "send its log")
            if is_end(refused) or self._shell.core.lost is not None:
                return None
            raise refused from None
        return None if message is grpc.aio.EOF else lines_of(message)

    def close(self) -> None:
        self._call.cancel()


class AioShell(ABC):
    """A shell that runs procedures as coroutines; subclasses carry the bytes."""

    def __init__(self, address: Address, info: SessionInfo) -> None:
        self.address = address
        self.info = info
        self.core = ClientCore(info.limits)
        self.core.places_contents = DIRECT_WEIGHTS in info.features
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._process = os.getpid()
        self.watchers = Watchers()
        FORKED.add(self)

    async def drive(self, procedure: Procedure[T], timeout: float | None = None, what: What = ANSWER) -> T:
        """Run a procedure to its end. Raises DeadlineExceededError, with the words of `what`."""
        return await self.resume(procedure, lambda: next(procedure), Deadline(timeout, what))

    async def resume(self, procedure: Procedure[T], step: Callable[[], Effect], deadline: Deadline) -> T:
        """Continue a procedure with a step."""
        try:
            while True:
                step = await self._performed(procedure, self.advance(step), deadline)
        except StopIteration as stop:
            value: T = stop.value
        return value

    async def _performed(
        self, procedure: Procedure[T], effect: Effect, deadline: Deadline
    ) -> Callable[[], Effect]:
        """Perform an effect.

        Returns the step that continues the procedure with its result or error.
        """
        try:
            result = await self._perform(effect, deadline)
        except BaseException as error:
            # The error has the same words wherever the end of the time is noticed.
            raised = deadline.worded(error)
            return lambda: procedure.throw(raised)
        return lambda: procedure.send(result)

    def advance(self, step: Callable[[], T]) -> T:
        """Perform a step of the core, fire what it settled, and send what it queued."""
        try:
            return step()
        finally:
            for outcome in self.core.take_settled():
                outcome.fire()
            if self.core.has_output:
                self._ring()

    async def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        match effect:
            case WaitFor(outcome):
                return await self.wait(outcome, deadline)
            case Compute(function):
                return await asyncio.to_thread(function)
            case MoveBytes(function):
                await moved(function)
                return deadline.check()
            case StartUpload():
                return self._start_upload(effect)
            case ReceiveDownload():
                return await self._download(effect, deadline)
            case MapMemory(tensor):
                return await moved(partial(self._map_memory, tensor, deadline.remaining()))
        return await self._call(effect, deadline)

    @abstractmethod
    async def follow_log(self, level: str) -> AsyncLogSource:
        """Follow the server's log of this session. Raises the errors of `Session.log`."""

    async def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        """Wait until an outcome is done. Raises DeadlineExceededError."""
        if outcome.done:
            return
        done = self.done(outcome)
        if (seconds := deadline.remaining()) is None:
            await done
            return
        try:
            async with asyncio.timeout(seconds):
                await done
        except TimeoutError:
            raise deadline.error() from None

    def done(self, outcome: Outcome) -> asyncio.Future[None]:
        """Return a future that is done when the outcome is, which is not done yet."""
        done = self._loop.create_future()
        outcome.add_callback(partial(_wake, done))
        return done

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send an inline run: at once if the caller `waits`, else later in this loop iteration.

        Returns None if it must take the general path.
        """
        pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        if pending is None:
            return None
        if waits or self.core.is_full:
            self.flush()
        else:
            self._ring()
        return pending

    def flush(self) -> None:
        """Send the queued commands as soon as possible, since a caller waits."""
        self._ring()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with the session at the latest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def release(self, handle: int) -> None:
        """Free a handle soon. Safe in destructors and in other threads."""
        had_garbage = self.core.has_garbage
        self.core.release(handle)
        if not had_garbage and self.core.lost is None:
            self.on_loop(self._ring)

    def let_go(self, pending: Pending) -> None:
        """Let a run go on at observed nodes without waiting.

        Safe in destructors and in other threads.
        """
        self.core.flow(pending)
        if self.core.lost is None:
            self.on_loop(self._ring)

    def on_loop(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop's thread; not at all if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass

    def apply(self, batch: CompletionBatch) -> None:
        """Apply completions that arrived."""
        if batch.changes:
            self.info = self.watchers.apply(self.info, batch.changes)
            self.watchers.announce(batch.changes)
        self.core.apply(batch)
        for outcome in self.core.take_settled():
            outcome.fire()
        if self.core.has_output:
            self._ring()

    def _lose(self, error: HeliographError) -> bool:
        """Fail everything pending. Returns False if the session had already ended."""
        if self.core.lost is not None:
            return False
        self.advance(lambda: self.core.connection_lost(error))
        self.watchers.end(error.message or type(error).__name__)
        return True

    def abandon(self) -> None:
        """Give up the session in the child of a fork. It stays with the parent."""
        self._closed = True
        self._lose(forked())

    def upload_ended(self, upload: StartUpload, transfer: Transfer, error: HeliographError | None) -> None:
        """Record that an upload has ended, complete or not."""
        self.advance(lambda: self.core.upload_ended(upload.pending, transfer, error))

    async def close(self) -> None:
        """End the session; pending work fails with SessionClosedError.

        Idempotent, and bounded in time.
        """
        if self._closed:
            return
        self._closed = True
        await self._disconnect(self._lose(SessionClosedError("the session was closed")))
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    def _ring(self) -> None:
        """Wake the writer: there may be something to send. On the loop's thread."""

    @abstractmethod
    def _start_upload(self, upload: StartUpload) -> Transfer: ...

    @abstractmethod
    async def _download(self, download: ReceiveDownload, deadline: Deadline) -> None: ...

    @abstractmethod
    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        """Map memory; runs on a thread."""

    @abstractmethod
    async def _call(self, call: Call, deadline: Deadline) -> Any: ...

    @abstractmethod
    async def _disconnect(self, was_open: bool) -> None:
        """Free connections, in bounded time. The core is closed already.

        `was_open` is True if the server does not know of it yet.
        """


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
    ) -> None:
        """`connection`: the command socket, or why there is none. TCP connections break after
        `tcp_silence_seconds`; None: none are opened."""
        super().__init__(address, info)
        self.tcp_silence_seconds = tcp_silence_seconds
        self.link = link or Link(address, info, "off")
        self._channel, self.credentials = channel, credentials
        self.channel_options = channel_options
        self._bulk = AioBulk(self)
        self._bell = asyncio.Event()
        self.core.speaks_bytes = True
        execute: Any = channel.stream_stream(handshake.EXECUTE)
        self._stream: Any = execute()
        self._completions = CompletionReader()
        self._socket: LoopSocket | None = None
        self.core.why_no_socket = connection if isinstance(connection, str) else ""
        if not isinstance(connection, str):
            self._socket = LoopSocket(connection, MOST_BYTES, self._received, self._misread)
            self._socket.read_on()
        #: The socket, or call, of commands, after the first message.
        self._wire: Any = self._socket or self._stream
        #: True while a write is in progress; further commands wait for the next one.
        self._writing = True
        self.spawn(self._write())
        self._reader = self.spawn(self._read())

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
                    answer = await cls._greet(channel, address, timeout, end, credentials)
                if not isinstance(answer, HeliographError):
                    info = handshake.decode_open(answer, address)
                    shared, connection = await cls._share(
                        channel, address, info, shared_memory, tcp_silence, end
                    )
                    link = await moved(partial(Link, address, info, compression))
                    made = cls(address, info, channel, options, credentials, connection, tcp_silence, link)
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
            shared = await moved(partial(share, address, info, shared_memory, seconds_for(end)))
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
        channel: grpc.aio.Channel, address: Address, timeout: float, end: float, credentials: Credentials
    ) -> bytes | HeliographError:
        """Return the server's answer to the handshake, or the error."""
        call: Any = channel.unary_unary(handshake.OPEN, None, None)
        try:
            seconds = max(0.0, end - time.monotonic())
            answer: bytes = await call(handshake.open_request(), timeout=seconds, metadata=call_metadata())
            return answer
        except grpc.aio.AioRpcError as error:
            return await asyncio.to_thread(handshake.open_error, error, address, timeout, credentials)

    async def _write(self) -> None:
        try:
            await self._stream.write(encode_first(self.info.session, self._socket is not None))
            self._writing = False
            while self.core.lost is None:
                if not self._writing and (commands := self._take()):
                    self._writing = True
                    await self._wire.write(encode_commands(commands))
                    self._writing = False
                else:
                    await self._wait_for_output()
        except (grpc.RpcError, asyncio.InvalidStateError, OSError):
            logger.debug("the command stream ended; the reader reports why")

    def flush(self) -> None:
        if not self._writing and (commands := self._take()):
            self._writing = True
            begin(self._wire.write(encode_commands(commands)), self._was_sent)

    def _was_sent(self, error: BaseException | None) -> None:
        if error is not None:
            logger.debug("the command stream ended; the reader reports why: %s", error)
        self._writing = False
        if self.core.has_output:
            self._ring()

    def _take(self) -> list[Command | InlineRun]:
        return self.core.take(self.info.limits.message_bytes // 2)

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

    async def _read(self) -> None:
        error: Any = None
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                self._received((message,))
        except grpc.aio.AioRpcError as broken:
            error = broken
        except Exception as defect:
            self._misread(defect)
        if self._socket is not None:
            self._socket.drain()
        self._lose(handshake.stream_error(error, self.address))
        self._ring()

    def _received(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.apply(self._completions.read(message))

    def _misread(self, defect: Exception | None) -> None:
        """End the session for a defect of its messages; after any other end the call tells why."""
        if defect is not None and not isinstance(defect, UnavailableError):
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
        method: Any = self._channel.unary_stream(FOLLOW_LOG, None, None)
        made = AioRemoteLog(self, method(follow_request(self.info, level)))
        try:
            await made.begin()
        except BaseException:
            made.close()
            raise
        return made

    async def _call(self, call: Call, deadline: Deadline) -> Any:
        encode = partial(unary, call, self.info.session, self.info.limits)
        # The loop goes on while a large graph is encoded.
        made = await asyncio.to_thread(encode) if _is_long(call.request) else encode()
        how: dict[str, Any] = {"timeout": deadline.remaining(), "metadata": call_metadata()}
        method: Any
        try:
            if len(made.messages) == 1:
                method = self._channel.unary_unary(made.path, None, None)
                return made.decode(await method(made.messages[0], **how))
            method = self._channel.stream_unary(made.path, None, None)
            return made.decode(await method(iter(made.messages), **how))
        except grpc.aio.AioRpcError as error:
            self.core.check()
            raise handshake.typed_error(error, self.address, call.method.name) from None
        except grpc.aio.UsageError:
            self.core.check()
            raise
        except asyncio.CancelledError:
            # A channel that closes cancels its calls; their task was not cancelled.
            if (task := asyncio.current_task()) is None or not task.cancelling():
                self.core.check()
            raise

    def _start_upload(self, upload: StartUpload) -> Transfer:
        return self._bulk.start_upload(upload)

    async def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        await self._bulk.download(download, deadline)

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return memory_of(self.address, self.info, tensor, seconds)

    async def _disconnect(self, was_open: bool) -> None:
        self._ring()
        close: Any = self._channel.unary_unary(handshake.CLOSE, None, None)
        try:
            if was_open:
                await close(handshake.close_request(self.info.session), timeout=handshake.CLOSE_SECONDS)
                # The server ends the stream now. Cancelling the call instead would leave a task and
                # a thread of grpc.aio behind if the loop ends soon after.
                await asyncio.wait([self._reader], timeout=handshake.CLOSE_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.debug("closing the session: %s", error.details())
        finally:
            if not self._stream.done():
                self._stream.cancel()

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


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _is_long(request: object) -> bool:
    """True if encoding a request takes long, since its graph has many nodes."""
    graph = getattr(request, "graph", None)
    return len(getattr(graph, "nodes", ())) > MOST_NODES
