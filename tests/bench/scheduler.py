"""The scheduler: from 10,000 validated nodes and three devices to splits that are placed and cut."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, least_computing, seconds_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Maker
from core_client import CoreClient

from heliograph_backends.contract import Abort, Device, DeviceCompileOptions, LeafBindings, Tensor, access
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.compile.candidates import candidates, kinds_of
from heliograph_server.compile.memory_fit import spread
from heliograph_server.daemon.garbage import take_over
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.scheduler.costs import costs_of
from heliograph_server.scheduler.model import Candidate, Problem, Rates, SiteLink
from heliograph_server.scheduler.pipeline_stages import stretches
from heliograph_server.scheduler.prediction import predict
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.split_memory import plan_between, values_between
from heliograph_server.scheduler.splits import clocks, cut
from heliograph_server.scheduler.weight_homes import leaf_roots

NODES, WIDTH, RUNS = 10_000, 64, 7
STAGES, STAGE_SECONDS, PIPELINE_RUNS = 4, 0.01, 200
BOUNDARIES, BAR_BOUNDARY_US = 200, 60.0
#: Hosts, and what part of all weights each of them holds.
HOSTS, SHARE, BAR_STRETCHES_MS = 5, 0.4, 60.0
BAR_MS, SLEEP_SECONDS = 100.0, 0.05
#: Of ggml's scheduler in C, for a graph of so many nodes; measured elsewhere, so a context and no peer.
GGML_MS = 1.7


class Accelerator(FakeDevice):
    """Memory of its own, and an op that it lacks."""

    def __init__(self, name: str, lacks: str, memory_bytes: int) -> None:
        super().__init__(name, memory_bytes, is_host=False)
        self._lacks = lacks

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return "no kernel" if op == self._lacks else super().supports_op(op, attributes, operands, result)


def layers(nodes: int) -> Graph:
    """Gated blocks behind norms, ten nodes each, three of them products with a weight of its own."""
    made = Maker()
    matrix, row = np.zeros((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    x = made.input(np.zeros((8, WIDTH), np.float32))
    for _ in range(nodes // 10):
        normal = made.node("mul", made.node("rms_norm", x), made.weight(row))
        gate = made.node("silu", made.node("matmul", normal, made.weight(matrix)))
        up = made.node("matmul", normal, made.weight(matrix))
        weighed = made.node("soft_max", made.node("mul", gate, up))
        down = made.node("matmul", weighed, made.weight(matrix))
        x = made.node("add", x, made.node("reshape", down, shape=(8, WIDTH)))
    made.output(x)
    return made.graph()


def figures() -> Iterator[Figure]:
    """Milliseconds for thirds that are pinned, for two devices that lack an op, for two whose memory is
    tight, so that they are asked what parts take, which is planning of their own, and for hosts of which
    times choose."""
    # As in a daemon, whose collections are rare.
    take_over()
    graph = layers(NODES)
    weights = sum(leaf.type.nbytes for leaf in graph.weights)
    thirds = {node: 3 * node // len(graph.nodes) for node in range(len(graph.nodes))}
    plenty, tight = 8 * weights, int(0.4 * weights)
    yield _cold("pinned", graph, "", plenty, thirds)
    yield _cold("gaps", graph, "soft_max", plenty, {})
    yield _cold("tight", graph, "", tight, {})
    yield _by_time(graph)
    yield _side_by_side()
    yield _pipeline()
    yield _boundary()


def _cold(name: str, graph: Graph, lacks: str, size_bytes: int, pins: Mapping[int, int]) -> Figure:
    accelerators = [Accelerator(f"fake{number}", lacks, size_bytes) for number in range(2)]
    devices = [*accelerators, CpuDevice("cpu0", 1)]
    try:
        splits = scheduled(graph, devices, pins)
        seconds = least_computing(lambda: scheduled(graph, devices, pins), RUNS)
    finally:
        for device in devices:
            device.close()
    note = f"{len(graph.nodes):,} nodes, {splits:,} splits; ggml's, in C, takes about {GGML_MS} ms"
    return Figure(f"scheduler-time/{name}", seconds * 1e3, BAR_MS, 1.0, "ms", f"{BAR_MS:.0f} ms", note)


def _by_time(graph: Graph) -> Figure:
    """What it takes to find where stretches run on hosts of different speeds, none of which holds all, beside
    placing nodes and cutting them into splits."""
    count, weights = len(graph.nodes), sum(leaf.type.nbytes for leaf in graph.weights)
    asked = [
        Candidate(f"host{place}", [""] * count, frozenset((place,)), int(SHARE * weights), rates=rates)
        for place, rates in enumerate(Rates().slowed(HOSTS - place) for place in range(HOSTS))
    ]
    links = dict.fromkeys(permutations(range(HOSTS), 2), SiteLink(1e-3, 1.25e8, is_measured=True))
    problem, roots = Problem(graph, asked, links=links, kinds=kinds_of(graph).of), leaf_roots(graph)

    def place() -> int:
        return len(stretches(problem, roots, costs_of(problem)))

    assert place(), "nothing fits"
    seconds = least_computing(place, RUNS)
    found = schedule(problem)
    predicted = predict(graph, found, costs_of(problem)).seconds
    by_memory = replace(problem, links={})
    other = predict(graph, schedule(by_memory), costs_of(problem)).seconds
    runs = f"runs of {predicted * 1e3:.0f} ms by prediction, {other * 1e3:.0f} ms where memory alone decides"
    bar = BAR_STRETCHES_MS
    note = f"{count:,} nodes, {HOSTS} hosts; {runs}"
    return Figure("scheduler-time/stretches", seconds * 1e3, bar, 1.0, "ms", f"{bar:.0f} ms", note)


def _side_by_side() -> Figure:
    """A run of two branches on two devices, each of which sleeps, against the time of both sleeps."""
    made = Maker()
    x = made.input(np.zeros(4, np.float32))
    made.output(made.node("add", made.node("neg", x), made.node("sqr", x)))
    graph = made.graph()
    devices = [*(FakeDevice(f"fake{number}", is_host=False) for number in range(2)), CpuDevice("cpu0", 1)]
    for device in devices[:2]:
        device.script.delay("compute", SLEEP_SECONDS)
    problem = Problem(graph, candidates(graph, devices, {}, {}), pins={0: 0, 1: 1, 2: 2})
    plan = LocalMultiPlan(graph, schedule(problem), devices, LeafBindings({}, {}), DeviceCompileOptions())
    given, result = (Tensor(leaf.type, devices[2].buffer_type.allocate(16)) for leaf in graph.leaves * 2)
    try:
        seconds = min(seconds_of(lambda: plan.compute([given], [result], Abort()), RUNS, warmup=1))
    finally:
        plan.free()
        for device in devices:
            device.close()
    both = 2 * SLEEP_SECONDS
    return Figure(
        "scheduler-overlap", seconds * 1e3, both * 1e3, 0.6, "ms", "one after the other", "two branches"
    )


def _pipeline() -> Figure:
    """What a run of four stages that sleep takes, in a pipeline of four and one after the other."""
    seconds = {
        copies: _stages(copies, runs) for copies, runs in ((4, PIPELINE_RUNS), (1, PIPELINE_RUNS // 4))
    }
    note = f"{STAGES} stages of {STAGE_SECONDS * 1e3:.0f} ms, {PIPELINE_RUNS} runs"
    return Figure("scheduler-pipeline", seconds[4] * 1e3, seconds[1] * 1e3, 1 / 3.7, "ms", "one copy", note)


def _stages(copies: int, runs: int) -> float:
    """Seconds a run, in the steady state and its ends."""
    names = [f"fake{number}" for number in range(STAGES)]
    devices = [FakeDevice(name, is_host=False) for name in names]
    for device in devices:
        device.script.delay("compute", STAGE_SECONDS)
    made = Maker()
    x = made.input(np.zeros(4, np.float32))
    for _ in names:
        x = made.node("neg", x)
    made.output(x)
    with CoreClient(*devices, CpuDevice("cpu0", 1)) as client:
        client.compile(1, made.graph(), devices=names, pins=dict(enumerate(names)), pipeline=copies)
        run = c.RunCommand(1, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        client.do(run)
        begun = time.perf_counter()
        for sent in [client.send(run) for _ in range(runs)]:
            assert client.wait(sent).error is None
        return (time.perf_counter() - begun) / runs


def _boundary() -> Figure:
    """What going over to another device costs beside the copy: a chain that changes device with every node
    against the same chain in one split a device, and the copies alone."""
    made = Maker()
    x = made.input(np.zeros(WIDTH, np.float32))
    for _ in range(BOUNDARIES + 1):
        x = made.node("neg", x)
    made.output(x)
    graph = made.graph()
    devices = [*(FakeDevice(f"fake{number}", is_host=False) for number in range(2)), CpuDevice("cpu0", 1)]
    given, result = (Tensor(graph.leaves[0].type, devices[2].buffer_type.allocate(4 * WIDTH)) for _ in "ab")
    seconds = []
    try:
        for pins in ({n: n % 2 for n in range(len(graph.nodes))}, dict.fromkeys(range(len(graph.nodes)), 0)):
            problem = Problem(graph, candidates(graph, devices, {}, {}), pins=pins)
            found = schedule(problem)
            plan = LocalMultiPlan(graph, found, devices, LeafBindings({}, {}), DeviceCompileOptions())
            seconds.append(min(seconds_of(lambda: plan.compute([given], [result], Abort()), RUNS, warmup=2)))  # noqa: B023
            plan.free()
        one, other = (Tensor(given.type, device.buffer_type.allocate(4 * WIDTH)) for device in devices[:2])
        copying = min(
            seconds_of(lambda: [access.copy(one, other) for _ in range(BOUNDARIES)], RUNS, warmup=2)
        )
    finally:
        for device in devices:
            device.close()
    each = (seconds[0] - seconds[1] - copying) / BOUNDARIES
    note = f"{BOUNDARIES} of them in a row; the copy alone {copying / BOUNDARIES * 1e6:.0f} us"
    return Figure(
        "scheduler-boundary", each * 1e6, BAR_BOUNDARY_US, 1.0, "us", f"{BAR_BOUNDARY_US:.0f} us", note
    )


def scheduled(graph: Graph, devices: Sequence[Device], pins: Mapping[int, int]) -> int:
    """All that is decided before a device compiles its parts; the number of splits."""
    problem = Problem(graph, candidates(graph, devices, {}, {}), pins=pins)
    found = spread(problem, devices, DeviceCompileOptions())
    for place, spans in values_between(graph, found, clocks(graph, found)).items():
        plan_between(graph, spans, devices[place].buffer_type)
    return len(cut(graph, found))
