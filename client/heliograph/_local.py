"""`local:`: the server's core in this process, without gRPC or another process.

Commands go straight from the caller's thread into the core's session; completions come back from
the devices' threads. A small thread of each session sends the frees that destructors leave behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from heliograph import _grpc
from heliograph._allocator import facts_here
from heliograph._blocking import BlockingShell, wait
from heliograph._bulk import Receiver
from heliograph._channels import NO_CREDENTIALS
from heliograph._deadline import Deadline
from heliograph._effects import (
    Call,
    Compile,
    DescribeModel,
    Download,
    Estimate,
    Explain,
    FindMissing,
    GetMemory,
    GetStatistics,
    ListDevices,
    ListModels,
    ListWays,
    PlaceContents,
    Probe,
    QueryOps,
    QueryPlacement,
    Reserve,
    Upload,
)
from heliograph._log_lines import LocalLog, LogSource
from heliograph._outcome import Outcome, Pending, Transfer
from heliograph._shared import mapped
from heliograph_proto import __version__
from heliograph_proto.addresses import Address
from heliograph_proto.commands import Command
from heliograph_proto.credentials import Credentials
from heliograph_proto.description import PlanEstimate, PlanInfo, Traffic
from heliograph_proto.errors import HeliographError, InternalError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.inline_runs import InlineRun

if TYPE_CHECKING:
    from heliograph_server.core.known_graphs import ReceivedGraph
    from heliograph_server.core.runtime import CompileRequest, Host, Session
    from heliograph_server.telemetry.following import LogFollower

#: What an upload hands over at once, so that progress can be told.
_CHUNK_BYTES = 8 * 2**20
#: All sessions on this process's devices are of one tenant.
_SECRET = b"this process alone"


@dataclass(frozen=True, slots=True)
class _Key:
    """What is there: devices by their specification, or the daemons of a pool."""

    specification: str = ""
    members: tuple[str, ...] = ()
    #: What the daemons of a pool are shown.
    credentials: Credentials = NO_CREDENTIALS


class _SharedHosts:
    """The devices of this process, by specification, and its pools: from the first session on them to the
    last one."""

    def __init__(self) -> None:
        self._hosts: dict[_Key, _SharedHost] = {}
        self._lock = threading.Lock()

    def acquire(self, key: _Key, timeout: float) -> _SharedHost:
        """Raises ConfigurationError, and UnavailableError for a pool of which nobody answers in time."""
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
        """In the child of a fork, whose parent keeps the devices' threads."""
        self.__init__()  # type: ignore[misc]


