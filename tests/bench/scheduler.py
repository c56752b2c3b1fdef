"""The scheduler: from 10,000 validated nodes and three devices to splits that are placed and cut."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, seconds_of

sys.path.append(str(Path(__file__).parents[1]))

from backend_graphs import Maker

from heliograph_backends.contract import Abort, CompileOptions, Device, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import messages
from heliograph_proto.graph import Graph
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType
from heliograph_server.core.candidates import candidates
from heliograph_server.core.contents import Contents
from heliograph_server.core.known_graphs import KnownGraphs, ReceivedGraph
from heliograph_server.core.scheduled import ScheduledPlan
from heliograph_server.core.scheduling import Problem, schedule
from heliograph_server.core.scheduling.between import plan_between, values_between
from heliograph_server.core.scheduling.order import clocks
from heliograph_server.core.scheduling.parts import cut
from heliograph_server.core.spreading import spread
from heliograph_server.core.targets import Targets, Wish

NODES, WIDTH, RUNS = 10_000, 64, 7
BAR_MS, BAR_AGAIN_MS, SLEEP_SECONDS = 250.0, 5.0, 0.05
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
    """Milliseconds for thirds that are pinned, for two devices that lack an op, and for two whose memory is
    tight, so that they are asked what parts take, which is planning of their own."""
    graph = layers(NODES)
    weights = sum(leaf.type.nbytes for leaf in graph.weights)
    thirds = {node: 3 * node // len(graph.nodes) for node in range(len(graph.nodes))}
    plenty, tight = 8 * weights, int(0.4 * weights)
    yield _cold("pinned", graph, "", plenty, thirds)
    yield _cold("gaps", graph, "soft_max", plenty, {})
    yield _cold("tight", graph, "", tight, {})
    yield _again(graph)
    yield _side_by_side()


def _cold(name: str, graph: Graph, lacks: str, size_bytes: int, pins: Mapping[int, int]) -> Figure:
    accelerators = [Accelerator(f"fake{number}", lacks, size_bytes) for number in range(2)]
    devices = [*accelerators, CpuDevice("cpu0", 1)]
    try:
        splits = scheduled(graph, devices, pins)
        # It is one thread that computes: what others do on the machine can only add to the least.
        seconds = min(seconds_of(lambda: scheduled(graph, devices, pins), RUNS, warmup=1))
    finally:
        for device in devices:
            device.close()
    note = f"{len(graph.nodes):,} nodes, {splits:,} splits; ggml's, in C, takes about {GGML_MS} ms"
    return Figure(f"scheduler-time/{name}", seconds * 1e3, BAR_MS, 1.0, "ms", f"{BAR_MS:.0f} ms", note)


def _again(graph: Graph) -> Figure:
    """From the bytes of a graph that the session knows to its schedule: what compiling it again costs before
    the devices compile their parts."""
    devices = [*(Accelerator(f"fake{number}", "", 2**30) for number in range(2)), CpuDevice("cpu0", 1)]
    names = tuple(device.name for device in devices)
    pins = {node: names[3 * node // len(graph.nodes)] for node in range(len(graph.nodes))}
    wish = Wish(names, pins, {}, CompileOptions())
    message = messages.encode_graph(graph)
    known, by_name = KnownGraphs(Limits()), dict(zip(names, devices, strict=True))
    targets = Targets(by_name.__getitem__, devices, Contents(devices))

    def compile_again() -> None:
        data = message.SerializeToString(deterministic=True)
        made = partial(messages.decode_graph, message)
        found = known.validated(ReceivedGraph(sha256(data).digest(), len(data), made), ())
        targets.find(found, wish, {})

    try:
        seconds = min(seconds_of(compile_again, RUNS, warmup=2))
    finally:
        for device in devices:
            device.close()
    note = f"{len(graph.nodes):,} nodes, all of them pinned"
    return Figure(
        "scheduler-time/again", seconds * 1e3, BAR_AGAIN_MS, 1.0, "ms", f"{BAR_AGAIN_MS:.0f} ms", note
    )


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
    plan = ScheduledPlan(graph, schedule(problem), devices, LeafBindings({}, {}), CompileOptions())
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


def scheduled(graph: Graph, devices: Sequence[Device], pins: Mapping[int, int]) -> int:
    """All that is decided before a device compiles its parts; the number of splits."""
    problem = Problem(graph, candidates(graph, devices, {}, {}), pins=pins)
    found = spread(problem, devices, CompileOptions())
    for place, spans in values_between(graph, found, clocks(graph, found)).items():
        plan_between(graph, spans, devices[place].buffer_type)
    return len(cut(graph, found))
