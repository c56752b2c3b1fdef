"""Graphs and op queries as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from heliograph_proto.codec.types import decode_dtype, decode_type, encode_type
from heliograph_proto.devices import OpQuery
from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.ops.table import infer
from heliograph_proto.pace import in_turns
from heliograph_proto.types import DType
from heliograph_proto.v1 import device_pb2, graph_pb2

_LEAF_KINDS = {
    LeafKind.INPUT: graph_pb2.LEAF_KIND_INPUT,
    LeafKind.WEIGHT: graph_pb2.LEAF_KIND_WEIGHT,
    LeafKind.VARIABLE: graph_pb2.LEAF_KIND_VARIABLE,
}
_LEAF_KINDS_BACK = {number: kind for kind, number in _LEAF_KINDS.items()}


def encode_graph(graph: Graph) -> graph_pb2.Graph:
    return graph_pb2.Graph(
        leaves=[
            graph_pb2.Leaf(
                kind=_LEAF_KINDS[leaf.kind],
                name=leaf.name,
                type=encode_type(leaf.type),
                digest=leaf.digest,
            )
            for leaf in graph.leaves
        ],
        nodes=[
            graph_pb2.Node(
                op=node.op,
                operands=node.operands,
                attributes=_encode_attributes(node.attributes),
                result=encode_type(node.type),
                name=node.name,
            )
            for node in graph.nodes
        ],
        outputs=[graph_pb2.Output(name=one.name, value=one.value) for one in graph.outputs],
    )


def graph_digest(message: graph_pb2.Graph) -> tuple[bytes, int]:
    """Return the SHA-256 digest of a graph's encoding, names included, and its size in bytes."""
    data = message.SerializeToString(deterministic=True)
    return sha256(data).digest(), len(data)


def _encode_attributes(attributes: Mapping[str, Any]) -> list[graph_pb2.Attribute]:
    return [_encode_attribute(*item) for item in attributes.items()]


def _encode_attribute(name: str, value: Any) -> graph_pb2.Attribute:
    match value:
        case bool():
            return graph_pb2.Attribute(name=name, boolean=value)
        case int():
            return graph_pb2.Attribute(name=name, integer=value)
        case float():
            return graph_pb2.Attribute(name=name, real=value)
        case DType():
            return graph_pb2.Attribute(name=name, data_type=value.number)
    return graph_pb2.Attribute(name=name, integers=graph_pb2.IntegerList(values=value))


def decode_graph(message: graph_pb2.Graph) -> Graph:
    """Decode a graph, unvalidated. Raises InvalidGraphError for what a Graph cannot express."""
    return Graph(
        leaves=tuple(map(_decode_leaf, message.leaves)),
        nodes=tuple(
            Node(
                op=node.op,
                operands=tuple(node.operands),
                type=decode_type(node.result),
                attributes=_decode_attributes(node.op, node.attributes),
                name=node.name,
            )
            for node in in_turns(message.nodes)
        ),
        outputs=tuple(Output(one.name, one.value) for one in message.outputs),
    )


def _decode_leaf(leaf: graph_pb2.Leaf) -> Leaf:
    if leaf.kind not in _LEAF_KINDS_BACK:
        raise InvalidGraphError(f"leaf {leaf.name[:40]!r} has no known kind")
    return Leaf(_LEAF_KINDS_BACK[leaf.kind], leaf.name, decode_type(leaf.type), leaf.digest)


def _decode_attributes(op: str, messages: Iterable[graph_pb2.Attribute]) -> dict[str, Any]:
    """Raise InvalidGraphError or InvalidArgumentError."""
    attributes: dict[str, Any] = {}
    for one in messages:
        if one.name in attributes:
            raise InvalidGraphError(f"op {op[:40]!r} has attribute {one.name[:40]!r} twice")
        match one.WhichOneof("value"):
            case "integers":
                attributes[one.name] = tuple(one.integers.values)
            case "data_type":
                attributes[one.name] = decode_dtype(one.data_type)
            case "real" | "integer" | "boolean" as field:
                attributes[one.name] = getattr(one, field)
            case _:
                raise InvalidGraphError(f"op {op[:40]!r}: {one.name[:40]!r} has no value")
    return attributes


def encode_queries(device: str, queries: Sequence[OpQuery]) -> device_pb2.QueryOpsRequest:
    return device_pb2.QueryOpsRequest(
        device=device,
        queries=[
            device_pb2.OpQuery(
                op=one.op,
                attributes=_encode_attributes(one.attributes),
                operands=map(encode_type, one.operands),
                op_path=one.op_path,
            )
            for one in queries
        ],
    )


def decode_query(message: device_pb2.OpQuery) -> OpQuery:
    """Decode a query and infer its result. Raises the errors of `infer`."""
    operands = tuple(map(decode_type, message.operands))
    attributes = _decode_attributes(message.op, message.attributes)
    result, complete = infer(message.op, operands, attributes)
    return OpQuery(message.op, operands, result, complete, message.op_path)
