"""Chains of nodes over devices of several sites, with times that are round numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.scheduler.assignment import assign
from heliograph_server.scheduler.costs import costs_of
from heliograph_server.scheduler.model import Candidate, Problem, Schedule, SiteLink
from heliograph_server.scheduler.prediction import Prediction, predict
from heliograph_server.scheduler.splits import split
from heliograph_server.scheduler.weight_homes import leaf_roots

#: Of each weight, in bytes: far more than any result.
WEIGHT_BYTES = 4_000_000
PLENTY = 2**40


def layers(result_bytes: Sequence[int]) -> Graph:
    """A chain of nodes, each with a weight of its own and a result of so many bytes."""
    weight = tensor_type("f32", (WEIGHT_BYTES // 4,))
    types = [tensor_type("f32", (size // 4,)) for size in result_bytes]
    leaves = [Leaf(LeafKind.INPUT, "x", types[0])]
    leaves += [Leaf(LeafKind.WEIGHT, f"w{n}", weight, n.to_bytes(32)) for n in range(len(types))]
    nodes = [
        Node("add", (len(types) + n if n else 0, n + 1), type, {}, f"add{n}") for n, type in enumerate(types)
    ]
    return Graph(tuple(leaves), tuple(nodes), (Output("y", len(leaves) + len(nodes) - 1),))


def candidate(
    graph: Graph, place: int, seconds: Sequence[float], free_bytes: int = PLENTY, lacks: Sequence[int] = ()
) -> Candidate:
    """A device that takes so long for each node, and cannot run some."""
    refusals = ["no kernel" if number in lacks else "" for number in range(len(graph.nodes))]
    times = dict(enumerate(seconds))
    return Candidate("abcdef"[place], refusals, frozenset((place,)), free_bytes, times=times)


def links(devices: int, round_trip_s: float, bytes_per_s: float) -> dict[tuple[int, int], SiteLink]:
    """The same between any two."""
    link = SiteLink(round_trip_s, bytes_per_s, is_measured=True)
    return dict.fromkeys(permutations(range(devices), 2), link)


def where(found: Schedule) -> list[int]:
    return [one.device for one in found.assignments]


def predicted(problem: Problem, found: Schedule) -> Prediction:
    return predict(problem.graph, found, costs_of(problem))


def placed_at(problem: Problem, devices: Sequence[int]) -> Schedule:
    """The schedule of a placement that somebody else made: each node, and the weight that it reads first, on
    the device that is named for it."""
    graph = problem.graph
    homes = [-1] * len(graph.leaves)
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            if value < len(homes) and graph.leaves[value].kind is not LeafKind.INPUT and homes[value] < 0:
                homes[value] = devices[number]
    pinned = replace(problem, pins=dict(enumerate(devices)))
    return split(problem, homes, assign(pinned, homes, leaf_roots(graph)))


def stretched(nodes: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to have each device run consecutive nodes, or none."""

    def rest(left: int, free: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for device in free:
            for count in range(1, left + 1):
                others = [one for one in free if one != device]
                yield from ((device,) * count + more for more in rest(left - count, others))

    yield from rest(nodes, range(devices))


def fits(problem: Problem, devices: Sequence[int], most: Mapping[int, int]) -> bool:
    """Whether no device has more nodes than it may."""
    return all(devices.count(device) <= count for device, count in most.items())
