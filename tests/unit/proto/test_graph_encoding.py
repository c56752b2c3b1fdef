"""Encoded graphs: what protobuf reads and writes, from random graphs to damaged bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from heliograph_proto.codec import decode_graph, graph_bytes
from heliograph_proto.codec.types import decode_type
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import DTYPES
from heliograph_proto.v1 import graph_pb2, tensor_pb2

KINDS = {1: LeafKind.INPUT, 2: LeafKind.WEIGHT, 3: LeafKind.VARIABLE}
NUMBERS = [0, 1, 2, 127, 128, 300, 2**14, 2**21, 2**32 - 1]


def random_graph(chance: random.Random) -> graph_pb2.Graph:
    def type_() -> tensor_pb2.TensorType:
        shape = [chance.choice([0, 1, 4, 300, -1]) for _ in range(chance.randrange(4))]
        return tensor_pb2.TensorType(data_type=chance.choice(list(DTYPES.values())).number, shape=shape)

    def attribute(name: str) -> graph_pb2.Attribute:
        values: list[dict[str, Any]] = [
            {"real": chance.choice([-0.0, 0.0, 1.5, float("inf")])},
            {"integer": chance.choice([-(2**63), -1, 0, 7])},
            {"integers": graph_pb2.IntegerList(values=chance.choices([-1, 0, 200], k=chance.randrange(4)))},
            {"boolean": chance.random() < 0.5},
            {"data_type": DTYPES["f16"].number},
        ]
        return graph_pb2.Attribute(name=name, **chance.choice(values))

    def node() -> graph_pb2.Node:
        return graph_pb2.Node(
            op=chance.choice(["", "add", "neg"]),
            operands=chance.choices(NUMBERS, k=chance.choice([0, 1, 2, 2, 200])),
            attributes=[attribute(name) for name in "abc"[: chance.randrange(4)]],
            result=type_(),
            name=chance.choice(["", "n", "\u00e4" * 100]),
        )

    def leaf() -> graph_pb2.Leaf:
        name = f"x{chance.randrange(9)}"
        return graph_pb2.Leaf(
            kind=chance.randint(1, 3), name=name, type=type_(), digest=chance.choice([b"", bytes(32)])
        )

    return graph_pb2.Graph(
        leaves=[leaf() for _ in range(chance.randrange(9))],
        nodes=[node() for _ in range(chance.randrange(30))],
        outputs=[
            graph_pb2.Output(name="y", value=chance.choice(NUMBERS)) for _ in range(chance.randrange(3))
        ],
    )


def attributes_of(node: graph_pb2.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in node.attributes:
        field = one.WhichOneof("value")
        assert field is not None
        value = getattr(one, field)
        if field == "integers":
            value = tuple(value.values)
        found[one.name] = DTYPES["f16"] if field == "data_type" else value
    return found


def as_protobuf_reads(message: graph_pb2.Graph) -> Graph:
    return Graph(
        tuple(Leaf(KINDS[one.kind], one.name, decode_type(one.type), one.digest) for one in message.leaves),
        tuple(
            Node(one.op, tuple(one.operands), decode_type(one.result), attributes_of(one), one.name)
            for one in message.nodes
        ),
        tuple(Output(one.name, one.value) for one in message.outputs),
    )


def cases() -> tuple[random.Random, list[graph_pb2.Graph]]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    return chance, [random_graph(chance) for _ in range(60)]


def test_a_graph_is_read_and_written_as_protobuf_does() -> None:
    for message in cases()[1]:
        data = message.SerializeToString(deterministic=True)
        graph = decode_graph(data, Limits())
        assert repr(graph.nodes) == repr(as_protobuf_reads(message).nodes)
        assert graph == as_protobuf_reads(message)
        assert graph_bytes(graph) == data


def test_fields_in_another_order_and_unknown_ones_are_read_as_protobuf_does() -> None:
    chance, messages = cases()
    for message in messages:
        data = b""
        for node in message.nodes:
            fields = [graph_pb2.Node(op=node.op), graph_pb2.Node(name=node.name)]
            fields.append(graph_pb2.Node(attributes=node.attributes, result=node.result))
            parts = [field.SerializeToString() for field in fields]
            # An operand that is not packed, and unknown fields of several kinds.
            parts += [b"\x10\x85\x02", b"\x12\x02\x01\x02", b"\xa0\x06\x07", b"\x7a\x01a", b"\x3d\0\0\0\0"]
            chance.shuffle(parts)
            one = b"".join(parts)
            data += b"\x12" + graph_pb2.Leaf(digest=one).SerializeToString()[1:] + b"\x7a\x00"
        assert decode_graph(data, Limits()) == as_protobuf_reads(graph_pb2.Graph.FromString(data))


def test_equal_parts_of_nodes_are_one_object() -> None:
    type_ = tensor_pb2.TensorType(data_type=1, shape=[4])
    axes = graph_pb2.Attribute(name="axes", integers=graph_pb2.IntegerList(values=[0]))
    nodes = [graph_pb2.Node(op="sum", operands=[n], attributes=[axes], result=type_) for n in range(2)]
    leaf = graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, name="x", type=type_)
    graph = decode_graph(graph_pb2.Graph(leaves=[leaf], nodes=nodes).SerializeToString(), Limits())
    one, other = graph.nodes
    assert one.attributes is other.attributes and one.type is other.type is graph.leaves[0].type


def test_damaged_graphs_are_refused_or_read_and_nothing_else_happens() -> None:
    chance, messages = cases()
    for message in messages * 5:
        data = bytearray(message.SerializeToString() or b"\x12\x00")
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            decode_graph(bytes(data[: chance.randint(1, len(data))]), Limits())
        except (DecodeError, HeliographError):
            pass


def read(data: bytes) -> str:
    """The last node of an encoded graph, or the name of its error."""
    try:
        return repr(decode_graph(data, Limits()).nodes[-1])
    except (DecodeError, HeliographError) as error:
        return type(error).__name__


def test_a_damaged_node_is_read_as_it_is_alone_whatever_came_before_it() -> None:
    def encoded(node: bytes) -> bytes:
        return bytes([0x12, len(node)]) + node

    chance = cases()[0]
    type_ = tensor_pb2.TensorType(data_type=1, shape=[4])
    for name in ("", "node7"):
        whole = graph_pb2.Node(op="add", operands=[1, 2], result=type_, name=name).SerializeToString()
        shorter = [whole[:size] for size in range(len(whole))]
        changed = [bytearray(whole) for _ in range(2000)]
        for each in changed:
            each[chance.randrange(len(whole))] = chance.choice([0, 1, 2, 5, 0x12, 0x2A, 0x7F, 0x80, 0xFF])
        for node in (*shorter, *map(bytes, changed)):
            assert read(encoded(whole) + encoded(node)) == read(encoded(node)), node


@pytest.mark.parametrize(
    "data",
    [
        graph_pb2.Graph(nodes=[graph_pb2.Node(name="n" * 2**17)]).SerializeToString(),
        b"\x12\x82\x80\x04" + b"\x7a\x00" * 2**15 + b"\x7a\x00",
        b"\x7a\x00" * 100,
    ],
    ids=["a long name", "many unknown fields of a node", "many unknown fields"],
)
def test_what_no_graph_needs_is_refused(data: bytes) -> None:
    with pytest.raises(LimitExceededError):
        decode_graph(data, Limits(graph_nodes=1))
