"""Splits that nothing orders run side by side: on gates, without a wait for a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from core_client import CoreClient

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError, ComputeFailedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

F4 = tensor_type("f32", (4,))
X = np.arange(4, dtype=np.float32)
PLAN = 100
SECONDS = 10.0


def branches() -> Graph:
    """Two branches of x, pinned to two devices, and their sum on a third."""
    return Graph(
        (Leaf(LeafKind.INPUT, "x", F4),),
        (Node("neg", (0,), F4), Node("sqr", (0,), F4), Node("add", (1, 2), F4)),
        (Output("y", 3),),
    )


class Pair:
    """A client of two scripted devices and a processor, and the plan of the branches."""

    def __init__(self, client: CoreClient, first: FakeDevice, second: FakeDevice) -> None:
        self.client, self.first, self.second = client, first, second
        names = ["fake0", "fake1", "cpu0"]
        client.compile(PLAN, branches(), devices=names, pins=dict(enumerate(names)))

    def start(self) -> int:
        return self.client.send(
            c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),))
        )

    def finish(self, run: int) -> None:
        """The run ends well, with the sum."""
        done = self.client.wait(run)
        assert done.error is None, done.error
        assert np.array_equal(np.frombuffer(done.outputs[0][1], "f4"), X * X - X)


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = (FakeDevice(f"fake{number}", 2**20, is_host=False) for number in range(2))
    with CoreClient(first, second, CpuDevice("cpu0", 1, native=False)) as client:
        yield Pair(client, first, second)


def split_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("heliograph-split")]


def test_two_splits_that_do_not_depend_on_each_other_are_in_flight_at_once(pair: Pair) -> None:
    for _ in range(3):
        gates = pair.first.script.hold("compute"), pair.second.script.hold("compute")
        run = pair.start()
        assert all(gate.entered.wait(SECONDS) for gate in gates)
        for gate in gates:
            gate.open()
        pair.finish(run)


def test_a_split_that_fails_ends_those_that_run_beside_it(pair: Pair) -> None:
    held = pair.first.script.hold("compute")
    pair.second.script.fail("compute", ComputeFailedError("the fan stopped"))
    error = pair.client.wait(pair.start()).error
    assert isinstance(error, ComputeFailedError) and "the fan stopped" in error.message
    # The gate was opened by the end of the run, or never reached.
    assert held.opened.is_set() or not held.entered.is_set()
    held.open()
    pair.finish(pair.start())


def test_a_cancelled_run_ends_all_splits_in_flight(pair: Pair) -> None:
    gates = pair.first.script.hold("compute"), pair.second.script.hold("compute")
    run = pair.start()
    assert all(gate.entered.wait(SECONDS) for gate in gates)
    pair.client.send(c.Cancel(run))
    assert isinstance(pair.client.wait(run).error, CancelledError)
    pair.finish(pair.start())


def test_the_threads_of_splits_go_with_their_plan(pair: Pair) -> None:
    pair.finish(pair.start())
    assert split_threads()
    pair.client.do(c.Free((PLAN,)))
    pair.client.do(c.Fence() if hasattr(c, "Fence") else c.Synchronize())
    assert not split_threads()


def test_splits_that_wait_for_each_other_take_no_threads() -> None:
    chain = Graph(
        (Leaf(LeafKind.INPUT, "x", F4),),
        (Node("neg", (0,), F4), Node("sqr", (1,), F4), Node("neg", (2,), F4)),
        (Output("y", 3),),
    )
    devices = FakeDevice("fake0", 2**20, is_host=False), CpuDevice("cpu0", 1, native=False)
    with CoreClient(*devices) as client:
        client.compile(PLAN, chain, devices=["fake0", "cpu0"], pins={0: "fake0", 1: "cpu0", 2: "fake0"})
        client.do(c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),)))
        assert not split_threads()
