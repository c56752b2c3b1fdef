"""What a hostile or unlucky client does to a daemon in another process: it gets a typed error, the daemon
serves the others on, and its memory is back where it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from forked_daemons import running_daemon
from raw_client import F32, SECONDS, RawSession, f32, graph_of, node, raw_channel, still_serves

import heliograph as hg
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.v1 import (
    bulk_pb2,
    command_pb2,
    graph_pb2,
    plan_pb2,
    session_pb2,
    session_pb2_grpc,
    tensor_pb2,
)

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls


# Graphs


@pytest.mark.parametrize(
    ("graph", "error", "words"),
    [
        (graph_of(node("frobnicate", 0)), hg.UnknownOpError, "frobnicate"),
        (graph_of(node("exp", 0, shape=(3, 4))), hg.InvalidGraphError, r"f32\[4, 3\]"),
        (graph_of(node("exp", 1)), hg.InvalidGraphError, "before"),
        (graph_of(node("exp", 2), node("exp", 1)), hg.InvalidGraphError, "cycle"),
        (graph_of(node("exp", 2**32 - 1)), hg.InvalidGraphError, "before"),
        (graph_of(node("add", 0)), hg.InvalidGraphError, "operands"),
        (graph_of(node("exp", 0), output=7), hg.InvalidGraphError, "value 7"),
        (graph_pb2.Graph(), hg.InvalidGraphError, "no outputs"),
        (graph_of(node("assign", 0, 0)), hg.InvalidGraphError, "variable"),
    ],
)
def test_a_wrong_graph_is_refused_by_the_server_too(
    raw: RawSession, graph: graph_pb2.Graph, error: type[hg.HeliographError], words: str
) -> None:
    with pytest.raises(error, match=words):
        raw.compile(graph)


def test_a_wrong_dtype_is_refused(raw: RawSession) -> None:
    graph = graph_of(node("exp", 0))
    graph.leaves[0].type.data_type = tensor_pb2.DATA_TYPE_I32
    graph.nodes[0].result.data_type = tensor_pb2.DATA_TYPE_I32
    with pytest.raises(hg.InvalidGraphError, match="float"):
        raw.compile(graph)


def test_a_weight_that_was_never_uploaded_is_refused(raw: RawSession) -> None:
    graph = graph_of(node("exp", 0))
    graph.leaves[0].kind = graph_pb2.LEAF_KIND_WEIGHT
    graph.leaves[0].digest = bytes(32)
    with pytest.raises(hg.MissingContentError):
        raw.compile(graph)


def deep_graph(nodes: int) -> graph_pb2.Graph:
    """x, -x, -(-x), ...; each node deeper than the one before, as bytes of one length each."""
    # Operands from 2^14 to 2^21 - 1 have three bytes; smaller ones are written as long as these.
    one = graph_pb2.Node(op="neg", operands=[2**14], result=f32(4, 3)).SerializeToString()
    record = np.frombuffer(bytes((0x12, len(one))) + one, np.uint8)
    place = record.tobytes().index(b"\x80\x80\x01")
    records, values = np.tile(record, (nodes, 1)), np.arange(nodes)
    for byte in range(3):
        records[:, place + byte] = values >> 7 * byte & 127 | (128 if byte < 2 else 0)
    graph = graph_of(output=nodes).SerializeToString()
    return graph_pb2.Graph.FromString(graph + records.tobytes())


def test_a_graph_with_more_nodes_than_the_limit_is_refused(raw: RawSession) -> None:
    with pytest.raises(hg.LimitExceededError, match="250,000 nodes"):
        raw.compile(deep_graph(raw.limits.graph_nodes + 1))


def test_a_graph_a_hundred_thousand_deep_is_no_danger(raw: RawSession) -> None:
    """Nothing walks a graph by recursion."""
    assert raw.compile(deep_graph(100_000)).outputs[0].name == "y"


def test_more_nodes_than_the_limit_never_leave_the_client() -> None:
    """The client knows the limit from the handshake and says so before it encodes anything."""
    g = hg.Graph()
    x = g.input("x", (1,), "f32")
    with (
        running_daemon("--device", "fake", "--limit", "graph_nodes=100") as url,
        hg.connect(url) as session,
    ):
        assert session.info.limits.graph_nodes == 100
        for _ in range(101):
            x = -x
        g.output("y", x)
        before = session.statistics().traffic
        with pytest.raises(hg.LimitExceededError, match="more than 100 nodes"):
            session.compile(g)
        assert session.statistics().traffic == before


def test_a_message_over_the_limit_is_refused(raw: RawSession) -> None:
    huge = graph_of(node("exp", 0))
    huge.nodes[0].name = "x" * (raw.limits.message_bytes + 1)
    with pytest.raises(grpc.RpcError) as refusal:
        raw.plans.Compile(plan_pb2.CompileRequest(session=raw.token, graph=huge), timeout=SECONDS)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


# Commands


def test_unknown_foreign_and_freed_handles_are_refused(raw: RawSession, daemon: DaemonUrls) -> None:
    get = command_pb2.GetTensor(tensor=77, size_bytes=4)
    assert isinstance(raw.failure(get_tensor=get), hg.UnknownHandleError)
    with raw_channel(daemon.tcp) as channel:
        other = RawSession(channel).attach()
        other.answer(other.allocate(77, 4))
        assert isinstance(raw.failure(get_tensor=get), hg.UnknownHandleError)
        other.close()
    raw.allocate(77, 4)
    raw.send(free=command_pb2.Free(handles=[77]))
    assert isinstance(raw.failure(get_tensor=get), hg.UnknownHandleError)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 17), (16, 1), (17, 0), (2**63, 1), (2**64 - 1, 2), (2**64 - 4, 4), (4, 2**64 - 1)],
)
def test_bytes_past_the_end_are_refused(raw: RawSession, offset: int, size: int) -> None:
    raw.allocate(5, 4)
    found = raw.failure(get_tensor=command_pb2.GetTensor(tensor=5, offset_bytes=offset, size_bytes=size))
    assert isinstance(found, (hg.OutOfRangeError, hg.LimitExceededError))
    memset = command_pb2.Memset(tensor=5, offset_bytes=offset, size_bytes=size)
    assert isinstance(raw.failure(memset=memset), hg.OutOfRangeError)


def test_a_view_outside_its_tensor_is_refused(raw: RawSession) -> None:
    raw.allocate(5, 4)
    for view in (
        command_pb2.View(tensor=6, source=5, offset_bytes=4, type=f32(4)),
        command_pb2.View(tensor=7, source=5, type=f32(2), strides_bytes=[16]),
        command_pb2.View(tensor=8, source=5, type=f32(2), strides_bytes=[-4]),
        command_pb2.View(tensor=9, source=5, type=f32(2), strides_bytes=[2**62]),
    ):
        assert isinstance(raw.failure(view=view), hg.InvalidArgumentError)


@pytest.mark.parametrize(
    "shape", [(2**62,), (2**31, 2**31, 2**31), (-1,), (1,) * 9, (2**40,), (0, 2**63 - 1, 2**63 - 1)]
)
def test_a_tensor_bigger_than_memory_is_refused_before_memory_is_taken(
    raw: RawSession, shape: tuple[int, ...]
) -> None:
    found = raw.failure(allocate=command_pb2.Allocate(tensor=5, type=f32(*shape)))
    assert isinstance(found, (hg.InvalidArgumentError, hg.OutOfMemoryError))


def test_a_run_with_wrong_inputs_fails_alone(raw: RawSession) -> None:
    raw.compile(graph_of(node("exp", 0)))
    data = np.zeros((4, 3), np.float32).tobytes()
    bind, run = command_pb2.InputBinding, command_pb2.Run
    for wrong in (
        run(plan=1),
        run(plan=1, inputs=[bind(input=1, data=data)]),
        run(plan=1, inputs=[bind(input=0, data=data[:-1])]),
        run(plan=1, inputs=[bind(input=0, data=data), bind(input=0, data=data)]),
    ):
        assert isinstance(raw.failure(run=wrong), hg.InvalidInputError)
    out = [command_pb2.OutputBinding(output=9, fetch=True)]
    found = raw.failure(run=run(plan=1, inputs=[bind(input=0, data=data)], outputs=out))
    assert isinstance(found, hg.InvalidArgumentError)
    good = run(plan=1, inputs=[bind(input=0, data=data)], outputs=[command_pb2.OutputBinding(fetch=True)])
    assert raw.answer(raw.send(run=good)).outputs[0].data == np.ones((4, 3), np.float32).tobytes()


def test_a_copy_to_a_tensor_that_is_smaller_or_of_another_kind_is_refused(raw: RawSession) -> None:
    """A copy never writes past its destination, whatever the source's size is."""
    raw.allocate(5, 64)
    raw.allocate(6, 4)
    raw.send(view=command_pb2.View(tensor=7, source=5, offset_bytes=240, type=f32(4)))
    for destination in (6, 7):
        copy = command_pb2.CopyTensor(source=5, destination=destination)
        assert isinstance(raw.failure(copy_tensor=copy), hg.InvalidArgumentError)


