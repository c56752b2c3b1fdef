"""The blocking shell: one session over gRPC, driven by the threads that call it.

Two threads move batches: gRPC's, which pulls commands out of `_batches`, and the reader, which
applies completions. Everything else happens in the caller's thread. The core is used only under
`_lock`; outcomes are fired, and threads woken, outside of it.

The destructor of a call takes a lock that gRPC's daemon threads use too. While the interpreter
ends, one of them may be frozen with it, and the destructor would wait for ever. So no call may live
until then: closing drops the stream, and our errors are raised outside of `except`, where they
would keep gRPC's errors (which are the calls themselves) as their context.

    caller ─ drive(procedure) ─▸ core ◂─ _batches ─▸ gRPC ─▸ server ─▸ gRPC ─▸ reader ─▸ core
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

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
from heliograph.core.interrupts import raise_ignored, undisturbed
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import forked
from heliograph.core.tracing import CONNECT_SPAN, as_current, call_metadata
from heliograph.core.watching import Watchers
from heliograph.transport import handshake
from heliograph.transport.bulk.blocking import BlockingBulk
from heliograph.transport.bulk.link import CompressionArgument, check_compression
from heliograph.transport.bulk.tickets import Announcement, Tell, TicketUpload
from heliograph.transport.calls import unary
from heliograph.transport.channels import FORKED, NO_CREDENTIALS, fetch_pinned, open_channel
from heliograph.transport.command_socket.blocking import BlockingSocket
from heliograph.transport.command_socket.opening import open_command_socket
from heliograph.transport.log_lines import LogSource, RemoteLog
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
from heliograph_proto.commands import CompletionBatch
from heliograph_proto.errors import HeliographError, InternalError, SessionClosedError, UnsupportedError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import SessionInfo

T = TypeVar("T")


class BlockingShell(ABC):
    """A shell that runs procedures in the caller's thread; subclasses carry the bytes."""

    def __init__(self, address: Address, info: SessionInfo) -> None:
        self.address = address
        self.info = info
        self.core = ClientCore(info.limits)
        self.core.places_contents = DIRECT_WEIGHTS in info.features
        # Reentrant: a destructor may run, and use the session, while this thread holds it.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self.watchers = Watchers()
        self._when_lost: list[Callable[[HeliographError], None]] = []
        _SHELLS.add(self)
        FORKED.add(self)
        raise_ignored()

    def drive(self, procedure: Procedure[T], timeout: float | None = None, what: What = ANSWER) -> T:
        """Run a procedure to its end. Raises DeadlineExceededError, with the words of `what`."""
        deadline = Deadline(timeout, what)
        step: Callable[[], Effect] = lambda: next(procedure)  # noqa: E731
        try:
            while True:
                step = self._performed(procedure, self.advance(step), deadline)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except BaseException:
            # Also for Ctrl-C between two effects: the procedure cleans up, under the lock.
            self.advance(procedure.close)
            raise

    def _performed(self, procedure: Procedure[T], effect: Effect, deadline: Deadline) -> Callable[[], Effect]:
        """Perform an effect.

        Returns the step that continues the procedure with its result or error.
        """
        try:
            result = self._perform(effect, deadline)
        except BaseException as error:
            # The error has the same words wherever the end of the time is noticed.
            raised = deadline.worded(error)
            return lambda: procedure.throw(raised)
        return lambda: procedure.send(result)

    def advance(self, step: Callable[[], T]) -> T:
        """Perform a step of the core under the lock, fire what it settled, send what it queued."""
        return undisturbed(partial(self._advance, step))

    def _advance(self, step: Callable[[], T]) -> T:
        settled: list[Outcome] = []
        try:
            with self._lock:
                try:
                    return step()
                finally:
                    settled = self.core.take_settled()
                    output = self.core.has_output
        finally:
            for outcome in settled:
                outcome.fire()
            if output:
                self._ring()

    def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        match effect:
            case WaitFor(outcome):
                return self.wait(outcome, deadline)
            case Compute(function):
                return function()
            case MoveBytes(function):
                function()
                return deadline.check()
            case StartUpload():
                return self._start_upload(effect)
            case ReceiveDownload():
                return self._download(effect, deadline)
            case MapMemory(tensor):
                return self._map_memory(tensor, deadline.remaining())
        return self._call(effect, deadline)

    def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        """Block until an outcome is done. Raises DeadlineExceededError."""
        wait(outcome, deadline)

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send an inline run. Returns None if it must take the general path."""
        with self._lock:
            pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        if pending is not None:
            self._ring_once()
        return pending

    def _ring_once(self) -> None:
        """Ring, unless an earlier ring was not heard yet."""
        self._ring()

    def release(self, handle: int) -> None:
        """Free a handle soon. Safe in destructors: takes no lock."""
        had_garbage = self.core.has_garbage
        self.core.release(handle)
        if not had_garbage:
            self._ring()

    def let_go(self, pending: Pending) -> None:
        """Let a run go on at observed nodes without waiting. Safe in destructors: takes no lock."""
        self.core.flow(pending)
        self._ring()

    def close(self) -> None:
        """End the session; pending work fails with SessionClosedError.

        Idempotent, and bounded in time.
        """
        undisturbed(self._close)

    def _close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._process == os.getpid():
            self._disconnect(self._lose(SessionClosedError("the session was closed")))

    def abandon(self) -> None:
        """Give up the session in the child of a fork.

        It stays with the parent; nothing may wait.
        """
        self._lock = threading.RLock()
        self._lose(forked())

    def apply(self, batch: CompletionBatch) -> None:
        """Apply completions that arrived."""
        if batch.changes:
            self.info = self.watchers.apply(self.info, batch.changes)
            self.watchers.announce(batch.changes)
        self.advance(partial(self.core.apply, batch))

    def _lose(self, error: HeliographError) -> bool:
        """Fail everything pending. Returns False if the session had already ended."""
        if self.core.lost is not None:
            return False
        self.advance(lambda: self.core.connection_lost(error))
        self.watchers.end(error.message or type(error).__name__)
        for callback in self._take_callbacks():
            callback(error)
        return True

    def when_lost(self, callback: Callable[[HeliographError], None]) -> None:
        """Call a function once, with the reason, when the session ends; at once if it has ended.

        It is called from any thread, and must not block or raise.
        """
        with self._lock:
            self._when_lost.append(callback)
        if self.core.lost is not None:
            for one in self._take_callbacks():
                one(self.core.lost)

    def _take_callbacks(self) -> list[Callable[[HeliographError], None]]:
        with self._lock:
            taken, self._when_lost = self._when_lost, []
        return taken

    def announce(self, contents: Sequence[tuple[bytes, int, int]], tell: Tell) -> Announcement:
        """Announce contents by digest, handle of the tensor, and size.

        Raises UnsupportedError in one process.
        """
        raise UnsupportedError("within one process no other client sends contents")

    def bring(self, offer: ContentOffer, size_bytes: int) -> TicketUpload:
        """Return an upload by a ticket of this session's server, to begin.

        Raises UnsupportedError likewise.
        """
        raise UnsupportedError("within one process there are no tickets")

    def follow_log(self, level: str) -> LogSource:
        """Follow the server's log of this session. Raises the errors of `Session.log`."""
        self.advance(self.core.check)
        made = self._log_source(level)
        self.when_lost(lambda _: made.close())
        return made

    @abstractmethod
    def _log_source(self, level: str) -> LogSource: ...

    @abstractmethod
    def _ring(self) -> None:
        """Wake the writer: there may be something to send. Safe in destructors."""

    @abstractmethod
    def _start_upload(self, upload: StartUpload) -> Transfer: ...

    @abstractmethod
    def _download(self, download: ReceiveDownload, deadline: Deadline) -> None: ...

    @abstractmethod
    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]: ...

    @abstractmethod
    def _call(self, call: Call, deadline: Deadline) -> Any: ...

    @abstractmethod
    def _disconnect(self, was_open: bool) -> None:
        """Free threads and connections, in bounded time. The core is closed already.

        `was_open` is True if the server does not know of it yet.
        """


