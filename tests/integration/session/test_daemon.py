"""The daemon over real sockets, with raw stubs: the contract's promises to any client, also a bad one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import methods_of

from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import codec
from heliograph_proto import commands as c
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    ConfigurationError,
    HeliographError,
    InvalidArgumentError,
    OutOfMemoryError,
    Reason,
    UnavailableError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import (
    bulk_pb2,
    bulk_pb2_grpc,
    command_pb2,
    command_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    plan_pb2,
    session_pb2,
    session_pb2_grpc,
)
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon import daemon as app
from heliograph_server.daemon.daemon import Daemon, _started, is_starting
from heliograph_server.runtime.host import Host, HostStatistics
from heliograph_server.weights.uploads import IncomingUpload

T = tensor_type("f32", (4,))
PLAN = 100
#: Every wait of these tests ends after this.
SECONDS = 10.0
NEG = Graph((Leaf(LeafKind.INPUT, "x", T),), (Node("neg", (0,), T),), (Output("y", 1),))
Stream: TypeAlias = aio.StreamStreamCall[command_pb2.CommandBatch, command_pb2.CompletionBatch]


class Peer:
    """A daemon and a raw client of it, on one loop."""

    def __init__(self, daemon: Daemon, device: FakeDevice, channel: aio.Channel) -> None:
        self.daemon = daemon
        self.device = device
        self.channel = channel
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)
        self.devices = device_pb2_grpc.DeviceServiceStub(channel)
        self.plans = methods_of(channel, "PlanService")
        self.bulk = bulk_pb2_grpc.BulkServiceStub(channel)
        self.contents = methods_of(channel, "BulkService")
        self.commands = command_pb2_grpc.CommandServiceStub(channel)
        self.token = b""
        self.sequence = 0

    @property
    def host(self) -> Host:
        assert self.daemon.host is not None
        return self.daemon.host

    async def open(self) -> session_pb2.OpenResponse:
        request = session_pb2.OpenRequest(version_min=1, version_max=9, client="test")
        answer = await self.sessions.Open(request)
        self.token, self.sequence = answer.session, 0
        return answer

    async def attach(self) -> Stream:
        """Opens a session and its command stream."""
        await self.open()
        stream: Stream = self.commands.Execute()
        await stream.write(command_pb2.CommandBatch(session=self.token))
        return stream

    async def compile(self, graph: Graph = NEG, plan: int = PLAN) -> plan_pb2.CompileResponse:
        answer: plan_pb2.CompileResponse = await self.plans.Compile(self.compile_request(graph, plan))
        return answer

    def compile_request(self, graph: Graph = NEG, plan: int = PLAN) -> plan_pb2.CompileRequest:
        return plan_pb2.CompileRequest(session=self.token, plan=plan, graph=codec.encode_graph(graph))

    async def send(self, stream: Stream, *kinds: c.CommandKind, notify: bool = True) -> None:
        batch = command_pb2.CommandBatch(session=self.token)
        for kind in kinds:
            self.sequence += 1
            batch.commands.append(codec.encode_command(c.Command(self.sequence, kind, notify=notify)))
        await stream.write(batch)

    async def collect(self, stream: Stream, through: int | None = None) -> dict[int, c.Completion]:
        """Completions until everything up to a number is acknowledged."""
        found: dict[int, c.Completion] = {}
        goal = self.sequence if through is None else through
        while True:
            batch = await asyncio.wait_for(stream.read(), SECONDS)
            assert batch is not aio.EOF
            decoded = codec.decode_completions(batch)
            found |= {one.sequence: one for one in decoded.completions}
            if decoded.completed_through >= goal:
                return found

    def upload(self, size: int, *pieces: tuple[int, bytes], **target: Any) -> Any:
        """An Upload call of these pieces; the announced size is `size`."""

        async def requests() -> AsyncIterator[bulk_pb2.UploadRequest]:
            first: Any = bulk_pb2.UploadTarget(session=self.token, size_bytes=size, **target)
            for offset, data in pieces or ((0, b""),):
                yield bulk_pb2.UploadRequest(target=first, offset_bytes=offset, data=data)
                first = None

        return self.bulk.Upload(requests(), timeout=SECONDS)

    async def download(self, transfer: int) -> bytes:
        request = bulk_pb2.DownloadRequest(session=self.token, transfer=transfer)
        pieces = [piece async for piece in self.bulk.Download(request, timeout=SECONDS)]
        return b"".join(piece.data for piece in pieces)

    async def quiet(self) -> None:
        """Waits until the server holds nothing any more."""
        await asyncio.to_thread(self.wait_empty)
        assert self.host.statistics() == HostStatistics()

    def wait_empty(self) -> None:
        with self.host._changed:
            assert self.host._changed.wait_for(lambda: not self.host._sessions, SECONDS)


Scenario: TypeAlias = Callable[[Peer], Coroutine[Any, Any, None]]


def loops() -> list[Any]:
    import uvloop

    return [pytest.param(None, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.fixture(params=loops())
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a scenario against a fresh daemon on a fresh loop, and checks that nothing is left."""

    def run(scenario: Scenario, limits: Limits | None = None, drain_seconds: float = 5.0) -> None:
        config = ServerConfig(("grpc://127.0.0.1:0",), limits=limits or Limits(), drain_seconds=drain_seconds)
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(_play(scenario, config))

    return run


