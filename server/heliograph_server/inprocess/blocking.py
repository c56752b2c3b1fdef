"""`local:`: the server's core in this process, without gRPC or another process.

Commands go straight from the caller's thread into the core's session, which does short runs there.
Other completions come back on the threads of the devices. A small thread of each session sends the
frees of destructors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from heliograph.core import methods as m
from heliograph.core.effects import Call, ReceiveDownload, StartUpload
from heliograph.core.future import Deadline, Outcome, Pending, Transfer
from heliograph.core.interrupts import runs_handlers, undisturbed
from heliograph.graph.files.mapped_files import readable
from heliograph.session import Session as ClientSession
from heliograph.transport import handshake
from heliograph.transport.allocator import facts_here
from heliograph.transport.blocking import BlockingShell, wait
from heliograph.transport.bulk.messages import Receiver
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph.transport.log_lines import LocalLog, LogSource
from heliograph.transport.shared_memory import mapped
from heliograph_proto import __version__
from heliograph_proto.addresses import Address, Credentials, parse_address
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.commands import Command
from heliograph_proto.devices import ProbeResult
from heliograph_proto.errors import CancelledError, HeliographError, InternalError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, ContentOffer, PlaceContentsRequest, PlanInfo, ReceivedGraph
from heliograph_proto.sessions import SessionInfo, Traffic
from heliograph_server.resources.failures import typed
from heliograph_server.session.parts.runs_alone import RunsAlone

if TYPE_CHECKING:
    from heliograph_server.resources.principals import Principal
    from heliograph_server.runtime.host import Host
    from heliograph_server.session.session import Session
    from heliograph_server.telemetry.log_followers import LogFollower
    from heliograph_server.weights.uploads import IncomingUpload

#: The size of the pieces of an upload, after each of which progress is reported.
_CHUNK_BYTES = 8 * 2**20
#: All sessions on the devices of this process belong to one tenant.
_SECRET = b"this process alone"
_CLIENT = f"heliograph-python/{__version__}"


@dataclass(frozen=True, slots=True)
class _Key:
    """The devices of a specification, or the daemons of a pool."""

    specification: str = ""
    members: tuple[str, ...] = ()
    #: The credentials presented to the daemons of a pool.
    credentials: Credentials = NO_CREDENTIALS


class _SharedHosts:
    """The devices of this process by specification, and its pools, from their first session to the
    last."""

    def __init__(self) -> None:
        self._hosts: dict[_Key, _SharedHost] = {}
        self._lock = threading.Lock()

    def acquire(self, key: _Key, timeout: float) -> _SharedHost:
        """Return the opened host of a key.

        Raises ConfigurationError, and UnavailableError if no member of a pool answers in time.
        """
        from heliograph_backends.registry import DEFAULT_SPECIFICATIONS

        if (key.specification,) == DEFAULT_SPECIFICATIONS:
            key = replace(key, specification="")
        with self._lock:
            shared = self._hosts.setdefault(key, _SharedHost(key))
            shared.users += 1
        try:
            shared.open(timeout)
        except BaseException:
            self.release(shared)
            raise
        return shared

    def release(self, shared: _SharedHost) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            del self._hosts[shared.key]
        shared.close()

    def forget(self) -> None:
        """Reset in the child of a fork: the threads of the devices stay in the parent."""
        self.__init__()  # type: ignore[misc]


class _SharedHost:
    """The devices of a specification, or a pool, and the number of their sessions."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        #: Guarded by the lock of `_SharedHosts`.
        self.users = 0
        self._host: Host | None = None
        # Starting devices may take long; sessions on other hosts do not wait for it.
        self._lock = threading.Lock()

    @property
    def host(self) -> Host:
        assert self._host is not None
        return self._host

    def open(self, timeout: float) -> None:
        with self._lock:
            if self._host is None:
                self._host = self._pool(timeout) if self.key.members else self._own()

    def _own(self) -> Host:
        from heliograph_backends.registry import open_registry
        from heliograph_server.runtime.host import Host

        given = self.key.specification
        registry = open_registry((given,)) if given else open_registry()
        host = Host(registry)
        if any(one.site is not None for one in registry.devices):
            from heliograph_server.links.blocking import BlockingPeers

            host.exchange.use(BlockingPeers())
        return host

    def _pool(self, timeout: float) -> Host:
        from heliograph_server.pool import open_pool_of

        return open_pool_of(self.key.members, timeout, self.key.credentials)

    def close(self) -> None:
        with self._lock:
            if self._host is not None:
                self._host.close()


