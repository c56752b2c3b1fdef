"""The scheduler: where nodes run and why, what is copied, and that values do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_graphs import same_bits
from random_graphs import RandomGraph, all_of_a_run

from heliograph_backends.contract import DeviceCompileOptions, LeafBindings, Plan
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Cause
from heliograph_proto.types import tensor_type
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.scheduler.model import Candidate, Problem, Schedule
from heliograph_server.scheduler.schedule import schedule

F4 = tensor_type("f32", (4,))
PLENTY = 2**30


def chain(*ops: str) -> Graph:
    """x through elementwise ops; "add" adds a weight of its own."""
    leaves, nodes = [Leaf(LeafKind.INPUT, "x", F4)], []
    leaves += [Leaf(LeafKind.WEIGHT, f"w{n}", F4, bytes(32)) for n, op in enumerate(ops) if op == "add"]
    weight, value = 1, 0
    for number, op in enumerate(ops):
        operands = (value, weight) if op == "add" else (value,)
        weight += op == "add"
        nodes.append(Node(op, operands, F4, {}, f"{op}{number}"))
        value = len(leaves) + number
    return Graph(tuple(leaves), tuple(nodes), (Output("y", value),))


def candidates(
    graph: Graph,
    *refused: Sequence[str],
    free: Sequence[int] = (),
    shared: bool = False,
) -> list[Candidate]:
    """Devices a, b, ...: each with the ops that it refuses; the last one's memory is the host's."""
    everyone = frozenset(range(len(refused)))
    return [
        Candidate(
            name="abcdef"[place],
            refusals=["no kernel" if node.op in ops else "" for node in graph.nodes],
            reads=everyone if shared else frozenset((place,)),
            free_bytes=free[place] if free else PLENTY,
            is_host=place == len(refused) - 1,
        )
        for place, ops in enumerate(refused)
    ]


def solve(
    graph: Graph,
    *refused: Sequence[str],
    pins: Mapping[int, int] | None = None,
    free: Sequence[int] = (),
    shared: bool = False,
) -> Schedule:
    return schedule(Problem(graph, candidates(graph, *refused, free=free, shared=shared), pins=pins or {}))


def devices(found: Schedule) -> list[int]:
    return [one.device for one in found.assignments]


def causes(found: Schedule) -> list[str]:
    return [str(one) for one in found.assignments]


def test_a_graph_that_the_first_device_can_run_is_one_split_there() -> None:
    found = solve(chain("add", "neg", "add"), (), ())
    assert devices(found) == [0, 0, 0] and len(found.splits) == 1 and not found.copied_bytes
    assert causes(found) == ["weight 1", "swept", "weight 1"]


def test_an_op_that_it_cannot_run_goes_to_the_next_and_what_it_reads_is_copied() -> None:
    found = solve(chain("add", "exp", "neg"), ("exp",), ())
    assert devices(found) == [0, 1, 0]
    assert found.assignments[1].cause is Cause.BEST_INPUTS
    assert [[copy.value for copy in one.copies] for one in found.splits] == [[], [2], [3]]
    assert found.copied_bytes == 32


def test_nothing_is_copied_between_devices_that_share_memory() -> None:
    found = solve(chain("add", "exp", "neg"), ("exp",), (), shared=True)
    assert devices(found) == [0, 1, 0] and not found.copied_bytes


def test_a_pin_is_kept_and_its_weight_lies_there() -> None:
    found = solve(chain("add", "neg", "add"), (), (), pins={2: 1})
    assert devices(found) == [0, 0, 1]
    assert found.assignments[2].cause is Cause.USER
    assert found.homes == (-1, 0, 1)


def test_a_pin_to_a_device_that_cannot_run_the_node_says_why() -> None:
    with pytest.raises(InvalidArgumentError, match="add2.*pinned to b.*no kernel"):
        solve(chain("add", "neg", "add"), (), ("add",), pins={2: 1})


def test_an_op_that_nobody_can_run_is_refused_with_every_devices_reason() -> None:
    with pytest.raises(UnsupportedError, match="a: no kernel; b: no kernel") as raised:
        solve(chain("add", "exp"), ("exp",), ("exp",))
    assert raised.value.origin.node_name == "exp1"


def test_weights_that_do_not_fit_one_device_are_spread_between_layers() -> None:
    found = solve(chain("add", "neg", "add", "neg", "add"), (), (), free=[40, 40])
    assert found.homes == (-1, 0, 0, 1)
    assert devices(found) == [0, 0, 0, 0, 1]
    assert len(found.splits) == 2


def test_weights_that_fit_nowhere_say_by_how_much() -> None:
    with pytest.raises(OutOfMemoryError, match="16 bytes more are needed.*8 left"):
        solve(chain("add", "add", "add"), (), (), free=[16, 24])


def test_an_accelerator_takes_over_what_it_can_do_in_the_same_memory() -> None:
    graph = chain("add", "neg", "exp")
    able, host = candidates(graph, ("exp",), (), shared=True)
    problem = Problem(graph, [replace(able, helps=True), host], placed={1: 1})
    assert causes(schedule(problem)) == ["upgraded", "upgraded", "swept"]
    plain = Problem(graph, [able, host], placed={1: 1})
    assert devices(schedule(plain)) == [1, 1, 1]


def test_a_view_stays_with_its_source() -> None:
    square = tensor_type("f32", (2, 2))
    graph = Graph(
        (Leaf(LeafKind.INPUT, "x", square), Leaf(LeafKind.WEIGHT, "w", square, bytes(32))),
        (
            Node("add", (0, 1), square),
            Node("permute", (2,), square, {"axes": (1, 0)}),
            Node("exp", (3,), square),
        ),
        (Output("y", 4),),
    )
    found = solve(graph, ("exp",), ())
    assert devices(found) == [0, 0, 1]
    assert found.assignments[1].cause is Cause.FROM_VIEW


def test_every_node_keeps_the_cause_of_its_device() -> None:
    square = tensor_type("f32", (2, 2))
    leaves = (
        Leaf(LeafKind.INPUT, "x", square),
        Leaf(LeafKind.WEIGHT, "w", square, bytes(32)),
        Leaf(LeafKind.VARIABLE, "v", square),
    )
    nodes = (
        Node("exp", (0,), square),
        Node("permute", (1,), square, {"axes": (1, 0)}),
        Node("matmul", (3, 4), square),
        Node("reshape", (5,), square, {"shape": (2, 2)}),
        Node("assign", (2, 6), square),
    )
    found = solve(Graph(leaves, nodes, (Output("y", 5),)), ("matmul", "exp"), ())
    assert causes(found) == ["swept", "placed view source", "weight 1", "from view", "placed result"]
    alone = Graph(leaves[:1], (Node("exp", (0,), square), Node("neg", (1,), square)), (Output("y", 2),))
    assert causes(solve(alone, (), ())) == ["input", "best inputs"]


def test_a_value_is_copied_to_a_device_once_for_all_its_splits() -> None:
    x = Leaf(LeafKind.INPUT, "x", F4)
    w = Leaf(LeafKind.WEIGHT, "w", F4, bytes(32))
    nodes = (
        Node("add", (0, 1), F4), Node("exp", (2,), F4), Node("neg", (3,), F4), Node("exp", (2,), F4),
        Node("mul", (4, 5), F4),
    )  # fmt: skip
    found = solve(Graph((x, w), nodes, (Output("y", 6),)), ("exp",), ())
    copies = [(copy.value, copy.destination) for one in found.splits for copy in one.copies]
    assert len(copies) == len(set(copies))


# Values do not depend on where they are computed


# Seed 1010 has sums over views with gaps, which are contiguous once they have left their split.
@pytest.mark.parametrize("seed", [*range(40), 1010])
def test_a_random_graph_over_several_devices_has_the_bits_that_it_has_on_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    made = RandomGraph(seed)
    devices = [CpuDevice(f"cpu{number}", threads=1) for number in range(int(random.integers(1, 5)))]
    try:
        expected = all_of_a_run(devices[0], made)
        found = all_of_a_run(Spread(devices, random), made)
    finally:
        for device in devices:
            device.close()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), f"seed {seed}: value {place} differs"


class Spread(CpuDevice):
    """Several devices: with random gaps in what each runs and in whose memory it reads, leaves here and
    there, and pins."""

    def __init__(self, devices: Sequence[CpuDevice], random: np.random.Generator) -> None:
        self.__dict__.update(devices[0].__dict__)
        self._devices = devices
        self._random = random

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        leaves = (*bindings.weights, *bindings.variables)
        homes = {value: int(self._random.integers(len(self._devices))) for value in leaves}
        able = self._random.random((len(self._devices), len(graph.nodes))) < 0.6
        able[-1] = True
        for number, node in enumerate(graph.nodes):
            if node.op == "assign":
                able[homes[node.operands[0]], number] = True
        candidates = [self._candidate(place, able[place]) for place in range(len(self._devices))]
        problem = Problem(graph, candidates, homes, self._pins(graph, able))
        return LocalMultiPlan(graph, schedule(problem), self._devices, bindings, options)

    def _candidate(self, place: int, able: np.ndarray[Any, Any]) -> Candidate:
        shared = self._random.random(len(self._devices)) < 0.25
        reads = frozenset((place, *(int(other) for other in np.flatnonzero(shared))))
        refusals = ["" if one else "a gap" for one in able]
        return Candidate(self._devices[place].name, refusals, reads, PLENTY, is_host=True)

    def _pins(self, graph: Graph, able: np.ndarray[Any, Any]) -> dict[int, int]:
        chosen = np.flatnonzero(self._random.random(len(graph.nodes)) < 0.1)
        return {
            int(node): int(self._random.choice(np.flatnonzero(able[:, node])))
            for node in chosen
            if graph.nodes[node].op != "assign"
        }