async def _play(scenario: Scenario, config: ServerConfig) -> None:
    fake = FakeDevice("fake0", 2**20)
    daemon = Daemon(config, lambda: Host(Registry.of(fake), config.limits))
    try:
        await daemon.start()
        target = daemon.addresses[0].grpc_target
        async with aio.insecure_channel(target, [("grpc.max_send_message_length", -1)]) as channel:
            peer = Peer(daemon, fake, channel)
            await asyncio.wait_for(scenario(peer), 3 * SECONDS)
        await peer.quiet()
    finally:
        await daemon.stop()
    assert fake.memory().free_bytes == fake.memory().total_bytes


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, HeliographError | None]:
    """The status of a call that must fail, and the typed error beside it."""
    with pytest.raises(aio.AioRpcError) as caught:
        await asyncio.wait_for(call, SECONDS)
    metadata = [(key, value) for key, value in caught.value.trailing_metadata() or ()]
    return caught.value.code(), error_from_metadata(metadata)


async def ended(stream: Stream) -> tuple[grpc.StatusCode, HeliographError | None]:
    """How a command stream ends; what comes before is passed over."""
    with contextlib.suppress(aio.AioRpcError):
        while await asyncio.wait_for(stream.read(), SECONDS) is not aio.EOF:
            pass
    metadata = [(key, value) for key, value in await stream.trailing_metadata() or ()]
    return await stream.code(), error_from_metadata(metadata)


# What works


def test_a_graph_runs_and_half_closing_ends_the_session(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        plan = await peer.compile()
        assert plan.device == "fake0" and plan.outputs[0].name == "y"
        x = bytes(bytearray(range(16)))
        run = c.RunCommand(PLAN, (c.InputBinding(0, None, 1),), (c.OutputBinding(0, 2, True),))
        await peer.send(stream, c.Allocate(1, T), c.SetTensor(1, 0, x), run, c.GetTensor(2, 0, 16))
        await stream.done_writing()
        done = await peer.collect(stream)
        assert bytes(done[3].outputs[0][1]) == bytes(done[4].data)
        assert bytes(done[4].data)[3] == x[3] ^ 0x80 and done[3].device_us > 0
        assert await ended(stream) == (grpc.StatusCode.OK, None)

    play(scenario)


def test_bytes_travel_both_ways_on_calls_of_their_own(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        data = os.urandom(250_000)
        kind = tensor_type("u8", (len(data),))
        pieces = [(start, data[start : start + 100_000]) for start in range(0, len(data), 100_000)]
        upload = asyncio.ensure_future(peer.upload(len(data), *pieces, transfer=7))
        await peer.send(
            stream,
            c.Allocate(1, kind),
            c.SetTensor(1, 0, None, 7, len(data)),
            c.GetTensor(1, 0, len(data), 8),
        )
        assert await peer.download(8) == data
        assert (await upload).received_bytes == len(data)
        await peer.collect(stream)
        assert peer.host.statistics().staged_bytes == 0
        stream.cancel()

    play(scenario, replace(Limits(), chunk_bytes=100_000))


def test_a_weight_is_uploaded_once_and_named_by_its_digest(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        digest = digest_of(bytes(16))
        leaves = (Leaf(LeafKind.INPUT, "x", T), Leaf(LeafKind.WEIGHT, "w", T, digest))
        graph = Graph(leaves, (Node("add", (0, 1), T),), (Output("y", 2),))
        code, error = await refused(peer.compile(graph))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and error.reason == Reason.REASON_MISSING_CONTENT
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token, digests=[digest])
        assert list((await peer.contents.FindMissingContents(ask)).missing_digests) == [digest]
        await peer.upload(16, (0, bytes(16)), digest=digest)
        assert not (await peer.contents.FindMissingContents(ask)).missing_digests
        await peer.compile(graph)
        stream.cancel()

    play(scenario)


def test_variables_are_shared_by_plans_and_can_be_read(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        leaves = (Leaf(LeafKind.INPUT, "x", T), Leaf(LeafKind.VARIABLE, "v", T))
        graph = Graph(leaves, (Node("assign", (1, 0), T),), (Output("y", 2),))
        first, second = await peer.compile(graph), await peer.compile(graph, PLAN + 1)
        handle = first.variables[0].tensor
        assert handle == second.variables[0].tensor and handle >= c.SERVER_HANDLE
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(range(16))),), ())
        await peer.send(stream, c.GetTensor(handle, 0, 16), run, c.GetTensor(handle, 0, 16))
        done = await peer.collect(stream)
        assert bytes(done[1].data) == bytes(16) and bytes(done[3].data) == bytes(range(16))
        stream.cancel()

    play(scenario)