class _SharedHost:
    """Devices of one specification, or one pool, and how many sessions there are on them."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        #: Guarded by the lock of all.
        self.users = 0
        self._host: Host | None = None
        # Starting devices may take long, and others need not wait for it.
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
        from heliograph_server.core.runtime import Host

        wanted = ((self.key.specification,),) if self.key.specification else ()
        registry = open_registry(*wanted)
        host = Host(registry)
        if any(one.site is not None for one in registry.devices):
            from heliograph_server.peers.blocking import BlockingPeers

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
    """A session of the core, and what the effects are there. Blocking; used from any thread."""

    def __init__(
        self, address: Address, timeout: float = 10.0, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        """`credentials`: what the daemons of a pool are shown."""
        key = _Key(address.specification, address.members, credentials)
        self._shared = _SHARED.acquire(key, timeout)
        self.host = self._shared.host
        try:
            self.info = self.host.open_session(f"heliograph-python/{__version__}", secret=_SECRET)
            self.session: Session = self.host.session(self.info.session)
        except BaseException:
            _SHARED.release(self._shared)
            raise

    def close(self) -> None:
        """Ends the session, and the devices with the last one. Once."""
        try:
            self.session.close()
        finally:
            _SHARED.release(self._shared)

    def call(self, call: Call) -> Any:
        """Answers a question."""
        match call:
            case FindMissing(digests, sent):
                self.session.when_here(sent).result()
                missing = self.session.missing_contents(digests)
                return tuple(zip(missing, self.session.received_contents(missing), strict=True))
            case Compile():
                return self._compile(call)
            case PlaceContents(compile_, missing):
                # What is uploaded here is passed on at once, so that there is no nearer way.
                self.session.place_contents(_compile_request(compile_), missing)
                return ()
            case Reserve():
                return self._reserve(call)
            case Estimate():
                return self._estimate(call)
            case Explain(plan):
                return self.session.explain(plan)
            case GetMemory(device):
                return self.host.memory(device)
            case ListDevices():
                return replace(self.host.device_list(), facts=facts_here())
            case ListWays():
                return self.host.ways()
            case GetStatistics():
                return replace(self.session.traffic, peers=self.host.exchange.traffic)
            case Probe():
                raise UnsupportedError("a session in this process has no daemon to measure from")
            case ListModels():
                return self.session.models()
            case DescribeModel(name):
                return self.session.describe_model(name)
            case QueryOps(device, queries):
                return self.host.query_ops(device, queries)
            case QueryPlacement(device, buffer_type, tensors):
                return self.host.query_placement(device, buffer_type, tensors)

    def _compile(self, call: Compile) -> PlanInfo:
        # Ends with the session at the latest, which ends every write.
        self.session.when_written([tensor for _, tensor in call.bindings]).result()
        return self.session.compile(_compile_request(call))

    def _estimate(self, call: Estimate) -> PlanEstimate:
        from heliograph_backends.contract import CompileOptions
        from heliograph_server.core.runtime import EstimateRequest

        return self.session.estimate(
            EstimateRequest(
                graph=call.graph,
                devices=call.devices,
                options=CompileOptions(call.fusion),
                pins={node: device for device, nodes in call.pins for node in nodes},
                memory=dict(call.memory),
                pipeline=call.pipeline,
            )
        )

    def _reserve(self, call: Reserve) -> dict[str, int]:
        from heliograph_backends.contract import CompileOptions
        from heliograph_server.core.runtime import ReserveRequest

        return self.session.reserve(
            ReserveRequest(
                reservation=call.reservation,
                graph=call.graph,
                devices=call.devices,
                options=CompileOptions(call.fusion, call.threads),
                pins={node: device for device, nodes in call.pins for node in nodes},
                memory=dict(call.memory),
                block_bytes=call.block_bytes,
            )
        )

    def follow_log(self, level: str, wake: Callable[[], None]) -> LogFollower:
        """What is logged of the session; `wake` is called when there is something to take. Raises
        InvalidArgumentError, LimitExceededError."""
        from heliograph_server.telemetry.following import LogFollower

        return LogFollower(self.session.log_owner, level, wake)

    def undo(self, call: Call) -> None:
        """Takes back what a call did whose caller no longer waits."""
        if isinstance(call, Compile):
            self.session.discard_plan(call.plan)
        elif isinstance(call, Reserve):
            self.session.discard_reservation(call.reservation)

    def upload(self, upload: Upload) -> None:
        """Carries bytes. Raises what the core refuses them with."""
        start = upload.offset_bytes
        receiver = self.session.begin_upload(upload.target, upload.data.nbytes, start)
        for offset in range(start, upload.data.nbytes, _CHUNK_BYTES):
            chunk = upload.data[offset : offset + _CHUNK_BYTES]
            receiver.write(offset, chunk)
            if upload.progress is not None:
                upload.progress(chunk.nbytes)
        receiver.finish()

    def download(self, download: Download, deadline: Deadline) -> Traffic:
        """Receives bytes: how many were copied here. Raises the error of the command,
        DeadlineExceededError."""
        source = self.session.open_download(download.transfer)
        try:
            arrived = Outcome()
            source.future.add_done_callback(lambda _: arrived.finish())
            wait(arrived, deadline)
            receiver = Receiver(download.out)
            for message in source.future.result().encoded:
                receiver.piece(message)
            receiver.finish()
            return Traffic(copied_out_bytes=receiver.copied_bytes)
        finally:
            source.close()

    def map_memory(self, tensor: int) -> tuple[Any, int]:
        """The memory of a tensor's buffer, and where the tensor begins in it."""
        found = self.session.share_tensor(tensor)
        try:
            return mapped(found.descriptor, found.size_bytes), found.offset_bytes
        finally:
            os.close(found.descriptor)


