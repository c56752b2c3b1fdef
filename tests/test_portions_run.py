"""Portions that run at the same time on devices of several hosts have the bits of one device."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import Array, Loaded, same_bits
from portion_runs import PortionedGraph
from random_graphs import RandomGraph

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.description import Cause
from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling import Assignment, Candidate, Problem, Schedule, split


def anywhere(graph: Graph, devices: int, random: np.random.Generator) -> Schedule:
    """Leaves and nodes here and there, in stretches."""
    homes = [-1 if leaf.kind is LeafKind.INPUT else int(random.integers(devices)) for leaf in graph.leaves]
    places, present = [], 0
    for node in graph.nodes:
        if random.random() < 0.3:
            present = int(random.integers(devices))
        places.append(homes[node.operands[0]] if node.op == "assign" else present)
    asked = [Candidate(str(n), (), frozenset((n,)), 0) for n in range(devices)]
    return split(Problem(graph, asked), homes, [Assignment(one, Cause.USER) for one in places])


def two_runs(device: CpuDevice, made: RandomGraph) -> list[Array]:
    it = Loaded(device, made)
    found = [array for array in (*it.run(), *it.run()) if array is not None]
    return found + it.free()


@pytest.mark.parametrize("seed", range(40))
def test_a_random_graph_in_portions_has_the_bits_that_it_has_on_one_device(seed: int) -> None:
    random, made = np.random.default_rng(seed), RandomGraph(seed)
    devices = [CpuDevice(f"cpu{number}", threads=1) for number in range(int(random.integers(2, 5)))]
    sites = [int(random.integers(len(devices))) for _ in devices]
    try:
        expected = two_runs(devices[0], made)
        portioned = PortionedGraph(made, anywhere(made.graph(), len(devices), random), devices, sites)
        found = [*portioned.run(1), *portioned.run(2), *portioned.free()]
    finally:
        for device in devices:
            device.close()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), f"seed {seed}: value {place} differs"