def test_devices_and_health_can_be_asked(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        listed = await peer.devices.ListDevices(device_pb2.ListDevicesRequest())
        assert [one.name for one in listed.devices] == ["fake0"]
        memory = await peer.devices.GetMemory(device_pb2.GetMemoryRequest(device="fake0"))
        assert memory.memory.total_bytes == 2**20
        health = health_pb2_grpc.HealthStub(peer.channel)
        for name in ("", "heliograph.v1.CommandService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    play(scenario)


def test_closing_a_session_twice_is_no_error(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        for _ in range(2):
            await peer.sessions.Close(session_pb2.CloseRequest(session=peer.token))
        code, error = await ended(stream)
        assert code is grpc.StatusCode.NOT_FOUND and error.reason == Reason.REASON_SESSION_CLOSED

    play(scenario)


# What clients do wrong


def test_calls_of_an_unknown_session_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        peer.token = b"no such session"
        stream: Stream = peer.commands.Execute()
        await stream.write(command_pb2.CommandBatch(session=peer.token))
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token)
        for outcome in (
            await ended(stream),
            await refused(peer.compile()),
            await refused(peer.upload(4, transfer=7)),
            await refused(peer.download(7)),
            await refused(peer.contents.FindMissingContents(ask)),
        ):
            assert outcome[0] is grpc.StatusCode.NOT_FOUND
            assert outcome[1] is not None and outcome[1].reason == Reason.REASON_SESSION_CLOSED

    play(scenario)


def test_versions_without_a_common_one_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        request = session_pb2.OpenRequest(version_min=2, version_max=9)
        code, error = await refused(peer.sessions.Open(request))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error is not None and error.reason == Reason.REASON_VERSION_MISMATCH

    play(scenario)


def test_a_second_command_stream_is_refused_and_the_first_goes_on(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        second: Stream = peer.commands.Execute()
        await second.write(command_pb2.CommandBatch(session=peer.token))
        assert (await ended(second))[0] is grpc.StatusCode.ALREADY_EXISTS
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        stream.cancel()

    play(scenario)


def test_a_gap_in_the_sequence_ends_the_session(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        peer.sequence = 5
        await peer.send(stream, c.Synchronize())
        code, error = await ended(stream)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error is not None and error.reason == Reason.REASON_PROTOCOL_VIOLATION

    play(scenario)


def test_garbage_on_the_command_stream_ends_that_session_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.open()
        raw = peer.channel.stream_stream("/heliograph.v1.CommandService/Execute")
        for first in (b"\xff\xff\xff", command_pb2.CommandBatch(session=peer.token).SerializeToString()):
            stream: Any = raw()
            # The first garbage may have ended the call before the second comes.
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(first)
                await stream.write(b"\xff\xff\xff")
            code, _ = await ended(stream)
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        await peer.open()
        await peer.sessions.Close(session_pb2.CloseRequest(session=peer.token))

    play(scenario)


def test_a_command_that_cannot_be_decoded_fails_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        batch = command_pb2.CommandBatch(session=peer.token)
        batch.commands.add(sequence=1, allocate=command_pb2.Allocate(tensor=1))
        batch.commands.add(sequence=2)
        batch.commands.add(sequence=3, get_tensor=command_pb2.GetTensor(tensor=1))
        batch.commands.add(sequence=4, synchronize=command_pb2.Synchronize(), notify=True)
        await stream.write(batch)
        done = await peer.collect(stream, 4)
        assert isinstance(done[1].error, InvalidArgumentError)
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_PROTOCOL_VIOLATION
        assert done[3].error is not None and done[3].error.origin.sequence == 1
        assert done[4].error is None
        stream.cancel()

    play(scenario)


def test_a_message_that_is_too_large_is_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, T), c.SetTensor(1, 0, bytes(100_000)))
        assert (await ended(stream))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(scenario, replace(Limits(), message_bytes=50_000))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (((0, b"12"), (3, b"4")), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, b"12345"),), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, b"12"),), Reason.REASON_PROTOCOL_VIOLATION),
        (((0, bytes(2000)),), Reason.REASON_LIMIT_EXCEEDED),
    ],
    ids=["gap", "too many", "too few", "large piece"],
)
def test_a_malformed_upload_is_refused_and_its_command_fails(
    play: Callable[..., None], pieces: tuple[tuple[int, bytes], ...], reason: int
) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (4,))), c.SetTensor(1, 0, None, 7, 4))
        _, error = await refused(peer.upload(4, *pieces, transfer=7))
        assert error is not None and error.reason == reason
        done = await peer.collect(stream)
        assert done[2].error is not None
        stream.cancel()

    play(scenario, replace(Limits(), chunk_bytes=1000))