def test_what_was_freed_is_not_run_and_freeing_others_does_not_matter(raw: RawSession) -> None:
    """Neither a plan that was freed nor a tensor; and a plan does not care about other tensors' ends."""
    raw.compile(graph_of(node("exp", 0)))
    for tensor in (5, 6):
        raw.allocate(tensor, 4, 3)
    inputs = [command_pb2.InputBinding(input=0, tensor=5)]
    run = command_pb2.Run(plan=1, inputs=inputs, outputs=[command_pb2.OutputBinding(fetch=True)])
    ones = np.ones((4, 3), np.float32).tobytes()
    assert raw.answer(raw.send(run=run)).outputs[0].data == ones
    raw.send(free=command_pb2.Free(handles=[6]))
    assert raw.answer(raw.send(run=run)).outputs[0].data == ones
    raw.send(free=command_pb2.Free(handles=[5]))
    assert isinstance(raw.failure(run=run), hg.UnknownHandleError)
    raw.send(free=command_pb2.Free(handles=[1]))
    del run.inputs[:]
    run.inputs.add(input=0, data=ones)
    assert isinstance(raw.failure(run=run), hg.UnknownHandleError)


def test_a_device_that_is_not_there_is_refused(raw: RawSession) -> None:
    found = raw.failure(allocate=command_pb2.Allocate(tensor=5, type=f32(4), device="cuda7"))
    assert isinstance(found, hg.UnknownDeviceError)
    request = plan_pb2.CompileRequest(
        session=raw.token,
        plan=1,
        graph=graph_of(node("exp", 0)),
        options=plan_pb2.PlanOptions(devices=["cuda7"]),
    )
    with pytest.raises(grpc.RpcError) as refusal:
        raw.plans.Compile(request, timeout=SECONDS)
    assert isinstance(error_from_metadata(tuple(refusal.value.trailing_metadata())), hg.UnknownDeviceError)  # type: ignore[attr-defined]


