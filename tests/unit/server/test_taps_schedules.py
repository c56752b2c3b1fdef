"""Splits that end behind observed nodes: what they observe, and that they change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from backend_graphs import Array, same_bits
from random_graphs import RandomGraph, all_of_a_run, error_of, evaluate
from scheduling_graphs import Checker, random_problem

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Plan, Tensor, host_bytes
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OutOfMemoryError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.plans.taps import check_taps, tapped
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.splits import split

F4 = tensor_type("f32", (4,))


def chain(count: int) -> Graph:
    nodes = tuple(Node("neg", (number,), F4) for number in range(count))
    return Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", count),))


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1, native=False)
    yield device
    device.close()


def test_what_lies_between_two_observed_nodes_is_one_split(cpu: CpuDevice) -> None:
    found = tapped(chain(7), [cpu.buffer_type], None, frozenset({1, 2, 5}))
    assert [one.nodes for one in found.splits] == [(0, 1), (2,), (3, 4, 5), (6,)]
    assert [one.outputs for one in found.splits] == [(2,), (3,), (6,), (7,)]
    assert not found.copied_bytes


def test_without_observed_nodes_nothing_is_cut(cpu: CpuDevice) -> None:
    assert len(tapped(chain(7), [cpu.buffer_type], None, frozenset()).splits) == 1


def test_a_node_that_the_graph_does_not_need_is_an_output_of_its_split(cpu: CpuDevice) -> None:
    idle = Graph(chain(1).leaves, (Node("neg", (0,), F4), Node("sqr", (0,), F4)), (Output("y", 1),))
    found = tapped(idle, [cpu.buffer_type], None, frozenset({1}))
    assert [one.outputs for one in found.splits] == [(1, 2)]


@pytest.mark.parametrize(
    ("taps", "words"),
    [((0, 3, 0), "twice"), ((7,), "node 7 is tapped, of 7"), ((2**32 - 1,), "of 7"), ((-1,), "of 7")],
)
def test_nodes_that_cannot_be_observed_are_refused(taps: Sequence[int], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        check_taps(chain(7), taps, Limits())


def test_more_bytes_than_a_session_may_hold_are_refused() -> None:
    limits = Limits(in_flight_bytes=40)
    assert check_taps(chain(7), (0, 1), limits) == {0, 1}
    with pytest.raises(LimitExceededError, match="have 48 bytes"):
        check_taps(chain(7), (0, 1, 2), limits)


def test_random_schedules_are_right_with_any_nodes_observed() -> None:
    for seed in range(600):
        problem, random = random_problem(seed), Random(seed)
        try:
            found = schedule(problem)
        except (InvalidArgumentError, UnsupportedError, OutOfMemoryError):
            continue
        nodes = range(len(problem.graph.nodes))
        taps = frozenset(node for node in nodes if random.random() < random.choice((0.1, 0.5)))
        try:
            Checker(problem, split(problem, found.homes, found.assignments, taps)).check(random)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {sorted(taps)} observed: {error}") from error


class Observing(CpuDevice):
    """A device whose plans observe nodes, and keep what they are told."""

    def __init__(self, device: CpuDevice, taps: frozenset[int]) -> None:
        self.__dict__.update(device.__dict__)
        self._device, self._taps = device, taps
        self.told: list[tuple[int, Array]] = []

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        schedule = tapped(graph, [self._device.buffer_type], None, self._taps)
        return _Observed(self, graph, schedule, [self._device], bindings, options)


class _Observed(LocalMultiPlan):
    def __init__(self, owner: Observing, *arguments: object) -> None:
        self._owner = owner
        super().__init__(*arguments)  # type: ignore[arg-type]

    def compute(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort, observe: object = None
    ) -> None:
        super().compute(inputs, outputs, abort, self._observe)

    def _observe(self, node: int, tensor: Tensor, abort: Abort) -> None:
        array = np.empty(tensor.type.shape, tensor.type.dtype.numpy)
        tensor.buffer.get(tensor.offset_bytes, host_bytes(array))
        self._owner.told.append((node, array))


def node_values(made: RandomGraph) -> dict[int, Array]:
    """By node: what it is in the first run, in float64."""
    values = {number: array.astype(np.float64) for number, array in enumerate(made.arrays)}
    for number, (op, operands, attributes, result) in enumerate(made.nodes):
        found = evaluate(op, [values[value] for value in operands], attributes)
        values[-1 - number] = np.array(np.broadcast_to(found, result.shape))
        if op == "assign":
            values[operands[0]] = np.array(found)
    return {number: values[-1 - number] for number in range(len(made.nodes))}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("fusion", [True, False])
def test_random_graphs_have_the_same_bits_observed_and_tell_the_right_values(seed: int, fusion: bool) -> None:
    random, made = Random(seed), RandomGraph(seed)
    taps = frozenset(node for node in range(len(made.nodes)) if random.random() < (0.15, 0.5, 1.0)[seed % 3])
    device = CpuDevice(threads=2)
    try:
        expected = all_of_a_run(device, made, fusion=fusion)
        observing = Observing(device, taps)
        found = all_of_a_run(observing, made, fusion=fusion)
    finally:
        device.close()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), f"seed {seed}: value {place} differs"
    assert [node for node, _ in observing.told] == sorted(taps), f"seed {seed}"
    right = node_values(made)
    for node, array in observing.told:
        assert error_of(array, right[node]) < 1e-4, f"seed {seed}: node {node}, {made.nodes[node][0]}"


def test_a_variable_is_observed_as_it_is_at_that_moment() -> None:
    v = Leaf(LeafKind.VARIABLE, "v", F4)
    nodes = (
        Node("reshape", (1,), tensor_type("f32", (2, 2)), {"shape": (2, 2)}), Node("add", (1, 0), F4),
        Node("assign", (1, 3), F4), Node("sqr", (4,), F4), Node("assign", (1, 5), F4),
    )  # fmt: skip
    graph = Graph((Leaf(LeafKind.INPUT, "x", F4), v), nodes, (Output("y", 6),))
    observed = told_of(graph, np.full(4, 3, "f4"), np.full(4, 1, "f4"), frozenset({0, 2, 4}))
    assert [(node, array.ravel()[0]) for node, array in observed] == [(0, 1), (2, 4), (4, 16)]


def told_of(graph: Graph, x: Array, v: Array, taps: frozenset[int]) -> list[tuple[int, Array]]:
    """What a run tells of a graph with an input x and a variable v."""
    device = CpuDevice(threads=1)
    observing = Observing(device, taps)
    tensors = [Tensor(F4, device.buffer_type.allocate(16)) for _ in range(2)]
    try:
        for tensor, array in zip(tensors, (x, v), strict=True):
            tensor.buffer.set(0, host_bytes(array))
        plan = observing.compile(graph, LeafBindings({}, {1: tensors[1]}), DeviceCompileOptions())
        plan.compute(tensors[:1], [None], Abort())
        plan.free()
    finally:
        for tensor in tensors:
            tensor.buffer.free()
        device.close()
    return observing.told