def _compile_request(call: Compile) -> CompileRequest:
    from heliograph_backends.contract import CompileOptions
    from heliograph_server.core.runtime import CompileRequest

    return CompileRequest(
        plan=call.plan,
        graph=_received(call.graph),
        devices=call.devices,
        options=CompileOptions(call.fusion, call.threads),
        bindings=dict(call.bindings),
        updates=call.updates,
        pins={node: device for device, nodes in call.pins for node in nodes},
        splits={leaf: split for split, leaves in call.splits for leaf in leaves},
        buffer_types=dict(call.buffer_types),
        memory=dict(call.memory),
        pipeline=call.pipeline,
        taps=call.taps,
        reservation=call.reservation,
        renews_lost=call.renews_lost,
        portion=call.portion,
    )


def _received(graph: Graph) -> Graph | ReceivedGraph:
    """A graph under the digest that it would have on the wire, so that a session knows it again."""
    from heliograph_proto.messages import encode_graph, graph_digest
    from heliograph_server.core.known_graphs import ReceivedGraph

    try:
        return ReceivedGraph(*graph_digest(encode_graph(graph)), lambda: graph)
    except (TypeError, ValueError):
        # No message can hold it: the core says what is wrong with it.
        return graph


class LocalShell(BlockingShell):
    """A session of the core in this process."""

    def __init__(
        self, address: Address, timeout: float = 10.0, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._transport = LocalTransport(address, timeout, credentials)
        super().__init__(address, self._transport.info)
        self._sending = threading.Lock()
        self._dirty = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._transport.session.attach(self.apply, self._ended)
        self._sweeper = threading.Thread(target=self._sweep, name="heliograph-sweeper", daemon=True)
        self._sweeper.start()

    def _ended(self, error: HeliographError) -> None:
        self._lose(error)

    def _ring(self) -> None:
        """Sends what is queued, in this thread unless another one is at it."""
        self._dirty = True
        while self._dirty and self._sending.acquire(blocking=False):
            try:
                self._dirty = False
                if commands := self._take():
                    self._dirty = True
                    self._send(commands)
            finally:
                self._sending.release()

    def _take(self) -> list[Command | InlineRun]:
        with self._lock:
            return self.core.take(self.info.limits.message_bytes)

    def _send(self, commands: list[Command | InlineRun]) -> None:
        try:
            self._transport.session.submit(commands)
        except HeliographError as error:
            self._lose(error)

    def release(self, handle: int) -> None:
        # A destructor may run while this thread holds any lock of the core's: it must not send.
        self.core.release(handle)
        self._bell.put(None)

    def let_go(self, pending: Pending) -> None:
        # Likewise.
        self.core.flow(pending)
        self._bell.put(None)

    def _sweep(self) -> None:
        while self.core.lost is None:
            self._bell.get()
            try:
                while self._bell.get(timeout=_grpc.GATHER_SECONDS) is None:
                    pass
            except Empty:
                self._ring()

    def _start_upload(self, upload: Upload) -> Transfer:
        transfer = Transfer(lambda: None)
        error: HeliographError | None = None
        try:
            self._transport.upload(upload)
        except HeliographError as refused:
            error = refused

        self.advance(lambda: self.core.upload_ended(upload.pending, transfer, error))
        return transfer

    def _download(self, download: Download, deadline: Deadline) -> None:
        copied = self._transport.download(download, deadline)
        self.advance(lambda: self.core.count(copied))

    def _log_source(self, level: str) -> LogSource:
        return LocalLog(partial(self._transport.follow_log, level))

    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        return self._transport.map_memory(tensor)

    def _call(self, call: Call, deadline: Deadline) -> Any:
        if not isinstance(call, Compile | Reserve | Estimate):
            return self._transport.call(call)
        answer = _Answer(lambda: self._transport.call(call))
        try:
            return answer.get(deadline)
        except BaseException:
            answer.ended.add_callback(lambda: self._transport.undo(call))
            raise

    def _disconnect(self, was_open: bool) -> None:
        self._bell.put(None)
        self._transport.close()
        if self._sweeper is not threading.current_thread():
            self._sweeper.join(_grpc.CLOSE_SECONDS)


class _Answer:
    """A call that runs in a thread of its own, since it must be possible to stop waiting for it."""

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