def test_a_graph_that_is_cut_off_is_refused(raw: RawSession, daemon: DaemonUrls) -> None:
    """Every length of it, as bytes."""
    whole = plan_pb2.CompileRequest(
        session=raw.token, plan=1, graph=graph_of(node("exp", 0))
    ).SerializeToString()
    with raw_channel(daemon.tcp) as channel:
        call = channel.unary_unary("/heliograph.v1.PlanService/Compile")
        for length in range(len(whole)):
            with pytest.raises(grpc.RpcError):
                call(whole[:length], timeout=SECONDS)


# Clients that leave


def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(raw: RawSession) -> None:
    """The `raw` fixture sees the memory come back."""
    target = bulk_pb2.UploadTarget(session=raw.token, digest=bytes(32), size_bytes=2**26)

    began, over = threading.Event(), threading.Event()

    def pieces() -> Iterator[bulk_pb2.UploadRequest]:
        yield bulk_pb2.UploadRequest(target=target, data=bytes(2**20))
        began.set()
        over.wait(SECONDS)

    call = raw.bulk.Upload.future(pieces(), timeout=SECONDS)
    assert began.wait(SECONDS)
    call.cancel()
    over.set()


def test_a_client_that_leaves_before_it_reads_its_answer_harms_nobody(raw: RawSession) -> None:
    for tensor in range(1, 50):
        raw.allocate(tensor, 1000)
        raw.send(get_tensor=command_pb2.GetTensor(tensor=tensor, size_bytes=4000))