_SHARED = _SharedHosts()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHARED.forget)


class LocalTransport:
    """A session of the core, and the effects of a client on it. Blocking; used from any thread."""

    def __init__(self, host: Host, info: SessionInfo, release: Callable[[], None] = lambda: None) -> None:
        """`info`: an open session of the host. `release` is called once the session has ended."""
        self.host, self.info, self._release = host, info, release
        self.session: Session = host.session(info.session)

    @classmethod
    def open(
        cls, address: Address, timeout: float = 10.0, credentials: Credentials = NO_CREDENTIALS
    ) -> LocalTransport:
        """Open a session on the devices of this process, or on a pool, which gets `credentials`."""
        shared = _SHARED.acquire(_Key(address.specification, address.members, credentials), timeout)
        try:
            info = shared.host.open_session(_CLIENT, secret=_SECRET)
            return cls(shared.host, info, partial(_SHARED.release, shared))
        except BaseException:
            _SHARED.release(shared)
            raise

    def close(self) -> None:
        """End the session, and the devices after their last session. Called once."""
        try:
            self.session.close()
        finally:
            self._release()

    def call(self, call: Call) -> Any:
        """Answer a call."""
        return _ANSWERS[call.method](self, call.request)

    def find_missing(self, request: m.FindMissing) -> m.Missing:
        """Return the missing contents, once those that were sent have arrived."""
        self.session.when_here(request.sent).result()
        missing = self.session.missing_contents(request.digests)
        return tuple(zip(missing, self.session.received_contents(missing), strict=True))

    def place_contents(self, request: PlaceContentsRequest) -> tuple[ContentOffer, ...]:
        """Place the contents. Returns no offers: uploads to this process are forwarded at once."""
        self.session.place_contents(_received(request.compile), request.missing_digests)
        return ()

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Compile, once the tensors that the request binds are written."""
        # The end of the session ends every write, and so this wait.
        self.session.when_written(request.bindings.values()).result()
        return self.session.compile(_received(request))

    def follow_log(self, level: str, wake: Callable[[], None]) -> LogFollower:
        """Follow the log of the session. `wake` is called when there are lines to take.

        Raises InvalidArgumentError, LimitExceededError.
        """
        from heliograph_server.telemetry.log_followers import LogFollower

        return LogFollower(self.session.log_owner, level, wake)

    def undo(self, call: Call) -> None:
        """Undo a call whose caller no longer waits."""
        if (undo := _UNDO.get(call.method)) is not None:
            undo(self.session, call.request)

    def upload(self, upload: StartUpload) -> None:
        """Upload bytes. Raises the errors of the core.

        Ctrl-C is raised between two chunks: within the core it could leave a lock taken.
        """
        begun: list[IncomingUpload] = []
        try:
            self._upload(upload, begun)
        except BaseException as error:
            if begun and not isinstance(error, HeliographError):
                undisturbed(lambda: begun[0].abort(CancelledError("the upload was interrupted")))
            raise

    def _upload(self, upload: StartUpload, begun: list[IncomingUpload]) -> None:
        start, size = upload.offset_bytes, upload.data.nbytes
        undisturbed(lambda: begun.append(self.session.begin_upload(upload.target, size, start)))
        (receiver,) = begun
        for offset in range(start, size, _CHUNK_BYTES):
            chunk = readable(upload.data[offset : offset + _CHUNK_BYTES])
            undisturbed(partial(receiver.write, offset, chunk))
            if upload.progress is not None:
                upload.progress(chunk.nbytes)
        undisturbed(receiver.finish)

    def download(self, download: ReceiveDownload, deadline: Deadline) -> Traffic:
        """Download bytes, and return the number of copied ones. Raises the error of the command,
        DeadlineExceededError."""
        opened: list[Any] = []
        try:
            undisturbed(lambda: opened.append(self.session.open_download(download.transfer)))
            (source,) = opened
            arrived = Outcome()
            undisturbed(lambda: source.future.add_done_callback(lambda _: arrived.finish()))
            wait(arrived, deadline)
            receiver = Receiver(download.out)
            messages = undisturbed(partial(source.wait, 0)).encoded
            while messages:
                receiver.piece(messages.popleft())
            receiver.finish()
            return Traffic(copied_out_bytes=receiver.copied_bytes)
        finally:
            for source in opened:
                undisturbed(source.close)

    def map_memory(self, tensor: int) -> tuple[Any, int]:
        """Return the memory of a tensor's buffer, and the tensor's offset in it."""
        found = undisturbed(partial(self.session.share_tensor, tensor))
        try:
            return mapped(found.descriptor, found.size_bytes), found.offset_bytes
        finally:
            os.close(found.descriptor)


def _received(request: CompileRequest) -> CompileRequest:
    """Return the request with the digest that its graph would have on the wire, so that a session
    recognizes it."""
    from heliograph_proto.codec import graph_bytes

    graph = request.graph
    assert isinstance(graph, Graph)
    try:
        data = graph_bytes(graph)
        return replace(request, graph=ReceivedGraph(sha256(data).digest(), len(data), lambda: graph, data))
    except (TypeError, ValueError):
        # No message can hold the graph; the core raises the error.
        return request


RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
_Question: TypeAlias = m.Method[Any, Any]


def _row(
    method: m.Method[RequestT, AnswerT], answer: Callable[[LocalTransport, RequestT], AnswerT]
) -> tuple[_Question, Callable[[LocalTransport, Any], Any]]:
    return method, answer


def _refuse_probe(here: LocalTransport, request: m.ProbeRequest) -> ProbeResult:
    raise UnsupportedError("a session in this process has no daemon to measure from")


_ANSWERS = dict(
    (
        _row(m.FIND_MISSING, LocalTransport.find_missing),
        _row(m.COMPILE, LocalTransport.compile),
        _row(m.PLACE_CONTENTS, LocalTransport.place_contents),
        _row(m.RESERVE, lambda here, request: here.session.reserve(request)),
        _row(m.ESTIMATE, lambda here, request: here.session.estimate(request)),
        _row(m.EXPLAIN, lambda here, query: here.session.explain(query.plan, query.measure)),
        _row(m.GET_MEMORY, lambda here, device: here.host.memory(device)),
        _row(m.LIST_DEVICES, lambda here, _: replace(here.host.device_list(), facts=facts_here())),
        _row(m.LIST_LINKS, lambda here, _: here.host.links()),
        _row(m.QUERY_OPS, lambda here, asked: here.host.query_ops(asked.device, asked.queries)),
        _row(
            m.QUERY_PLACEMENT,
            lambda here, asked: here.host.query_placement(asked.device, asked.buffer_type, asked.tensors),
        ),
        _row(
            m.GET_STATISTICS,
            lambda here, _: replace(here.session.traffic, peers=here.host.exchange.traffic),
        ),
        _row(m.PROBE, _refuse_probe),
        _row(m.LIST_MODELS, lambda here, _: here.session.models()),
        _row(m.DESCRIBE_MODEL, lambda here, name: here.session.describe_model(name)),
    )
)
#: The undoing of calls whose caller no longer waits.
_UNDO: dict[_Question, Callable[[Session, Any], None]] = {
    m.COMPILE: lambda session, request: session.discard_plan(request.plan),
    m.RESERVE: lambda session, request: session.discard_reservation(request.reservation),
}
#: Calls that may take long, or ask another daemon.
_LONG = frozenset(
    {
        m.COMPILE,
        m.RESERVE,
        m.ESTIMATE,
        m.PLACE_CONTENTS,
        m.DESCRIBE_MODEL,
        m.LIST_MODELS,
        m.GET_MEMORY,
        m.LIST_LINKS,
        m.QUERY_OPS,
        m.QUERY_PLACEMENT,
    }
)


class LocalShell(BlockingShell):
    """A session of the core in this process."""

    def __init__(
        self,
        address: Address,
        timeout: float = 10.0,
        credentials: Credentials = NO_CREDENTIALS,
        transport: LocalTransport | None = None,
        *,
        computes: bool = False,
    ) -> None:
        """`transport`: an open session. With `computes`, callers that wait for a run do it
        themselves, so that a timeout ends it only between two nodes: for threads that nothing
        interrupts."""
        self._transport = transport or LocalTransport.open(address, timeout, credentials)
        super().__init__(address, self._transport.info)
        self.core.speaks_bytes = True
        self._sending = threading.Lock()
        self._dirty = False
        #: True for commands that go at once, False for others.
        self._bell: SimpleQueue[bool] = SimpleQueue()
        #: True while a caller sends that waits for its run, and may as well do it.
        self._waits = False
        session = self._transport.session
        self._alone = RunsAlone(session.inside) if computes else None
        session.attach(self.apply, self._ended, at_once=self._may_run)
        self._sweeper = threading.Thread(target=self._sweep, name="heliograph-sweeper", daemon=True)
        self._sweeper.start()

    def _ended(self, error: HeliographError) -> None:
        self._lose(error)

    def _may_run(self) -> bool:
        return self._waits

    def _ring_once(self, waits: bool) -> None:
        if runs_handlers():
            # One that waits for the session would wait for this thread, which sends with locks held.
            self._bell.put(True)
        else:
            undisturbed(partial(self._send, waits))

    def _ring(self) -> None:
        """Send the queued commands, in this thread if no other one is sending."""
        self._ring_once(False)

    def _send(self, waits: bool = False) -> None:
        here: list[Callable[[], None]] = []
        computes, self._dirty = waits and self._alone is not None, True
        try:
            while self._dirty and self._sending.acquire(blocking=False):
                try:
                    self._dirty, self._waits = False, waits
                    with self._lock:
                        commands = self.core.take(self.info.limits.message_bytes)
                    if commands:
                        self._dirty = True
                        # Other threads' work comes later.
                        mine, computes = here if computes else None, False
                        self._submit(commands, mine)
                finally:
                    self._waits = False
                    self._sending.release()
        finally:
            # Others may send meanwhile.
            for work in here:
                work()

    def _submit(self, commands: Sequence[Command | InlineRun], here: list[Callable[[], None]] | None) -> None:
        try:
            if here is not None and len(commands) == 1 and isinstance(run := commands[0], InlineRun):
                assert self._alone is not None
                if (work := self._alone.begin(run)) is not None:
                    here.append(work)
                    return
            self._transport.session.submit(commands, here)
        except Exception as error:
            self._lose(typed(error, "sending commands"))

    def release(self, handle: int) -> None:
        # A destructor may run while this thread holds any lock of the core, so it must not send.
        self.core.release(handle)
        self._bell.put(False)

    def let_go(self, pending: Pending) -> None:
        # As in `release`.
        self.core.flow(pending)
        self._bell.put(False)

    def _sweep(self) -> None:
        while self.core.lost is None:
            at_once = self._bell.get()
            with suppress(Empty):
                while not at_once:
                    at_once = self._bell.get(timeout=handshake.GATHER_SECONDS)
            self._ring()

    def _start_upload(self, upload: StartUpload) -> Transfer:
        transfer = Transfer(lambda: None)
        error: HeliographError | None = None
        try:
            self._transport.upload(upload)
        except HeliographError as refused:
            error = refused

        self.advance(lambda: self.core.upload_ended(upload.pending, transfer, error))
        return transfer

    def _download(self, download: ReceiveDownload, deadline: Deadline) -> None:
        copied = self._transport.download(download, deadline)
        self.advance(lambda: self.core.count(copied))

    def _log_source(self, level: str) -> LogSource:
        return LocalLog(partial(self._transport.follow_log, level))

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return self._transport.map_memory(tensor)

    def _call(self, call: Call, deadline: Deadline) -> Any:
        if call.method not in _LONG:
            return undisturbed(partial(self._transport.call, call))
        answer = _Answer(lambda: self._transport.call(call))
        try:
            return answer.get(deadline)
        except BaseException:
            answer.ended.add_callback(lambda: self._transport.undo(call))
            raise

    def _disconnect(self, was_open: bool) -> None:
        self._bell.put(False)
        self._transport.close()
        if self._sweeper is not threading.current_thread():
            self._sweeper.join(handshake.CLOSE_SECONDS)


def session_on(host: Host, client: str, principal: Principal, secret: bytes) -> ClientSession:
    """Open a session of the blocking client on a host of this process, such as a daemon's.

    `principal` owns it, and `secret` is that of its tenant; see `Host.open_session`. Raises the
    errors of that.
    """
    info = host.open_session(client, secret=secret, principal=principal)
    transport = LocalTransport(host, info)
    return ClientSession(LocalShell(parse_address("local:"), transport=transport, computes=True))


class _Answer:
    """A call in a thread of its own, so that its caller can stop waiting."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.ended = Outcome()
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = InternalError("the call did not end")
        threading.Thread(target=self._run, name="heliograph-call", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result, self._error = self._function(), None
        except BaseException as error:
            self._error = error
        self.ended.finish()

    def get(self, deadline: Deadline) -> Any:
        wait(self.ended, deadline)
        if self._error is not None:
            raise self._error
        return self._result
