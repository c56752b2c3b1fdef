"""Graphs of the contract that tests of lost devices compile."""

from __future__ import annotations

from heliograph_proto.digests import digest_of
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

_TYPE = tensor_type("f32", (4,))


def scaled(data: bytes) -> Graph:
    """y = x * w, with f32 elements."""
    type_ = tensor_type("f32", (len(data) // 4,))
    leaves = (Leaf(LeafKind.INPUT, "x", type_), Leaf(LeafKind.WEIGHT, "w", type_, digest_of(data)))
    return Graph(leaves, (Node("mul", (0, 1), type_),), (Output("y", 2),))


def accumulating() -> Graph:
    """total += x, with f32 elements."""
    leaves = (Leaf(LeafKind.INPUT, "x", _TYPE), Leaf(LeafKind.VARIABLE, "total", _TYPE))
    nodes = (Node("add", (1, 0), _TYPE), Node("assign", (1, 2), _TYPE))
    return Graph(leaves, nodes, (Output("y", 3),))
