"""Requests in several messages, and what decoding them takes: against protobuf, on random ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from heliograph_proto.codec.wire import leading_bytes, split
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import device_pb2, graph_pb2, plan_pb2, tensor_pb2
from heliograph_server.rpc.decoding import Meter, decode

COMPILE: Any = plan_pb2.CompileRequest.DESCRIPTOR


def random_request(chance: random.Random) -> plan_pb2.CompileRequest:
    def attribute() -> graph_pb2.Attribute:
        values: list[dict[str, Any]] = [
            {"real": chance.random()},
            {"integer": -chance.randrange(2**40)},
            {"integers": graph_pb2.IntegerList(values=[chance.randrange(2**20) for _ in range(4)])},
        ]
        return graph_pb2.Attribute(name="a" * chance.randrange(9), **chance.choice(values))

    def node(number: int) -> graph_pb2.Node:
        type = tensor_pb2.TensorType(data_type=1, shape=[chance.randrange(2**31)] * chance.randrange(5))
        attributes = [attribute() for _ in range(chance.randrange(4))]
        operands = [chance.randrange(number + 1) for _ in range(chance.randrange(4))]
        return graph_pb2.Node(op="op", operands=operands, attributes=attributes, result=type)

    nodes = [node(number) for number in range(chance.randrange(60))]
    leaves = [graph_pb2.Leaf(name=f"x{number}", digest=bytes(32)) for number in range(chance.randrange(9))]
    return plan_pb2.CompileRequest(
        session=chance.randbytes(16),
        plan=7,
        graph=graph_pb2.Graph(nodes=nodes, leaves=leaves, outputs=[graph_pb2.Output(name="y")]),
        options=plan_pb2.PlanOptions(devices=["a", "b"], memory_bytes={"a": 3, "b": 2}, taps=[1, 2, 3]),
        bindings=[plan_pb2.LeafBinding(leaf=number, tensor=9) for number in range(chance.randrange(30))],
    )


@pytest.mark.parametrize("most_bytes", [300, 1000, 5000])
def test_a_request_in_pieces_is_the_request_again(most_bytes: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(50):
        request = random_request(chance)
        pieces = split(request.SerializeToString(), COMPILE, most_bytes)
        assert all(len(one) <= most_bytes for one in pieces)
        assert leading_bytes(pieces[0], (1,)) == request.session
        assert plan_pb2.CompileRequest.FromString(b"".join(pieces)) == request
        found, graph = decode(pieces, plan_pb2.CompileRequest, Limits(), lambda _: None)
        assert graph == request.graph.SerializeToString() and not found.HasField("graph")
        found.graph.CopyFrom(request.graph)
        assert found == request


def test_what_fits_is_one_piece() -> None:
    request = plan_pb2.CompileRequest(session=b"s").SerializeToString()
    assert split(request, COMPILE, len(request)) == [request]


def test_an_element_that_does_not_fit_is_refused() -> None:
    graph = graph_pb2.Graph(nodes=[graph_pb2.Node(name="n" * 1000)])
    request = plan_pb2.CompileRequest(graph=graph).SerializeToString()
    with pytest.raises(LimitExceededError, match="Graph.nodes has an element of 1,003 bytes"):
        split(request, COMPILE, 500)


@pytest.mark.parametrize("data", [b"", b"\x10\x01", b"\x12\x01a"])
def test_a_message_that_begins_otherwise_has_no_leading_bytes(data: bytes) -> None:
    assert leading_bytes(data, (1,)) == b""


def test_damaged_requests_are_refused_and_nothing_else_happens() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(300):
        data = bytearray(random_request(chance).SerializeToString())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        cut = bytes(data[: chance.randint(1, len(data))])
        try:
            decode([cut], plan_pb2.CompileRequest, Limits(), lambda _: None)
        except (DecodeError, LimitExceededError):
            pass


#: The memory of a decoded request of 20,000 nodes.
FEW = Limits(graph_nodes=20_000, in_flight_commands=1000)


def test_the_memory_of_nested_lists_counts() -> None:
    crowded = device_pb2.OpQuery(attributes=[graph_pb2.Attribute()] * 400_000)
    request = device_pb2.QueryOpsRequest(queries=[crowded])
    kind: Any = request.DESCRIPTOR
    with pytest.raises(LimitExceededError, match="too many fields"):
        Meter(FEW).check(request.SerializeToString(), kind)


def test_a_graph_in_very_many_pieces_is_refused() -> None:
    piece = plan_pb2.CompileRequest(graph=graph_pb2.Graph()).SerializeToString()
    with pytest.raises(LimitExceededError, match="20,000 graph"):
        Meter(FEW).check(piece * 20_001, COMPILE)