def test_an_upload_that_ends_early_is_a_broken_one_to_its_command_however_it_ended(
    play: Callable[..., None],
) -> None:
    """A cancelled call can end like one whose client said that it was done."""

    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (4,))), c.SetTensor(1, 0, None, 7, 4))
        await refused(peer.upload(4, (0, b"12"), transfer=7))
        error = (await peer.collect(stream))[2].error
        assert isinstance(error, CancelledError) and "2 of 4 announced bytes arrived" in error.message
        stream.cancel()

    play(scenario)


def test_contents_that_do_not_match_fit_or_exist_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        code, _ = await refused(peer.upload(16, (0, bytes(16)), digest=bytes(32)))
        assert code is grpc.StatusCode.DATA_LOSS
        code, error = await refused(peer.upload(2**62, digest=bytes(32)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(error, OutOfMemoryError)
        code, _ = await refused(peer.upload(16, digest=b"short"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, error = await refused(peer.upload(2**40, transfer=7))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error is not None and error.reason == Reason.REASON_LIMIT_EXCEEDED
        assert peer.host.statistics().staged_bytes == 0
        stream.cancel()

    play(scenario)


def test_an_allocation_that_does_not_fit_fails_and_the_session_goes_on(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (2**40,))), c.Allocate(2, T))
        done = await peer.collect(stream)
        assert isinstance(done[1].error, OutOfMemoryError) and done[2].error is None
        stream.cancel()

    play(scenario)


def test_a_device_that_raises_anything_fails_the_command_alone(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        peer.device.script.fail("compute", ZeroDivisionError("a defect"))
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        await peer.send(stream, run, run)
        done = await peer.collect(stream)
        assert isinstance(done[1].error, ComputeFailedError) and done[2].error is None
        stream.cancel()

    play(scenario)


# Clients that leave


def test_a_client_that_leaves_while_a_run_is_running_aborts_it(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        await peer.send(stream, c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 1),)))
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        stream.cancel()

    play(scenario)


def watch_uploads(peer: Peer) -> asyncio.Event:
    """Is set once the server has begun an upload; on the loop that client and server share here."""
    begun = asyncio.Event()
    session = peer.host.session(peer.token)
    begin = session.begin_upload

    def watched(target: int | bytes, size_bytes: int, offset_bytes: int = 0) -> IncomingUpload:
        begun.set()
        return begin(target, size_bytes, offset_bytes)

    session.begin_upload = watched  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("target", [{"transfer": 7}, {"digest": bytes(32)}], ids=["transfer", "content"])
def test_a_client_that_leaves_in_the_middle_of_an_upload_gives_everything_back(
    play: Callable[..., None], target: dict[str, Any]
) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        begun = watch_uploads(peer)
        upload: Any = peer.bulk.Upload()
        first: Any = bulk_pb2.UploadTarget(session=peer.token, size_bytes=1000, **target)
        await upload.write(bulk_pb2.UploadRequest(target=first, data=bytes(10)))
        await peer.send(stream, c.Allocate(1, tensor_type("u8", (1000,))), c.SetTensor(1, 0, None, 7, 1000))
        await asyncio.wait_for(begun.wait(), SECONDS)
        upload.cancel()
        if "transfer" in target:
            done = await peer.collect(stream)
            assert done[2].error is not None
        stream.cancel()

    play(scenario)


def test_a_client_that_leaves_while_it_waits_for_a_download_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        download = asyncio.ensure_future(peer.download(8))
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        download.cancel()
        stream.cancel()

    play(scenario)


def test_a_compile_whose_client_left_leaves_no_plan(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        gate = peer.device.script.hold("compile")
        call = peer.plans.Compile(peer.compile_request())
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        call.cancel()
        # The server hears of it before a call that comes after it on the same connection; its handler
        # is told a few turns of the loop later.
        for _ in range(20):
            await peer.devices.ListDevices(device_pb2.ListDevicesRequest())
        gate.open()
        await peer.compile(plan=PLAN + 1)
        await peer.send(stream, c.Free((PLAN + 1,)), c.Free((PLAN,)))
        done = await peer.collect(stream)
        assert done[1].error is None
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_UNKNOWN_HANDLE
        stream.cancel()

    play(scenario)


def test_a_client_that_never_attaches_is_reaped(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.open()

    play(scenario, replace(Limits(), attach_timeout_ms=20))


def test_a_command_that_is_late_fails_with_its_deadline(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        kind = c.SetTensor(1, 0, None, 7, 16)
        late = codec.encode_command(c.Command(2, kind, timeout_ms=10))
        await peer.send(stream, c.Allocate(1, T))
        await stream.write(command_pb2.CommandBatch(commands=[late]))
        done = await peer.collect(stream, 2)
        assert done[2].error is not None and done[2].error.reason == Reason.REASON_DEADLINE_EXCEEDED
        stream.cancel()

    play(scenario)


# The end of the daemon


def test_draining_lets_running_work_end_and_refuses_new_sessions(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        run = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        await peer.send(stream, run)
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        stopping = asyncio.ensure_future(_drain_and_stop(peer))
        code = grpc.StatusCode.OK
        while code is grpc.StatusCode.OK:
            code, error = await _try_open(peer)
        assert code is grpc.StatusCode.UNAVAILABLE and error is not None
        gate.open()
        assert (await peer.collect(stream))[1].error is None
        code, error = await ended(stream)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert error is not None and error.reason == Reason.REASON_DRAINING
        assert await stopping is True

    play(scenario, drain_seconds=SECONDS)


async def _drain_and_stop(peer: Peer) -> bool:
    quiet = await peer.daemon.drain()
    await peer.daemon.stop()
    return quiet


async def _try_open(peer: Peer) -> tuple[grpc.StatusCode, HeliographError | None]:
    try:
        await peer.sessions.Open(session_pb2.OpenRequest(version_min=1, version_max=1))
    except aio.AioRpcError as error:
        return error.code(), error_from_metadata(list(error.trailing_metadata() or ()))
    return grpc.StatusCode.OK, None


def test_a_second_signal_ends_draining_at_once(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        await peer.compile()
        gate = peer.device.script.hold("compute")
        await peer.send(stream, c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), ()))
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        draining = asyncio.ensure_future(peer.daemon.drain())
        peer.daemon.hurry()
        await asyncio.wait_for(draining, SECONDS)
        await peer.daemon.stop()

    play(scenario, drain_seconds=60.0)


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig((f"grpc://127.0.0.1:{taken.getsockname()[1]}",))
        with pytest.raises(ConfigurationError, match="in use"):
            asyncio.run(_start_and_stop(config))


def test_a_unix_socket_is_private_replaces_a_stale_one_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    modes = asyncio.run(_start_and_stop(ServerConfig((f"unix://{path}",)), path))
    assert stat.S_IMODE(modes) == 0o600 and not path.exists()


def test_a_unix_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigurationError, match="another server"):
            asyncio.run(_start_and_stop(ServerConfig((f"unix://{path}",))))
    assert path.exists()


async def _start_and_stop(config: ServerConfig, path: Path | None = None) -> int:
    daemon = Daemon(config, lambda: Host(Registry.of(FakeDevice())))
    try:
        await daemon.start()
        return os.stat(path).st_mode if path is not None else 0
    finally:
        await daemon.stop()


def test_calls_before_the_devices_are_ready_are_refused() -> None:
    from heliograph_server.runtime.host_slot import HostSlot

    with pytest.raises(UnavailableError):
        _ = HostSlot().host


def test_a_socket_in_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder"):
        asyncio.run(_start_and_stop(ServerConfig((f"unix://{tmp_path}/none/socket",))))


def test_a_name_that_does_not_resolve_is_a_clear_error() -> None:
    config = ServerConfig(("grpc://no-such-host.invalid:1",), insecure=True)
    with pytest.raises(ConfigurationError, match="does not resolve"):
        asyncio.run(_start_and_stop(config))


def test_an_address_of_another_host_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="does not belong to this host"):
        asyncio.run(_start_and_stop(ServerConfig(("grpc://192.0.2.1:0",), insecure=True)))


def test_one_daemon_listens_at_several_addresses(tmp_path: Path) -> None:
    async def scenario() -> None:
        listen = ("grpc://127.0.0.1:0", "grpc://[::1]:0", f"unix://{tmp_path}/socket")
        daemon = Daemon(ServerConfig(listen), lambda: Host(Registry.of(FakeDevice())))
        try:
            await daemon.start()
            for address in daemon.addresses:
                async with aio.insecure_channel(address.grpc_target) as channel:
                    stub = device_pb2_grpc.DeviceServiceStub(channel)
                    assert await stub.ListDevices(device_pb2.ListDevicesRequest(), timeout=SECONDS)
        finally:
            await daemon.stop()

    asyncio.run(scenario())


def test_stopping_does_not_wait_for_devices_that_are_starting() -> None:
    """They may compile kernels for a minute. Once they are there, they are closed."""
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Told(FakeDevice):
        def close(self) -> None:
            super().close()
            closed.set()

    def open_host() -> Host:
        begun.set()
        assert go_on.wait(SECONDS)
        return Host(Registry.of(Told()))

    async def scenario() -> None:
        daemon, stop = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host), asyncio.Event()
        starting = asyncio.ensure_future(_started(daemon, stop))
        assert await asyncio.to_thread(begun.wait, SECONDS)
        stop.set()
        assert await asyncio.wait_for(starting, SECONDS) is False
        await asyncio.wait_for(daemon.stop(), SECONDS)
        assert is_starting()

    asyncio.run(scenario())
    go_on.set()
    assert closed.wait(SECONDS)


def test_an_error_of_the_devices_ends_the_start() -> None:
    def open_host() -> Host:
        raise ConfigurationError("no device")

    async def scenario() -> None:
        daemon = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host)
        try:
            with pytest.raises(ConfigurationError, match="no device"):
                await _started(daemon, asyncio.Event())
        finally:
            await daemon.stop()

    asyncio.run(scenario())