def wait(outcome: Outcome, deadline: Deadline) -> None:
    """Block until an outcome is done. Raises DeadlineExceededError."""
    if outcome.done:
        return
    # A lock that is held until then. An Event takes several locks, and several times as long.
    done = threading.Lock()
    done.acquire()
    outcome.add_callback(done.release)
    seconds = deadline.remaining()
    if not done.acquire(timeout=-1 if seconds is None else seconds):
        raise deadline.error()


def call_unary(
    channel: Any, path: str, messages: Sequence[bytes], seconds: float | None, metadata: Any = None
) -> bytes:
    """Return the answer to a call with a request in one or several messages. Raises grpc.RpcError.

    gRPC's own code must not be interrupted: it would leave its locks taken. So the wait is ours.
    """
    one = len(messages) == 1
    method = (channel.unary_unary if one else channel.stream_unary)(path, None, None)
    request = messages[0] if one else iter(messages)
    make = partial(method.future, request, timeout=seconds, metadata=metadata)
    future = undisturbed(make)
    ended = Outcome()
    try:
        undisturbed(lambda: future.add_done_callback(lambda _: ended.finish()))
        wait(ended, Deadline(None, ANSWER))
    except BaseException:
        undisturbed(future.cancel)
        raise
    answer: bytes = undisturbed(future.result)
    return answer


