"""Plans that are partitions of a graph on several hosts: their checks and their splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heliograph_backends.contract import BufferType
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Arrival, Departure, Partition
from heliograph_server.exchange.edges import EdgePorts, Exchange
from heliograph_server.resources.memories import readable
from heliograph_server.scheduler.model import Candidate, Problem, Schedule
from heliograph_server.scheduler.splits import split


@dataclass(frozen=True, slots=True)
class Exchanging:
    """A partition of a plan, and its end of the edges."""

    partition: Partition
    ports: EdgePorts
    #: For values between two steps of a loop; None: it runs no loops.
    loop_ports: EdgePorts | None = None

    @classmethod
    def open(cls, exchange: Exchange, partition: Partition, copies: int) -> Exchanging:
        """Open a partition's edges. Raises HandleExistsError, UnavailableError."""
        ports = exchange.open(partition, copies)
        arrivals = tuple(Arrival(0, one.edge, one.source) for one in partition.loop_arrivals)
        departures = tuple(Departure(0, edge) for edge in partition.loop_departures)
        try:
            return cls(partition, ports, exchange.open(Partition(arrivals, departures)))
        except BaseException:
            ports.close()
            raise

    def close(self) -> None:
        """Close the edges. Idempotent."""
        self.ports.close()
        if self.loop_ports is not None:
            self.loop_ports.close()


def check_partition(graph: Graph, partition: Partition) -> None:
    """Raise InvalidArgumentError for arrivals that are no inputs, departures that are no nodes, and
    duplicates."""
    edges = [one.edge.name for one in partition.arrivals] + [one.edge.name for one in partition.departures]
    edges += [one.edge.name for one in partition.loop_arrivals]
    edges += [one.name for one in partition.loop_departures]
    if len(set(edges)) < len(edges):
        raise InvalidArgumentError(
            "two arrivals or departures have the same edge", advice="create an edge for each"
        )
    if not all(one.source.address for one in partition.loop_arrivals):
        raise InvalidArgumentError("an arrival between two steps of a loop has no source")
    if len({one.leaf for one in partition.arrivals}) < len(partition.arrivals):
        raise InvalidArgumentError("a leaf arrives twice", advice="name each leaf once")
    for leaf in [arrival.leaf for arrival in partition.arrivals]:
        if not 0 <= leaf < len(graph.leaves) or graph.leaves[leaf].kind is not LeafKind.INPUT:
            raise InvalidArgumentError(f"value {leaf} arrives, but is not an input of the graph")
    for node in (*(one.node for one in partition.departures), *partition.begins):
        if not 0 <= node < len(graph.nodes):
            raise InvalidArgumentError(
                f"node {node} departs or begins a split, of {len(graph.nodes)}",
                advice="pass a leaf through a node (cont) to let it depart",
            )


def check_alone(**others: object) -> None:
    """Raise UnsupportedError if a partition is combined with an option that it does not support."""
    asked = [name for name, value in others.items() if value]
    if asked:
        raise UnsupportedError(
            f"a partition of a graph on several daemons, with {asked[0]}",
            advice=f"compile it without {asked[0]}",
        )


def partitioned(
    graph: Graph, memories: Sequence[BufferType], found: Schedule | None, partition: Partition
) -> Schedule:
    """Return a schedule in which a split ends after each departure, and an arrival lies on the
    first device that reads it. `found` is None for a graph on the first device alone."""
    found = found or Schedule.on_first(graph)
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
    return replace(made, taps=frozenset(), departures=departures, ahead_bytes=found.ahead_bytes)
