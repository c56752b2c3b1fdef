"""A daemon and a raw client of it, in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import aio
from raw_client import methods_of

from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import codec
from heliograph_proto import commands as c
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    HeliographError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import (
    bulk_pb2,
    bulk_pb2_grpc,
    command_pb2,
    command_pb2_grpc,
    device_pb2_grpc,
    plan_pb2,
    session_pb2,
    session_pb2_grpc,
)
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.runtime.host import Host, HostStatistics

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
    """Return the status and error with which a command stream ends."""
    with contextlib.suppress(aio.AioRpcError):
        while await asyncio.wait_for(stream.read(), SECONDS) is not aio.EOF:
            pass
    metadata = [(key, value) for key, value in await stream.trailing_metadata() or ()]
    return await stream.code(), error_from_metadata(metadata)