def test_a_client_that_says_nothing_keeps_nobody_waiting(daemon: DaemonUrls) -> None:
    """Neither one that opens a session and goes no further, nor a bare connection."""
    import socket

    host, _, port = daemon.tcp.removeprefix("grpc://").rpartition(":")
    with socket.create_connection((host, int(port))), raw_channel(daemon.tcp) as channel:
        session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(version_min=1, version_max=1), timeout=SECONDS
        )
        still_serves(daemon.tcp)


def test_bytes_that_are_no_http_harm_nobody(daemon: DaemonUrls) -> None:
    import socket

    host, _, port = daemon.tcp.removeprefix("grpc://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x00\xff" * 5000)
        still_serves(daemon.tcp)


# Data is data


def test_nan_and_infinity_are_data(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (3,), "f32")
    g.output("y", x * 2.0)
    given = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert np.array_equal(session.compile(g).run(x=given)["y"], given, equal_nan=True)


def test_an_index_outside_is_an_error_of_the_run_with_its_line(session: hg.Session) -> None:
    g = hg.Graph()
    rows, indices = g.input("rows", (3, 2), "f32"), g.input("indices", (2,), "i32")
    g.output("y", hg.take(rows, indices, axis=0))
    plan = session.compile(g)
    with pytest.raises(hg.OutOfRangeError, match="test_bad_input.py"):
        plan.run(rows=np.zeros((3, 2), np.float32), indices=np.array([0, 3], np.int32))
    assert plan.run(rows=np.ones((3, 2), np.float32), indices=np.array([0, 2], np.int32))["y"].sum() == 4


def test_dtype_numbers_of_the_contract_do_not_change() -> None:
    assert (F32, tensor_pb2.DATA_TYPE_F64, tensor_pb2.DATA_TYPE_Q6_K) == (2, 1, 23)


def uploaded(raw: RawSession, *messages: bytes) -> grpc.RpcError:
    """What the server says to an upload of such messages."""
    channel = raw.channel
    method = channel.stream_unary("/heliograph.v1.BulkService/Upload", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        method(iter(messages), timeout=SECONDS)
    return caught.value


def test_a_message_of_millions_of_fields_is_no_more_work_than_protobuf_has_with_it(raw: RawSession) -> None:
    error = uploaded(raw, b"\x10\x01" * 2**20)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    target = bulk_pb2.UploadTarget(session=raw.token, transfer=7, size_bytes=8)
    first = bulk_pb2.UploadRequest(target=target, data=b"abcd").SerializeToString()
    error = uploaded(raw, b"\x10\x01" * 2**20 + first)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_message_that_names_its_target_again_is_refused(raw: RawSession) -> None:
    target = bulk_pb2.UploadTarget(session=raw.token, transfer=7, size_bytes=8)
    first = bulk_pb2.UploadRequest(target=target, data=b"abcd").SerializeToString()
    again = bulk_pb2.UploadRequest(target=target, offset_bytes=4, data=b"efgh").SerializeToString()
    error = uploaded(raw, first, again)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
