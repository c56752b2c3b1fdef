"""Runs of one plan that overlap: on gates, without a wait for a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from core_client import CoreClient

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.session.protocol.resource_state import MAX_QUEUES

F4 = tensor_type("f32", (4,))
PLAN, EVENT, KEPT, ASIDE = 100, 101, 102, 200
SECONDS = 10.0
STAGES = ("fake0", "fake1", "fake2")


def chain() -> Graph:
    """(x + 1 squared) negated, a node for each stage."""
    return Graph(
        (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.INPUT, "one", F4)),
        (Node("add", (0, 1), F4), Node("sqr", (2,), F4), Node("neg", (3,), F4)),
        (Output("y", 4),),
    )


def counter() -> Graph:
    """A variable that grows by x on the first stage, and what it became through the others."""
    return Graph(
        (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.VARIABLE, "sum", F4)),
        (
            Node("add", (0, 1), F4),
            Node("assign", (1, 2), F4),
            Node("neg", (2,), F4),
            Node("neg", (4,), F4),
        ),
        (Output("y", 5),),
    )


class Line:
    """A client of three scripted devices and a processor, and a plan with a stage on each."""

    def __init__(self, client: CoreClient, devices: Sequence[FakeDevice]) -> None:
        self.client, self.devices = client, devices
        client.do(c.CreateStream(ASIDE, "fake0"))

    def compile(self, pipeline: int) -> None:
        info = self.client.compile(
            PLAN, chain(), devices=(*STAGES, "cpu0"), pins=dict(enumerate(STAGES)), pipeline=pipeline
        )
        assert info.pipeline == pipeline

    def start(self, value: float, tensor: int = 0) -> int:
        x, one = np.full(4, value, np.float32), np.ones(4, np.float32)
        inputs = c.InputBinding(0, x.tobytes()), c.InputBinding(1, one.tobytes())
        return self.client.send(c.RunCommand(PLAN, inputs, (c.OutputBinding(0, tensor, not tensor),)))

    def pass_by(self) -> None:
        """Work on a stream of its own, from sending to completion: time for all that need not wait."""
        made = self.client.wait(self.client.send(c.Allocate(ASIDE + 1, F4, "fake0"), ASIDE))
        assert made.error is None
        self.client.send(c.Free((ASIDE + 1,)))

    def finish(self, run: int, value: float) -> None:
        done = self.client.wait(run)
        assert done.error is None, done.error
        assert np.array_equal(np.frombuffer(done.outputs[0][1], "f4"), np.full(4, -((value + 1) ** 2), "f4"))


@pytest.fixture
def line() -> Iterator[Line]:
    devices = [FakeDevice(name, 2**20, is_host=False) for name in STAGES]
    with CoreClient(*devices, CpuDevice("cpu0", 1, native=False)) as client:
        yield Line(client, devices)


def test_a_run_enters_while_the_one_before_it_is_in_a_later_split(line: Line) -> None:
    line.compile(2)
    late = line.devices[2].script.hold("compute")
    first = line.start(1)
    assert late.entered.wait(SECONDS)
    early = line.devices[0].script.hold("compute")
    second = line.start(2)
    assert early.entered.wait(SECONDS)
    assert not late.opened.is_set()
    early.open()
    late.open()
    line.finish(first, 1)
    line.finish(second, 2)


def test_without_a_pipeline_a_run_waits_for_the_one_before_it(line: Line) -> None:
    line.compile(1)
    late = line.devices[2].script.hold("compute")
    first = line.start(1)
    assert late.entered.wait(SECONDS)
    early = line.devices[0].script.hold("compute")
    second = line.start(2)
    line.pass_by()
    assert not early.entered.is_set()
    late.open()
    line.finish(first, 1)
    early.open()
    line.finish(second, 2)


def test_there_are_never_more_runs_under_way_than_copies(line: Line) -> None:
    line.compile(2)
    late = line.devices[2].script.hold("compute")
    runs = [line.start(0)]
    assert late.entered.wait(SECONDS)
    later = line.devices[1].script.hold("compute")
    runs.append(line.start(1))
    assert later.entered.wait(SECONDS)
    third = line.devices[0].script.hold("compute")
    runs.append(line.start(2))
    line.pass_by()
    assert not third.entered.is_set()
    for gate in (late, later, third):
        gate.open()
    for value, run in enumerate(runs):
        line.finish(run, value)


def test_results_of_many_overlapping_runs_are_those_of_each_alone(line: Line) -> None:
    line.compile(4)
    seed = int(os.environ.get("SEED", "20261121"))
    values = [float(Random(f"{seed} {n}").randint(-9, 9)) for n in range(60)]
    for run, value in [(line.start(value), value) for value in values]:
        line.finish(run, value)


def test_what_uses_the_result_of_a_run_waits_for_it_and_a_mark_for_all(line: Line) -> None:
    line.compile(3)
    late = line.devices[2].script.hold("compute")
    first = line.start(1, KEPT)
    assert late.entered.wait(SECONDS)
    reading = line.client.send(c.GetTensor(KEPT, 0, 16))
    runs = [line.start(2), line.start(3)]
    marked = line.client.send(c.Record(EVENT))
    fence = line.client.send(c.Synchronize())
    line.pass_by()
    with line.client._changed:
        assert not {reading, marked, fence, first} & line.client._done.keys()
    late.open()
    assert np.array_equal(np.frombuffer(line.client.wait(reading).data, "f4"), np.full(4, -4, "f4"))
    line.client.wait(fence)
    with line.client._changed:
        assert {*runs, marked} <= line.client._done.keys()


def test_a_cancelled_run_leaves_those_before_and_behind_it(line: Line) -> None:
    line.compile(3)
    late = line.devices[2].script.hold("compute")
    first = line.start(1)
    assert late.entered.wait(SECONDS)
    middle = line.devices[1].script.hold("compute")
    second = line.start(2)
    assert middle.entered.wait(SECONDS)
    third = line.start(3)
    line.client.do(c.Cancel(second))
    assert isinstance(line.client.wait(second).error, CancelledError)
    late.open()
    line.finish(first, 1)
    line.finish(third, 3)
    line.finish(line.start(4), 4)


def test_a_run_that_waits_for_its_device_can_be_cancelled(line: Line) -> None:
    line.compile(3)
    held = line.devices[0].script.hold("compute")
    first = line.start(1)
    assert held.entered.wait(SECONDS)
    second, third = line.start(2), line.start(3)
    line.client.do(c.Cancel(second))
    assert isinstance(line.client.wait(second).error, CancelledError)
    held.open()
    line.finish(first, 1)
    line.finish(third, 3)


def test_a_device_that_fails_fails_one_run(line: Line) -> None:
    line.compile(3)
    late = line.devices[2].script.hold("compute")
    first = line.start(1)
    assert late.entered.wait(SECONDS)
    line.devices[1].script.fail("compute", ComputeFailedError("the fan stopped"))
    second, third = line.start(2), line.start(3)
    late.open()
    line.finish(first, 1)
    errors = [line.client.wait(run).error for run in (second, third)]
    # Whichever run came to that device next.
    assert sorted(type(error).__name__ for error in errors) == ["ComputeFailedError", "NoneType"]
    line.finish(line.start(4), 4)


def test_runs_that_change_a_variable_are_serial_in_a_pipeline_too(line: Line) -> None:
    pins = {0: "fake0", 1: "fake0", 2: "fake1", 3: "fake2"}
    line.client.compile(PLAN, counter(), devices=(*STAGES, "cpu0"), pins=pins, pipeline=4)
    x = np.arange(4, dtype=np.float32)
    run = c.RunCommand(PLAN, (c.InputBinding(0, x.tobytes()),), (c.OutputBinding(0, 0, True),))
    for count, sent in enumerate([line.client.send(run) for _ in range(20)], 1):
        done = line.client.wait(sent)
        assert done.error is None
        assert np.array_equal(np.frombuffer(done.outputs[0][1], "f4"), count * x)


def test_a_session_that_ends_ends_all_runs_in_flight() -> None:
    devices = [FakeDevice(name, 2**20, is_host=False) for name in STAGES]
    with CoreClient(*devices, CpuDevice("cpu0", 1, native=False)) as client:
        line = Line(client, devices)
        line.compile(3)
        gate = devices[2].script.hold("compute")
        runs = [line.start(n) for n in range(6)]
        assert gate.entered.wait(SECONDS)
        client.session.close()
        assert all(client.wait(run).error is not None for run in runs)


def test_a_plan_that_is_freed_gives_back_every_copy(line: Line) -> None:
    free = [device.memory().free_bytes for device in line.devices]
    line.compile(4)
    four = [before - device.memory().free_bytes for before, device in zip(free, line.devices, strict=True)]
    runs = [line.start(n) for n in range(8)]
    line.client.send(c.Free((PLAN,)))
    for value, run in enumerate(runs):
        line.finish(run, value)
    line.client.do(c.Synchronize())
    assert [device.memory().free_bytes for device in line.devices] == free
    line.compile(1)
    one = [before - device.memory().free_bytes for before, device in zip(free, line.devices, strict=True)]
    assert four == [4 * size for size in one] and any(one)


@pytest.mark.parametrize(
    ("copies", "error"), [(0, InvalidArgumentError), (-1, InvalidArgumentError), (17, LimitExceededError)]
)
def test_a_pipeline_that_cannot_be_is_refused(line: Line, copies: int, error: type[HeliographError]) -> None:
    with pytest.raises(error, match="pipeline"):
        line.client.compile(PLAN, chain(), devices=STAGES, pipeline=copies)


def test_the_threads_of_a_sessions_pipelines_are_bounded(line: Line) -> None:
    where = {"devices": (*STAGES, "cpu0"), "pins": dict(enumerate(STAGES))}
    with pytest.raises(LimitExceededError, match="threads"):
        for number in range(MAX_QUEUES // 16 + 1):
            # Other options, so that each is a plan of its own.
            line.client.compile(PLAN + number, chain(), pipeline=16, threads=number, **where)
    line.client.do(c.Free((PLAN,)))
    line.client.do(c.Synchronize())
    line.client.compile(PLAN + 900, chain(), pipeline=8, threads=900, **where)


def test_memory_that_suffices_for_one_copy_alone_says_so() -> None:
    wide = tensor_type("f32", (1000,))
    graph = Graph(
        (Leaf(LeafKind.INPUT, "x", wide),),
        (Node("neg", (0,), wide), Node("sqr", (1,), wide)),
        (Output("y", 2),),
    )
    small = FakeDevice("fake0", 10_000, is_host=False)
    with CoreClient(small, CpuDevice("cpu0", 1, native=False)) as client:
        where = {"devices": ("fake0", "cpu0"), "pins": {0: "cpu0", 1: "fake0"}}
        client.compile(PLAN, graph, **where)
        client.do(c.Free((PLAN,)))
        with pytest.raises(OutOfMemoryError, match="fake0"):
            client.compile(PLAN, graph, pipeline=4, **where)
        assert small.memory().free_bytes == 10_000


def test_a_plan_in_one_split_has_one_copy(line: Line) -> None:
    assert line.client.compile(PLAN, chain(), devices=("cpu0",), pipeline=4).pipeline == 1


def test_a_client_compiles_a_pipeline_and_submits_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 8), "f32")
    with g.scope("a"):
        h = hg.tanh(x)
    with g.scope("b"):
        y = h * 2.0
    g.output("y", y)
    pins = {"a/*": "fake0", "b/*": "fake1"}
    devices = [FakeDevice(name, 2**20, is_host=False) for name in STAGES[:2]]
    registry = Registry.of(*devices, CpuDevice("cpu0", 1, native=False))
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: registry)
    with hg.connect("local:") as session:
        plan = session.compile(g, ["fake0", "fake1"], pins=pins, pipeline=2)
        assert (plan.pipeline, plan.splits) == (2, 2)
        given = [np.full((4, 8), n, np.float32) for n in range(10)]
        runs = [plan.submit(x=x) for x in given]
        for x, run in zip(given, runs, strict=True):
            assert np.array_equal(run.result()["y"], np.tanh(x) * 2)
        with pytest.raises(hg.InvalidArgumentError, match="pipeline is 0"):
            session.compile(g, pipeline=0)