def test_a_second_signal_ends_the_process_even_if_work_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(app, "leave", left.append)
    monkeypatch.setattr(app, "HURRY_SECONDS", 0.0)

    async def scenario() -> None:
        signals, hurried = app.Signals(), asyncio.Event()
        signals.on_second(hurried.set)
        signals._arrived(signal.SIGTERM)
        assert signals.stop.is_set() and not hurried.is_set()
        signals._arrived(signal.SIGTERM)
        assert hurried.is_set()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert left == [1]


def test_the_log_has_a_line_for_each_end_of_a_session_and_no_secrets(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    tokens: list[bytes] = []

    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        tokens.append(peer.token)
        await peer.send(stream, c.Synchronize())
        await peer.collect(stream)
        stream.cancel()

    caplog.set_level("DEBUG")
    play(scenario)
    said = [one for one in caplog.messages if "of test" in one]
    assert len(said) == 2 and "began" in said[0] and "ended" in said[1] and "1 commands" in said[1]
    assert not any(tokens[0].hex() in one or repr(tokens[0]) in one or "<" in one for one in said)


def test_questions_about_too_many_contents_are_refused(play: Callable[..., None]) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.attach()
        ask = bulk_pb2.FindMissingContentsRequest(session=peer.token, digests=[b""] * 11)
        code, error = await refused(peer.contents.FindMissingContents(ask))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error is not None and error.reason == Reason.REASON_LIMIT_EXCEEDED
        stream.cancel()

    play(scenario, replace(Limits(), graph_nodes=10))
