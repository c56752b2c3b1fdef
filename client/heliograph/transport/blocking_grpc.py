"""A blocking session over gRPC.

Two threads move batches: gRPC's, which pulls commands out of `_batches`, and the reader, which
applies completions. Everything else happens in the caller's thread.

The destructor of a call takes a lock that gRPC's daemon threads use too. While the interpreter
ends, one of them may be frozen with it, and the destructor would wait for ever. So no call may live
until then: closing drops the stream, and our errors are raised outside of `except`, where they
would keep gRPC's errors (which are the calls themselves) as their context.

    caller ─ drive(procedure) ─▸ core ◂─ _batches ─▸ gRPC ─▸ server ─▸ gRPC ─▸ reader ─▸ core

In a session with a lease the reader also connects again after a break. Each connection is a *link*
with a number; threads that still have an earlier one find that it is over.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from heliograph.core.connection_state import ConnectionState, Dial, Follow, GiveUp
from heliograph.core.effects import (
    Call,
    ReceiveDownload,
    StartUpload,
    do_nothing,
)
from heliograph.core.future import ANSWER, Deadline, Outcome, Pending, Transfer, logger
from heliograph.core.inline_run import InlinePlan
from heliograph.core.interrupts import undisturbed
from heliograph.core.methods import MOVE as MOVE_METHOD
from heliograph.core.tracing import CONNECT_SPAN, as_current, call_metadata
from heliograph.procedures.replay import repeat
from heliograph.transport import handshake
from heliograph.transport.blocking import BlockingShell, wait
from heliograph.transport.bulk.blocking import BlockingBulk
from heliograph.transport.bulk.link import CompressionArgument, check_compression
from heliograph.transport.bulk.tickets import Announcement, Tell, TicketUpload
from heliograph.transport.calls import Unary, unary
from heliograph.transport.channels import NO_CREDENTIALS, fetch_pinned, open_channel
from heliograph.transport.command_socket.blocking import BlockingSocket
from heliograph.transport.command_socket.opening import open_command_socket
from heliograph.transport.following import LOOK_SECONDS as LOOK_SECONDS_THERE
from heliograph.transport.following import (
    MOVED,
    Destination,
    followed,
    info_there,
    named_destination,
    renewed,
)
from heliograph.transport.log_lines import FOLLOW_LOG, LogSource, RemoteLog, follow_request
from heliograph.transport.moving import move, move_when_asked
from heliograph.transport.reconnecting import (
    DURABLE,
    GOODBYE_PAUSES,
    GOODBYE_SECONDS,
    HEAD_PAUSE_SECONDS,
    HEAD_WHY_SECONDS,
    LOOK_SECONDS,
    WHY_SECONDS,
    Tries,
    attach_seconds,
    check_granted,
    has_died,
    journal_of,
    reader_defect,
    reconnecting_of,
    tell_attached,
    tell_break,
)
from heliograph.transport.reconnecting import is_cut as is_cut_short
from heliograph.transport.shared_memory import (
    SharedMemoryArgument,
    SharedSpace,
    memory_of,
    seconds_for,
    share,
)
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.codec.inline_runs import CompletionReader, encode_commands, encode_first
from heliograph_proto.commands import Attach, Attached, CompletionBatch
from heliograph_proto.errors import (
    HeliographError,
    InternalError,
    MovedError,
    SessionClosedError,
    UnavailableError,
)
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import SessionInfo, SessionMove


def call_unary(
    channel: Any,
    path: str,
    messages: Sequence[bytes],
    seconds: float | None,
    metadata: Any = None,
    sent: Callable[[], object] = do_nothing,
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
        sent()
        wait(ended, Deadline(None, ANSWER))
    except BaseException:
        undisturbed(future.cancel)
        raise
    answer: bytes = undisturbed(future.result)
    return answer


@dataclass(frozen=True, slots=True)
class HeadLink:
    """The behaviour of the link from a head to a member.

    After a break it looks first whether anything listens at the address. If the port refuses, the
    daemon has ended, and with it the session.
    """

    #: The time for which it connects again after a break, if that is shorter than the lease.
    patience_seconds: float


class GrpcShell(BlockingShell):
    """A session over gRPC: one channel for commands and calls, one for bulk data.

    Commands go over a socket of their own (`command_socket`) where the server offers one.
    """

    is_remote = True
    _socket: BlockingSocket | None = None
    #: True once another daemon has the session, until it has made its offers.
    _is_elsewhere = False

    def __init__(
        self,
        address: Address,
        timeout: float,
        shared_memory: SharedMemoryArgument = "auto",
        silence_seconds: float = handshake.SILENCE_SECONDS,
        credentials: Credentials = NO_CREDENTIALS,
        direct: bool = True,
        compression: CompressionArgument = "auto",
        wish: handshake.Wish = handshake.NO_WISH,
        head: HeadLink | None = None,
    ) -> None:
        """`head`: set for the link from a head to a member."""
        # A head knows its members by their addresses.
        self._wish, self._shared_memory = replace(wish, is_head=head is not None), shared_memory
        self._head = head
        #: The reason for which nothing answered the last look.
        self._no_answer = ""
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
            if head is not None:
                info = replace(info, lease_ms=min(info.lease_ms, round(head.patience_seconds * 1e3)))
            shared, connection = self._share(address, info, shared_memory, end)
        except BaseException:
            undisturbed(self._channel.close)
            raise
        super().__init__(address, info)
        undisturbed(partial(self._begin, shared, connection))

    def _begin(self, shared: SharedSpace | str, connection: socket.socket | str) -> None:
        """Open the command stream."""
        self.core.set_shared(shared)
        self.core.has_lease = self.info.lease_ms > 0
        self.core.speaks_bytes = True
        self.core.journal = journal_of(self.info)
        #: The thread that makes plans again on a daemon that was restarted.
        self._repeater: threading.Thread | None = None
        self._reconnecting = reconnecting_of(self.info)
        if self._head is not None:
            self._reconnecting.longest_pause_seconds = HEAD_PAUSE_SECONDS
        #: The number of the present link, and the outcome that is done while it is up.
        self.link = 0
        self._up = Outcome()
        self._up.settle()
        #: Set once there is nothing to wait for any more.
        self._is_closing = threading.Event()
        #: The error of an attach that the core refused.
        self._refusal: HeliographError | None = None
        #: The daemon to which the session is to move.
        self.destination: Destination | None = None
        #: Held while it moves.
        self.moves = threading.Lock()
        self._watchdog: handshake.Watchdog | None = None
        self._bulk = BlockingBulk(self)
        self._start_link(connection)
        self._reader = threading.Thread(target=self._keep_reading, name="heliograph-reader", daemon=True)
        self._reader.start()

    def _start_link(self, connection: socket.socket | str, attach: Attach | None = None) -> None:
        """Begin the command stream, or go on with it, over the present channel and a socket."""
        self._has_rung = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._socket = None
        self.core.why_no_socket = connection if isinstance(connection, str) else ""
        if not isinstance(connection, str):
            completions, core = CompletionReader(), self.core
            self._socket = BlockingSocket(
                connection,
                partial(self._message, self.link),
                lambda message: self.apply(completions.read(message), len(message)),
                core,
            )
        execute: Any = self._channel.stream_stream(handshake.EXECUTE)
        # gRPC's thread may begin to read it when another link has begun.
        batches = self._batches(self.link, self._socket, self._bell, attach)
        self._stream: Any = execute(batches)
        if self._socket is not None:
            self._stream.add_done_callback(lambda _, ended=self._socket.end: ended())

    def _share(
        self, address: Address, info: SessionInfo, shared_memory: SharedMemoryArgument, end: float
    ) -> tuple[SharedSpace | str, socket.socket | str]:
        """Return shared memory and the command socket, or the reasons why there is none.

        If the memory is required, the session ends without it.
        """
        try:
            # Memory that is shared is lost with the daemon.
            shared = DURABLE if info.durable else share(address, info, shared_memory, seconds_for(end))
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
                request, metadata = handshake.open_request(self._wish), call_metadata()
                answer = call_unary(self._channel, handshake.OPEN, (request,), seconds, metadata)
            except grpc.RpcError as error:
                refused = handshake.open_error(error, address, timeout, self.credentials)
            else:
                info = handshake.decode_open(answer, address)
                check_granted(address, self._wish, info)
                return info
            if not handshake.is_starting(refused) or time.monotonic() + handshake.START_SECONDS > end:
                raise refused
            time.sleep(handshake.START_SECONDS)

    # Commands out, completions in

    def _batches(
        self,
        link: int,
        socket: BlockingSocket | None,
        bell: SimpleQueue[None],
        attach: Attach | None,
    ) -> Iterator[bytes]:
        """Yield the messages that gRPC's thread sends, until the link is over."""
        yield encode_first(self.info.session, socket is not None, attach)
        while self.core.lost is None and link == self.link:
            if socket is not None:
                socket.send_all()
            elif message := self._message(link):
                yield message
                continue
            bell.get()
            self._has_rung = False
            if self.core.has_only_garbage:
                self._gather(bell)

    def _message(self, link: int) -> bytes:
        """Return the next message to send on a link; empty if there is none."""
        with self._lock:
            if link != self.link:
                return b""
            commands = self.core.take(self.info.limits.message_bytes // 2)
            told = self.core.take_acknowledgement(commands)
        return encode_commands(commands, told) if commands or told else b""

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        with self._lock:
            pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        socket = self._socket if waits or self.core.is_full else None
        if pending is None:
            return None
        if socket is None or not socket.send_now():
            self._ring_once(waits)
        elif waits:
            socket.sent = pending
        return pending

    def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        # Completions alone end commands; other outcomes end in other ways.
        if (socket := self._socket) is not None and type(outcome) is Pending and not outcome.done:
            socket.wait(outcome, deadline)
        wait(outcome, deadline)

    def _gather(self, bell: SimpleQueue[None]) -> None:
        """Let frees gather, unless something else is to be sent."""
        try:
            bell.get(timeout=handshake.GATHER_SECONDS)
            self._has_rung = False
        except Empty:
            pass

    def _ring(self) -> None:
        self._has_rung = True
        self._bell.put(None)

    def _ring_once(self, waits: bool) -> None:
        # One wake-up sends everything queued; waking a thread takes time from this one.
        if not self._has_rung:
            self._ring()

    def apply(self, batch: CompletionBatch, size_bytes: int = 0) -> None:
        if batch.attached is None:
            super().apply(batch, size_bytes)
            if batch.move_to:
                self._asked_to_move(batch.move_to)
            return
        try:
            self.advance(partial(self._attached, batch.attached))
        except HeliographError as error:
            self._refusal = error
            raise

    def _attached(self, answer: Attached) -> None:
        self.core.attached(answer)
        self._reconnecting.attached()
        self._unwatch()
        if answer.incarnation:
            self.info = replace(self.info, incarnation=answer.incarnation)
        if self.core.repetition.is_of_restart:
            self._repeater = threading.Thread(target=self._repeat, name="heliograph-repeat", daemon=True)
            self._repeater.start()
        else:
            self._up.finish()
        seconds = time.monotonic() - self._reconnecting.broke_at
        tell_attached(self.address, seconds, self.core.unreceived, has_restarted=answer.restored)

    def _repeat(self) -> None:
        """Make plans again that a restarted daemon lacks. Calls wait for it."""
        try:
            self.drive(repeat(self.core))
        except UnavailableError as error:
            logger.debug("the connection broke again: %s", error)
        except HeliographError as error:
            self._lose(error)
        else:
            if threading.current_thread() is self._repeater:
                self._up.finish()

    def _keep_reading(self) -> None:
        """Read one link after another, until the session ends."""
        try:
            while self._reconnect(self._read()):
                pass
        except Exception as defect:
            # Without a reader, callers would wait for ever. A session that closes also ends channels.
            if self.core.lost is None:
                self._lose(reader_defect(defect))
        finally:
            # A timer that is left would keep gRPC's objects for its time.
            self._unwatch()

    def _read(self) -> HeliographError:
        """Read the present link until it ends, and return the reason."""
        stream, has_lease = self._stream, self.core.has_lease
        reader, is_cut = CompletionReader(), False
        end: HeliographError = handshake.stream_error(None, self.address)
        try:
            if (socket := self._socket) is not None:
                socket.read_until_end()
                if has_lease and self.core.lost is None:
                    is_cut = True
                    self._watch(stream, WHY_SECONDS if self._head is None else HEAD_WHY_SECONDS)
            for message in stream:
                self.apply(reader.read(message), len(message))
        except grpc.RpcError as error:
            end = handshake.stream_error(error, self.address, has_lease=has_lease)
        except Exception as defect:
            if (refused := self._refusal) is not None:
                return refused
            logger.exception("a completion could not be understood")
            return InternalError(f"a completion could not be understood: {defect}")
        finally:
            if is_cut:
                self._unwatch()
        return end

    def _watch(self, stream: Any, seconds: float) -> None:
        """Cancel a stream after a time, unless another watch begins, or the watchdog is cancelled."""
        self._unwatch()
        self._watchdog = handshake.Watchdog(stream, seconds)

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _reconnect(self, error: HeliographError) -> bool:
        """Connect again after a break. Returns False when the session has ended."""
        while self.core.lost is None:
            is_gone = self._reconnecting.is_down and self._has_died(error)
            instruction = self._reconnecting.broke(error, time.monotonic(), has_died=is_gone)
            if isinstance(instruction, GiveUp):
                self._lose(instruction.error)
                break
            if self.core.is_attached:
                self._detach(error)
            if isinstance(instruction, Dial) and self._is_closing.wait(instruction.pause_seconds):
                break
            try:
                if isinstance(instruction, Follow):
                    self._follow(instruction.moved)
                self._reconnecting.dialling()
                self._dial()
                return True
            except HeliographError as failed:
                error = failed
        return False

    def _follow(self, moved: MovedError) -> None:
        """Take another daemon for the session's. Raises PermissionDeniedError."""
        there = followed(moved, self.address, self.credentials, self.destination)
        fetch_pinned(there.address, there.credentials, LOOK_SECONDS_THERE)
        with self._lock:
            self.address, self.credentials = there.address, there.credentials
            self.info = info_there(self.info, moved)
            self.core.leave_shared(MOVED)
            self._is_elsewhere = True

    def move(self, url: str, wait_seconds: float | None, deadline: Deadline) -> SessionMove:
        there = named_destination(url, self.address, self.credentials)
        return move(self, there, wait_seconds, deadline)

    def _asked_to_move(self, url: str) -> None:
        """The server drains, and names another daemon: move there, on a thread."""
        run = partial(move_when_asked, self, url, self._is_closing.wait)
        threading.Thread(target=run, name="heliograph-move", daemon=True).start()

    def _has_died(self, error: HeliographError) -> bool:
        """True if an attempt to connect again found that the daemon has ended."""
        if self._head is not None:
            return self._no_answer in handshake.NO_LISTENER or handshake.is_starting(error)
        return has_died(self.address, self.info, self.core.shared is not None)

    def _look(self) -> None:
        """Raise UnavailableError if nothing accepts connections at the address."""
        self._no_answer = handshake.why_unreachable(self.address)[0] if self._head is not None else ""
        if self._no_answer:
            raise handshake.broken(self.address, self._no_answer)

    def _detach(self, error: HeliographError) -> None:
        """Let nothing leave until the session has a connection again."""
        with self._lock:
            self.core.detached()
            self.link += 1
            self._up = Outcome()
        self._end_link()
        tell_break(error, self._reconnecting.seconds, self.when_disconnected)

    def _end_link(self) -> None:
        self._unwatch()
        self._bell.put(None)
        if self._socket is not None:
            # Callers that read it find it over.
            self._socket.end()
        undisturbed(self._stream.cancel)

    def _dial(self) -> None:
        """Begin another link, which the reader reads on. Raises UnavailableError."""
        self._look()
        end = time.monotonic() + attach_seconds(self._reconnecting)
        channel = undisturbed(partial(open_channel, self.address, self.channel_options, self.credentials))
        with self._lock:
            before, self._channel = self._channel, channel
            self.link += 1
            attach = self.core.attach(self.info.incarnation)
            is_over = self._is_closing.is_set()
        # Its thread finds that it is over.
        self._end_link()
        undisturbed(before.close)
        if is_over:
            undisturbed(channel.close)
            raise SessionClosedError("the session was closed")
        if self._is_elsewhere or self.info.durable:
            self._renew_offers(end)
        self._bulk.renew()
        connection = open_command_socket(
            self.address, self.info, self._shared_memory, self.tcp_silence_seconds, seconds_for(end)
        )
        self._start_link(connection, attach)
        self._watch(self._stream, max(0.05, end - time.monotonic()))

    def _renew_offers(self, end: float) -> None:
        """Ask a daemon that may be another one for its offers, as a handshake does."""
        request, seconds = handshake.offers_request(self.info.session), max(0.0, end - time.monotonic())
        try:
            answer: Any = call_unary(self._channel, handshake.OFFERS, (request,), seconds)
        except grpc.RpcError as error:
            answer = error
        info, shared = renewed(self.address, self.info, answer, self._shared_memory, end)
        with self._lock:
            self.info, self._is_elsewhere = info, False
            self.core.set_shared(shared)

    def await_up(self, deadline: Deadline, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait while the session has no connection, or until `is_over`.

        Raises the error that ended the session, and DeadlineExceededError.
        """
        repeats = threading.current_thread() is self._repeater
        while not (up := self._up).done and not is_over() and not repeats:
            seconds = deadline.remaining()
            if seconds is not None and not seconds:
                raise deadline.error()
            done = threading.Event()
            up.add_callback(done.set)
            done.wait(LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS))
        self.advance(self.core.check)

    @property
    def connection_state(self) -> ConnectionState:
        return self._reconnecting.state

    @property
    def why_down(self) -> HeliographError | None:
        """The error with which the connection broke, while the session has none."""
        return self._reconnecting.error if self._reconnecting.is_down else None

    def _lose(self, error: HeliographError) -> bool:
        is_first = super()._lose(error)
        self._reconnecting.close()
        self._up.finish()
        return is_first

    # Calls and bulk

    def _call(self, call: Call, deadline: Deadline) -> Any:
        session, tries = self.info.session, Tries()
        made = unary(call, session, self.info.limits)
        while True:
            self.await_up(deadline)
            if self.info.session != session:
                session, made = self._elsewhere(call)
            link, is_cut = self.link, False
            # For a closed channel gRPC raises only ValueError.
            channel = self._channel
            self.advance(self.core.check)
            try:
                seconds, metadata = deadline.remaining(), call_metadata()
                answer = call_unary(channel, made.path, made.messages, seconds, metadata, made.sent)
                return made.decode(answer)
            except grpc.RpcError as error:
                is_cut = is_cut_short(error) or self.info.session != session
                refused = handshake.typed_error(error, self.address, call.method.name)
            except ValueError:
                if not self.core.has_lease:
                    raise
                is_cut, refused = True, handshake.broken(self.address, "its channel was closed")
            self.advance(self.core.check)
            pause = tries.again(link) if is_cut and self.core.has_lease else None
            if pause is None:
                raise refused
            self._is_closing.wait(pause)

    def _elsewhere(self, call: Call) -> tuple[bytes, Unary]:
        """Return a call for the daemon that has the session now. Raises MovedError for a move."""
        if call.method is MOVE_METHOD:
            raise MovedError("the session has moved")
        return self.info.session, unary(call, self.info.session, self.info.limits)

    def call(self, call: Call, deadline: Deadline) -> Any:
        """Call a method of the server; see `_call`."""
        return self._call(call, deadline)

    def _start_upload(self, upload: StartUpload) -> Transfer:
        return undisturbed(lambda: self._bulk.start_upload(upload))

    def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        self._bulk.download(download, deadline)

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return memory_of(self.address, self.info, tensor, seconds)

    def _log_source(self, level: str) -> LogSource:
        tries = Tries()

        def begin_call() -> Any:
            return self._channel.unary_stream(FOLLOW_LOG, None, None)(follow_request(self.info, level))

        def may_go_on(error: Exception) -> bool:
            is_cut = self.core.has_lease and is_cut_short(error)
            pause = tries.again(self.link) if is_cut else None
            if pause is None or self._is_closing.wait(pause):
                return False
            try:
                self.await_up(Deadline(None))
            except HeliographError:
                return False
            return True

        return RemoteLog(begin_call, self.address, may_go_on)

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
        self._is_closing.set()
        self._ring()
        self._unwatch()
        if was_open:
            # Before the connection ends, which the server would take for a break.
            seconds = handshake.CLOSE_SECONDS if self.core.is_attached else GOODBYE_SECONDS
            self._say_goodbye(self.info.session, seconds)
        if self._socket is not None:
            # Callers that read it find the session closed.
            self._socket.end()
        self._stream.cancel()
        self._bulk.close()
        self._channel.close()
        if self._reader is not threading.current_thread():
            self._reader.join(handshake.CLOSE_SECONDS)
        # See the module's docstring. A channel that the garbage collector finds would delay, and
        # ignore, what interrupts the thread that it runs in.
        self._stream = self._channel = self._socket = None

    def leave(self) -> None:
        """End the session here alone: the server keeps it for its lease, as after a break.

        Idempotent."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._is_closing.set()
        undisturbed(self._stream.cancel)
        self._lose(SessionClosedError("the session was left"))
        self._disconnect(False)

    def end_earlier(self, session: bytes) -> None:
        """End an earlier session of this client, which it has no connection for any more."""
        self._say_goodbye(session)

    def _say_goodbye(self, session: bytes, seconds: float = handshake.CLOSE_SECONDS) -> None:
        request = handshake.close_request(session)
        for pause in (*GOODBYE_PAUSES, None):
            try:
                call_unary(self._channel, handshake.CLOSE, (request,), seconds)
                return
            except grpc.RpcError as error:
                logger.debug("closing the session: %s", error)
                is_cut = is_cut_short(error)
                handshake.forget_traceback(error)
                if pause is None or not is_cut:
                    return
                time.sleep(pause)
            except ValueError as error:
                logger.debug("closing the session: %s", error)
                return
