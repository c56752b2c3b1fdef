"""Requests of hostile clients: bytes that are none, compressed ones, ones with millions of fields,
ones that do not end. Each gets a typed error, for each method of the contract, and costs about its
bytes."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from google.protobuf import descriptor_pool
from raw_client import SECONDS, RawSession, f32, graph_of, node, raw_channel, still_serves

import heliograph as hg
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import DeadlineExceededError, HeliographError, ProtocolError
from heliograph_proto.sessions import Limits, Quota
from heliograph_proto.v1 import command_pb2, device_pb2, graph_pb2, plan_pb2
from heliograph_server.daemon.daemon import SERVICES
from heliograph_server.rpc import receiving, requests

METHODS = [
    f"/{service}/{method.name}"
    for service in (*SERVICES, "grpc.health.v1.Health")
    for method in descriptor_pool.Default().FindServiceByName(service).methods
]


def refusal(channel: grpc.Channel, method: str, messages: Any, **how: Any) -> tuple[Any, Any]:
    """The status with which a call ends, and its typed error."""
    call: Any = channel.stream_stream(method)
    with pytest.raises(grpc.RpcError) as raised:
        for _ in call(messages, timeout=SECONDS, **how):
            pass
    error: Any = raised.value
    return error.code(), error_from_metadata(tuple(error.trailing_metadata() or ()))


def test_the_contract_has_methods() -> None:
    assert len(METHODS) > 30


def test_bytes_that_are_no_request_are_refused_with_a_typed_error_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with thread_daemon() as daemon, raw_channel(daemon.url) as channel, caplog.at_level(logging.WARNING):
        for method in METHODS:
            code, error = refusal(channel, method, iter([b"\xff" * 40]))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and isinstance(error, ProtocolError), method
        still_serves(daemon.url)
    assert not caplog.records


@pytest.mark.parametrize("how", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_request_is_refused_with_a_typed_error(
    how: grpc.Compression, caplog: pytest.LogCaptureFixture
) -> None:
    with thread_daemon() as daemon, raw_channel(daemon.url) as channel, caplog.at_level(logging.WARNING):
        for method in METHODS:
            code, error = refusal(channel, method, iter([b"\x12\x00" * 2**20]), compression=how)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and isinstance(error, ProtocolError), method
            assert "compressed" in error.message, method
        still_serves(daemon.url)
    assert not caplog.records


def test_no_message_of_the_contract_begins_like_a_compressed_one() -> None:
    """The first byte of gzip names no kind of field; that of zlib names a number, field 15."""
    for service in SERVICES:
        for method in descriptor_pool.Default().FindServiceByName(service).methods:
            field = method.input_type.fields_by_number.get(15)
            assert field is None or field.type == field.TYPE_BYTES


def pieces_of(request: plan_pb2.CompileRequest, more: bytes, count: int) -> Iterator[bytes]:
    """A request in several messages: its own fields, and `more` for its graph, so many times."""
    yield request.SerializeToString()
    for _ in range(count):
        yield plan_pb2.CompileRequest(graph=graph_pb2.Graph.FromString(more)).SerializeToString()


def error_of(
    raw: RawSession, messages: Iterator[bytes], method: str = "PlanService/Compile"
) -> HeliographError:
    _, error = refusal(raw.channel, f"/heliograph.v1.{method}", messages)
    assert isinstance(error, HeliographError)
    return error


def test_millions_of_small_nodes_are_refused_once_they_are_too_many(raw: RawSession) -> None:
    request = plan_pb2.CompileRequest(session=raw.token, plan=1)
    nodes = graph_pb2.Graph(nodes=[graph_pb2.Node(result=f32())]).SerializeToString() * 2**17
    error = error_of(raw, pieces_of(request, nodes, 8))
    assert isinstance(error, hg.LimitExceededError) and "250,000 nodes" in error.message


def test_millions_of_attributes_of_a_few_nodes_are_refused_likewise(raw: RawSession) -> None:
    request = plan_pb2.CompileRequest(session=raw.token, plan=1)
    crowded = graph_pb2.Node(attributes=[graph_pb2.Attribute()] * 2**18).SerializeToString()
    nodes = graph_pb2.Graph(nodes=[graph_pb2.Node.FromString(crowded)]).SerializeToString()
    error = error_of(raw, pieces_of(request, nodes, 14))
    assert isinstance(error, hg.LimitExceededError) and "nodes of 524,288 bytes" in error.message


def test_millions_of_queries_are_refused_without_a_session(raw: RawSession) -> None:
    many = b"\x12\x00" * 2**18
    error = error_of(raw, iter([many] * 2), "DeviceService/QueryOps")
    assert isinstance(error, hg.LimitExceededError) and "queries" in error.message


def test_a_large_request_of_no_session_is_refused_after_its_first_message(raw: RawSession) -> None:
    sent: list[int] = []

    def messages() -> Iterator[bytes]:
        yield plan_pb2.CompileRequest(session=b"x" * 16, plan=1).SerializeToString()
        while not over.wait(0.01):
            sent.append(1)
            yield plan_pb2.CompileRequest(graph=graph_of(node("exp", 0))).SerializeToString()

    over = threading.Event()
    try:
        error = error_of(raw, messages())
    finally:
        over.set()
    assert isinstance(error, hg.SessionClosedError) and len(sent) < 1000


def test_a_request_over_its_limit_is_refused_while_it_comes() -> None:
    with (
        thread_daemon(Limits(graph_bytes=4000, message_bytes=2000)) as daemon,
        raw_channel(daemon.url) as channel,
    ):
        raw = RawSession(channel).attach()
        request = plan_pb2.CompileRequest(session=raw.token, plan=1)
        nodes = graph_pb2.Graph(nodes=[node("exp", 0)] * 10).SerializeToString()
        error = error_of(raw, pieces_of(request, nodes, 100))
        assert isinstance(error, hg.LimitExceededError) and "4,000" in error.message
        assert held(daemon, raw) == 0
        raw.close()


def test_a_request_of_a_method_without_lists_is_small(raw: RawSession) -> None:
    name = device_pb2.GetMemoryRequest(device="x" * 100_000).SerializeToString()
    error = error_of(raw, iter([name]), "DeviceService/GetMemory")
    assert isinstance(error, hg.LimitExceededError) and "65,536" in error.message


def held(daemon: ThreadDaemon, raw: RawSession) -> int:
    """The bytes of requests that a session holds."""
    return daemon.host.session(raw.token).requests.used_bytes


def test_half_a_request_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "NEXT_SECONDS", 0.3)
    over = threading.Event()
    with thread_daemon() as daemon, raw_channel(daemon.url) as channel:
        raw = RawSession(channel).attach()
        request = plan_pb2.CompileRequest(session=raw.token, plan=1, graph=graph_of(node("exp", 0)))
        half = [request.SerializeToString()]
        messages = iter(lambda: half.pop() if half else over.wait(SECONDS) and None, None)
        try:
            error = error_of(raw, messages)
        finally:
            over.set()
        assert isinstance(error, DeadlineExceededError) and "next message" in error.message
        assert held(daemon, raw) == 0
        raw.close()


def test_a_request_that_comes_too_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_SECONDS", 0.2)
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        while not over.wait(0.02):
            yield device_pb2.QueryOpsRequest(device="cpu0").SerializeToString()

    with thread_daemon() as daemon, raw_channel(daemon.url) as channel:
        try:
            _, error = refusal(channel, "/heliograph.v1.DeviceService/QueryOps", messages())
        finally:
            over.set()
        assert isinstance(error, DeadlineExceededError) and "request" in error.message
        assert daemon.host.tenants()[0].staging_bytes == 0


def test_the_bytes_of_a_request_count_for_its_tenant() -> None:
    with thread_daemon(quota=Quota(staging_bytes=1000)) as daemon, raw_channel(daemon.url) as channel:
        raw = RawSession(channel).attach()
        request = plan_pb2.CompileRequest(session=raw.token, plan=1, graph=graph_of(*[node("exp", 0)] * 100))
        error = error_of(raw, iter([request.SerializeToString()]))
        assert isinstance(error, hg.LimitExceededError) and "quota" in error.message
        assert held(daemon, raw) == 0 and daemon.host.tenants()[0].staging_bytes == 0
        raw.close()


def test_a_command_with_millions_of_tensors_ends_the_session_alone(raw: RawSession) -> None:
    several = command_pb2.AllocateTensors(buffer=1)
    number = several.DESCRIPTOR.fields_by_name["tensors"].number
    several.MergeFromString(bytes((number << 3 | 2, 0)) * (2**20 * 3 // 2))
    command = command_pb2.Command(sequence=1, allocate_tensors=several)
    raw.send_bytes(command_pb2.CommandBatch(commands=[command]).SerializeToString())
    assert isinstance(raw.end(), hg.LimitExceededError)


# Requests in several messages


def long_graph(nodes: int) -> hg.Graph:
    g = hg.Graph()
    y = g.input("x", (2,), "f32")
    for _ in range(nodes):
        y = -y
    g.output("y", y)
    return g


SMALL = Limits(message_bytes=4096)


def test_a_graph_larger_than_a_message_compiles_runs_and_is_estimated() -> None:
    g = long_graph(1001)
    with thread_daemon(SMALL) as daemon, hg.connect(daemon.url) as session:
        plan = session.compile(g)
        assert plan.run(x=np.ones(2, np.float32))["y"].tolist() == [-1, -1]
        assert sum(session.estimate(g).compute_bytes) == plan.compute_bytes
        session.reserve(g).free()


def test_the_same_graph_in_other_pieces_is_the_same_graph() -> None:
    g = long_graph(300)
    with thread_daemon(SMALL) as daemon, raw_channel(daemon.url) as channel:
        with hg.connect(daemon.url) as session:
            first = session.compile(g).run(x=np.ones(2, np.float32))["y"]
        raw = RawSession(channel).attach()
        assert raw.compile(graph_of(node("neg", 0))).outputs[0].name == "y"
        raw.close()
    assert first.tolist() == [1, 1]


def test_many_small_pieces_are_one_request(raw: RawSession) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    nodes = [node("neg", number) for number in range(200)]
    whole = graph_of(*nodes)
    messages = [
        plan_pb2.CompileRequest(session=raw.token, plan=1, graph=graph_pb2.Graph(leaves=whole.leaves))
    ]
    left = list(nodes)
    while left:
        count = chance.randint(1, 20)
        part, left = left[:count], left[count:]
        messages.append(plan_pb2.CompileRequest(graph=graph_pb2.Graph(nodes=part)))
    messages.append(plan_pb2.CompileRequest(graph=graph_pb2.Graph(outputs=whole.outputs)))
    call: Any = raw.channel.stream_unary("/heliograph.v1.PlanService/Compile")
    answer = call(iter([one.SerializeToString() for one in messages]), timeout=SECONDS)
    assert plan_pb2.CompileResponse.FromString(answer).outputs[0].type == f32(4, 3)


def test_the_same_holds_for_the_asyncio_api() -> None:
    async def scenario(url: str) -> None:
        async with await hg.aio.connect(url) as session:
            plan = await session.compile(long_graph(1001))
            found = await plan.run(x=np.ones(2, np.float32))
            assert found["y"].tolist() == [-1, -1]
            assert sum((await session.estimate(long_graph(1001))).compute_bytes) == plan.compute_bytes

    with thread_daemon(SMALL) as daemon:
        asyncio.run(scenario(daemon.url))


def test_questions_about_many_contents_go_in_several_messages() -> None:
    with thread_daemon(SMALL) as daemon, hg.connect(daemon.url) as session:
        g = hg.Graph()
        y = g.input("x", (1,), "f32")
        for number in range(200):
            y = y + g.weight(f"w{number}", np.full(1, number, np.float32))
        g.output("y", y)
        assert session.compile(g).run(x=np.zeros(1, np.float32))["y"].tolist() == [199 * 100]


def test_a_leaf_that_is_too_large_for_a_message_is_refused_by_the_client() -> None:
    with thread_daemon(Limits(message_bytes=500)) as daemon, hg.connect(daemon.url) as session:
        g = hg.Graph()
        g.output("y", -g.input("x" * 1000, (1,), "f32"))
        with pytest.raises(hg.LimitExceededError, match="Graph.leaves"):
            session.compile(g)


def test_pieces_of_an_upload_may_be_larger_than_other_messages() -> None:
    limits = Limits(message_bytes=2**16, chunk_bytes=2**18)
    with thread_daemon(limits) as daemon, hg.connect(daemon.url, shared_memory=False) as session:
        data = np.arange(2**18, dtype=np.float32)
        assert (session.put(data).get() == data).all()
