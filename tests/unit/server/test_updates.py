"""Updating a plan while others use its session."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from core_client import CoreClient

from heliograph_backends.fake import FakeDevice, FakeGate
from heliograph_proto import commands as c
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

F4 = tensor_type("f32", (4,))
PLAN, OTHER = 100, 101
NEG = Graph((Leaf(LeafKind.INPUT, "x", F4),), (Node("neg", (0,), F4),), (Output("y", 1),))


def test_numbers_are_held_while_a_plan_is_compiled_for_them() -> None:
    gate = FakeGate()

    class Thoughtful(FakeDevice):
        def optimize(self, graph: Graph) -> Sequence[int]:
            gate.wait(None)
            return super().optimize(graph)

    with CoreClient(Thoughtful(memory_bytes=2**20)) as client:
        gate.open()
        client.compile(PLAN, NEG)
        gate.entered.clear()
        gate.opened.clear()
        failures: list[BaseException] = []
        thread = threading.Thread(target=compiling, args=(client, failures))
        thread.start()
        assert gate.entered.wait(10)
        for number in (OTHER, PLAN):
            assert "a plan is compiled for it" in client.refused(c.Allocate(number, F4)).message
        gate.open()
        thread.join(10)
        assert not failures
        assert negated(client) == [-1, -1, -1, -1]
        client.do(c.Allocate(PLAN, F4))


def compiling(client: CoreClient, failures: list[BaseException]) -> None:
    """Updates the plan on a thread of its own."""
    try:
        client.compile(OTHER, NEG, updates=PLAN)
    except BaseException as error:
        failures.append(error)


def negated(client: CoreClient) -> list[float]:
    given = c.InputBinding(0, np.ones(4, np.float32).tobytes())
    done = client.do(c.RunCommand(OTHER, (given,), (c.OutputBinding(0, 0, True),)))
    found: list[float] = np.frombuffer(done.outputs[0][1], np.float32).tolist()
    return found