class GrpcShell(BlockingShell):
    """A session over gRPC: one channel for commands and calls, one for bulk data.

    Commands go over a socket of their own (`command_socket`) where the server offers one.
    """

    _socket: BlockingSocket | None = None

    def __init__(
        self,
        address: Address,
        timeout: float,
        shared_memory: SharedMemoryArgument = "auto",
        silence_seconds: float = handshake.SILENCE_SECONDS,
        credentials: Credentials = NO_CREDENTIALS,
        direct: bool = True,
        compression: CompressionArgument = "auto",
    ) -> None:
        self.compression = check_compression(compression)
        #: The silence after which TCP connections break; None: none are opened.
        self.tcp_silence_seconds = silence_seconds if direct else None
        self.channel_options = handshake.channel_options(silence_seconds)
        self.credentials = credentials
        end = time.monotonic() + timeout
        fetch_pinned(address, credentials, timeout)
        self._channel: Any = undisturbed(partial(open_channel, address, self.channel_options, credentials))
        try:
            with as_current(CONNECT_SPAN):
                info = self._open(address, timeout)
            shared, connection = self._share(address, info, shared_memory, end)
        except BaseException:
            undisturbed(self._channel.close)
            raise
        super().__init__(address, info)
        undisturbed(partial(self._begin, shared, connection))

    def _begin(self, shared: SharedSpace | str, connection: socket.socket | str) -> None:
        """Open the command stream."""
        self.core.set_shared(shared)
        if isinstance(connection, str):
            self.core.why_no_socket = connection
        else:
            self.core.why_no_socket = ""
            completions, core = CompletionReader(), self.core
            self._socket = BlockingSocket(
                connection,
                self._message,
                lambda message: self.apply(completions.read(message)),
                lambda: core.is_answered,
            )
        self._bulk = BlockingBulk(self)
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._has_rung = False
        self.core.speaks_bytes = True
        execute: Any = self._channel.stream_stream(handshake.EXECUTE)
        self._stream: Any = execute(self._batches())
        if self._socket is not None:
            self._stream.add_done_callback(lambda _, ended=self._socket.end: ended())
        self._reader = threading.Thread(
            target=self._read, args=(self._stream,), name="heliograph-reader", daemon=True
        )
        self._reader.start()

    def _share(
        self, address: Address, info: SessionInfo, shared_memory: SharedMemoryArgument, end: float
    ) -> tuple[SharedSpace | str, socket.socket | str]:
        """Return shared memory and the command socket, or the reasons why there is none.

        If the memory is required, the session ends without it.
        """
        try:
            shared = share(address, info, shared_memory, seconds_for(end))
            return shared, open_command_socket(
                address, info, shared_memory, self.tcp_silence_seconds, seconds_for(end)
            )
        except BaseException:
            self._say_goodbye(info.session)
            raise

    def _open(self, address: Address, timeout: float) -> SessionInfo:
        end = time.monotonic() + timeout
        while True:
            try:
                seconds = max(0.0, end - time.monotonic())
                request, metadata = handshake.open_request(), call_metadata()
                answer = call_unary(self._channel, handshake.OPEN, (request,), seconds, metadata)
            except grpc.RpcError as error:
                refused = handshake.open_error(error, address, timeout, self.credentials)
            else:
                return handshake.decode_open(answer, address)
            if not handshake.is_starting(refused) or time.monotonic() + handshake.START_SECONDS > end:
                raise refused
            time.sleep(handshake.START_SECONDS)

    # Commands out, completions in

    def _batches(self) -> Iterator[bytes]:
        """Yield the messages that gRPC's thread sends, until the session ends."""
        socket = self._socket
        yield encode_first(self.info.session, socket is not None)
        while self.core.lost is None:
            if socket is not None:
                socket.send_all()
            elif message := self._message():
                yield message
                continue
            self._bell.get()
            self._has_rung = False
            if self.core.has_only_garbage:
                self._gather()

    def _message(self) -> bytes:
        """Return the next message to send; empty if there is none."""
        with self._lock:
            commands = self.core.take(self.info.limits.message_bytes // 2)
        return encode_commands(commands) if commands else b""

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        with self._lock:
            pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        socket = self._socket if waits or self.core.is_full else None
        if pending is None:
            return None
        if socket is None or not socket.send_now():
            self._ring_once()
        elif waits:
            socket.sent = pending
        return pending

    def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        # Completions alone end commands; other outcomes end in other ways.
        if (socket := self._socket) is not None and type(outcome) is Pending and not outcome.done:
            socket.wait(outcome, deadline)
        wait(outcome, deadline)

    def _gather(self) -> None:
        """Let frees gather, unless something else is to be sent."""
        try:
            self._bell.get(timeout=handshake.GATHER_SECONDS)
            self._has_rung = False
        except Empty:
            pass

    def _ring(self) -> None:
        self._has_rung = True
        self._bell.put(None)

    def _ring_once(self) -> None:
        # One wake-up sends everything queued; waking a thread takes time from this one.
        if not self._has_rung:
            self._ring()

    def _read(self, stream: Any) -> None:
        end: HeliographError = handshake.stream_error(None, self.address)
        reader = CompletionReader()
        try:
            if (socket := self._socket) is not None:
                socket.read_until_end()
            for message in stream:
                self.apply(reader.read(message))
        except grpc.RpcError as error:
            end = handshake.stream_error(error, self.address)
        except Exception as defect:
            logger.exception("a completion could not be understood")
            end = InternalError(f"a completion could not be understood: {defect}")
        self._lose(end)

    # Calls and bulk

    def _call(self, call: Call, deadline: Deadline) -> Any:
        made = unary(call, self.info.session, self.info.limits)
        # For a closed channel gRPC raises only ValueError.
        channel = self._channel
        self.advance(self.core.check)
        try:
            return made.decode(
                call_unary(channel, made.path, made.messages, deadline.remaining(), call_metadata())
            )
        except grpc.RpcError as error:
            refused = handshake.typed_error(error, self.address, call.method.name)
        self.advance(self.core.check)
        raise refused

    def _start_upload(self, upload: StartUpload) -> Transfer:
        return undisturbed(lambda: self._bulk.start_upload(upload))

    def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        self._bulk.download(download, deadline)

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return memory_of(self.address, self.info, tensor, seconds)

    def _log_source(self, level: str) -> LogSource:
        return RemoteLog(self._channel, self.address, self.info, level)

    def announce(self, contents: Sequence[tuple[bytes, int, int]], tell: Tell) -> Announcement:
        return self._bulk.announce(contents, tell)

    def bring(self, offer: ContentOffer, size_bytes: int) -> TicketUpload:
        return self._bulk.bring(offer, size_bytes)

    def abandon(self) -> None:
        super().abandon()
        self._bulk.abandon()
        if self._socket is not None:
            self._socket.abandon()

    def _disconnect(self, was_open: bool) -> None:
        self._ring()
        if self._socket is not None:
            # Callers that read it find the session closed.
            self._socket.end()
        if was_open:
            self._say_goodbye(self.info.session)
        self._stream.cancel()
        self._bulk.close()
        self._channel.close()
        if self._reader is not threading.current_thread():
            self._reader.join(handshake.CLOSE_SECONDS)
        # See the module's docstring. A channel that the garbage collector finds would delay, and
        # ignore, what interrupts the thread that it runs in.
        self._stream = self._channel = self._socket = None

    def _say_goodbye(self, session: bytes) -> None:
        request = handshake.close_request(session)
        try:
            call_unary(self._channel, handshake.CLOSE, (request,), handshake.CLOSE_SECONDS)
        except grpc.RpcError as error:
            logger.debug("closing the session: %s", error)
            handshake.forget_traceback(error)


#: Sessions to close when the interpreter ends.
_SHELLS: weakref.WeakSet[BlockingShell] = weakref.WeakSet()


def _close_all() -> None:
    # Pools of this process first: otherwise they would log the end of their members' sessions as
    # losses.
    for shell in sorted(_SHELLS, key=lambda one: isinstance(one, GrpcShell)):
        shell.close()


atexit.register(_close_all)
