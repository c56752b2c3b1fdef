"""Graphs as they come to a session: under the digest of their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from core_client import CoreClient
from plan_options import divided

from heliograph_proto import codec
from heliograph_proto import commands as c
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest, PlanInfo, ReceivedGraph
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type

F4 = tensor_type("f32", (4,))
X = np.arange(4, dtype=np.float32)


def chain(*ops: str, size: int = 4) -> Graph:
    """Ops on one input, one after the other."""
    type = tensor_type("f32", (size,))
    nodes = tuple(Node(op, (number,), type, {}, f"{op}{number}") for number, op in enumerate(ops))
    return Graph((Leaf(LeafKind.INPUT, "x", type),), nodes, (Output("y", len(ops)),))


class Arrivals:
    """Graphs as they come, and how many of them were made of their bytes."""

    def __init__(self) -> None:
        self.decoded = 0

    def of(self, graph: Graph, size_bytes: int = 0) -> ReceivedGraph:
        received = codec.received_graph(codec.graph_bytes(graph), Limits())

        def decode() -> Graph:
            self.decoded += 1
            return graph

        return ReceivedGraph(received.digest, size_bytes or received.size_bytes, decode)


def compile_received(client: CoreClient, plan: int, graph: Graph, **wish: Any) -> PlanInfo:
    """Compiles a graph that came in a message. `wish`: fields of CompileRequest, and of its options."""
    options, rest = divided(wish)
    request = CompileRequest(plan, Arrivals().of(graph), options, **rest)
    return client.session.compile(request)


def output_of(client: CoreClient, plan: int, x: np.ndarray[Any, Any] = X) -> list[float]:
    """What a plan of one input gives."""
    given = (c.InputBinding(0, x.tobytes()),)
    done = client.do(c.RunCommand(plan, given, (c.OutputBinding(0, 0, True),)))
    found: list[float] = np.frombuffer(done.outputs[0][1], np.float32).tolist()
    return found
