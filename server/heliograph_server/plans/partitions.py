"""Plans that are partitions of a graph on several hosts: what may be asked of one, and how its splits end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heliograph_backends.contract import BufferType
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Cause, Partition
from heliograph_server.exchange.edges import EdgePorts
from heliograph_server.resources.memories import readable
from heliograph_server.scheduler.model import Assignment, Candidate, Problem, Schedule
from heliograph_server.scheduler.splits import split
from heliograph_server.scheduler.weight_homes import NOWHERE


@dataclass(frozen=True, slots=True)
class Exchanging:
    """A partition of a plan, and its end of the edges."""

    partition: Partition
    ports: EdgePorts


def check_partition(graph: Graph, partition: Partition) -> None:
    """Raises InvalidArgumentError for arrivals that are no inputs, departures that are no nodes, and what is
    named twice."""
    edges = [one.edge.name for one in partition.arrivals] + [one.edge.name for one in partition.departures]
    if len(set(edges)) < len(edges):
        raise InvalidArgumentError("two arrivals or departures have one edge", advice="make up one for each")
    if len({one.leaf for one in partition.arrivals}) < len(partition.arrivals):
        raise InvalidArgumentError("a leaf arrives twice", advice="name each of them once")
    for leaf in [arrival.leaf for arrival in partition.arrivals]:
        if not 0 <= leaf < len(graph.leaves) or graph.leaves[leaf].kind is not LeafKind.INPUT:
            raise InvalidArgumentError(f"value {leaf} arrives, but is no input of the graph")
    for node in (*(one.node for one in partition.departures), *partition.begins):
        if not 0 <= node < len(graph.nodes):
            raise InvalidArgumentError(
                f"node {node} departs or begins a split, of {len(graph.nodes)}",
                advice="leaves depart by way of a node: cont",
            )


def check_alone(**others: object) -> None:
    """Raises UnsupportedError where a partition is asked for together with what it cannot be."""
    asked = [name for name, value in others.items() if value]
    if asked:
        raise UnsupportedError(
            f"a partition of a graph on several daemons, with {asked[0]}",
            advice=f"compile it without {asked[0]}",
        )


def partitioned(
    graph: Graph, memories: Sequence[BufferType], found: Schedule | None, partition: Partition
) -> Schedule:
    """A schedule, or None for all on the first device, with a split that ends behind each departure; an
    arrival lies on the first device that reads it."""
    if found is None:
        homes = [NOWHERE if leaf.kind is LeafKind.INPUT else 0 for leaf in graph.leaves]
        assignments: Sequence[Assignment] = [Assignment(0, Cause.FIRST_THAT_CAN)] * len(graph.nodes)
    else:
        homes, assignments = list(found.homes), found.assignments
    first = dict[int, int]()
    for node, one in zip(graph.nodes, assignments, strict=True):
        for value in node.operands:
            first.setdefault(value, one.device)
    main = assignments[-1].device if assignments else 0
    for arrival in partition.arrivals:
        homes[arrival.leaf] = first.get(arrival.leaf, main)
    departures = frozenset(one.node for one in partition.departures)
    asked = [Candidate(one.device.name, (), readable(memories, one.device), 0) for one in memories]
    made = split(Problem(graph, asked, begins=partition.begins), homes, assignments, departures)
    ahead_bytes = found.ahead_bytes if found is not None else made.ahead_bytes
    return replace(made, taps=frozenset(), departures=departures, ahead_bytes=ahead_bytes)
