"""A graph for loops in the core."""

from __future__ import annotations

import numpy as np

from heliograph_proto import commands as c
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

F4 = tensor_type("f32", (4,))
ONE = tensor_type("i32", (1,))
X = np.arange(4, dtype=np.float32)
PLAN = 100
#: y is fed to x, m to n.
FED = (c.Carry(0, 0), c.Carry(1, 1))


def doubling() -> Graph:
    """y = x + x and m = n + n, which has one integer element."""
    leaves = Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.INPUT, "n", ONE)
    nodes = Node("add", (0, 0), F4), Node("add", (1, 1), ONE)
    return Graph(leaves, nodes, (Output("y", 2), Output("m", 3)))
