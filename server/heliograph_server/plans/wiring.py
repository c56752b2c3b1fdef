"""The partitions of a plan on their hosts: an edge for each crossing value, and each host's
graph."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from heliograph_backends.contract import (
    LeafBindings,
    Site,
    Tensor,
)
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import (
    EDGE_BYTES,
    SECRET_BYTES,
    Arrival,
    Departure,
    Edge,
    LoopArrival,
    Partition,
    PeerSource,
    Route,
    is_loss,
)
from heliograph_server.plans.loop_parts import PairEdges, edges_between
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions
from heliograph_server.scheduler.splits import SplitGraph

#: The time that a compile waits for the probes of relayed links, and the most links that it probes;
#: the head probes the others in its turn.
LOOK_SECONDS = 1.0
MOST_LOOKS = 16


@dataclass(frozen=True, slots=True)
class RelayErrand:
    """A value that the head carries to a daemon in each run."""

    edge: Edge
    size_bytes: int
    destination: PeerSource
    #: The daemon to fetch it from; None: the head's own partition makes it.
    source: PeerSource | None = None


@dataclass(frozen=True, slots=True)
class PartitionWiring:
    """The edges between the partitions of a plan."""

    #: The arrivals and departures of each piece.
    partitions: tuple[Partition, ...]
    #: The values that the head carries in each run.
    errands: tuple[RelayErrand, ...]
    #: The route of each crossing.
    routes: tuple[Route, ...]
    #: The edges from one partition to another between two steps of a loop.
    loop_edges: Mapping[tuple[int, int], PairEdges] = field(default_factory=dict)


def wire(found: Partitions, sites: Sequence[Site | None]) -> PartitionWiring:
    """Create the edges.

    `sites` is the host of each piece; None is this process. This process fetches values from
    daemons and sends them its own, so that no daemon needs to reach it.
    """
    arrivals: list[list[Arrival]] = [[] for _ in found.pieces]
    departures: list[list[Departure]] = [[] for _ in found.pieces]
    errands: list[RelayErrand] = []
    routes: list[Route] = []
    for one in found.crossings:
        source, target = sites[one.source], sites[one.target]
        edge = _new_edge()
        if source is None or target is None or target.can_reach(source):
            routes.append(Route.DIRECT)
            arrives_from = _source_of(source) if source is not None else None
            if source is None:
                assert target is not None
                errands.append(RelayErrand(edge, one.size_bytes, _source_of(target)))
        else:
            routes.append(Route.RELAYED)
            arrives_from = None
            errands.append(RelayErrand(edge, one.size_bytes, _source_of(target), _source_of(source)))
        arrivals[one.target].append(Arrival(one.leaf, edge, arrives_from))
        departures[one.source].append(Departure(one.node, edge))
    loops = _LoopWiring(found, sites)
    partitions = tuple(
        Partition(
            tuple(arrivals[place]),
            tuple(departures[place]),
            piece.begins,
            tuple(loops.arrivals[place]),
            tuple(loops.departures[place]),
        )
        for place, piece in enumerate(found.pieces)
    )
    return PartitionWiring(partitions, tuple(errands), tuple(routes), loops.pairs)


class _LoopWiring:
    """Edges from each partition to each other one, for loops. None if this process has one, or a
    host without such loops."""

    def __init__(self, found: Partitions, sites: Sequence[Site | None]) -> None:
        self.arrivals: list[list[LoopArrival]] = [[] for _ in found.pieces]
        self.departures: list[list[Edge]] = [[] for _ in found.pieces]
        self.pairs: dict[tuple[int, int], PairEdges] = {}
        if any(site is None or not site.exchanges_loops for site in sites):
            return
        for (source, target), count in edges_between(found).items():
            site, gone, come = sites[source], self.departures[source], self.arrivals[target]
            assert site is not None
            self.pairs[source, target] = PairEdges(len(gone), len(come), count)
            edges = [_new_edge() for _ in range(count)]
            gone += edges
            come += [LoopArrival(edge, _source_of(site)) for edge in edges]


def relayed_pairs(
    found: Partitions, sites: Sequence[Site | None], wires: PartitionWiring
) -> list[tuple[Site, Site]]:
    """Return the pairs of hosts whose first reads a relayed value of the second."""
    pairs: dict[tuple[Site, Site], None] = {}
    for one, route in zip(found.crossings, wires.routes, strict=True):
        source, reader = sites[one.source], sites[one.target]
        if route is Route.RELAYED and source is not None and reader is not None:
            pairs[reader, source] = None
    return list(pairs)


def look_again(found: Partitions, sites: Sequence[Site | None]) -> None:
    """Probe again, at the same time, the links of the partitions that were missing.

    A link that is found later than after `LOOK_SECONDS` is used from a later run on.
    """
    pairs: dict[tuple[Site, Site], None] = {}
    for one in found.crossings:
        source, reader = sites[one.source], sites[one.target]
        if source is not None and reader is not None and not reader.can_reach(source):
            pairs[reader, source] = None
    probes = [
        threading.Thread(target=reader.look_again, args=(source,), name="heliograph-look", daemon=True)
        for reader, source in list(pairs)[:MOST_LOOKS]
    ]
    for probe in probes:
        probe.start()
    end = time.monotonic() + LOOK_SECONDS
    for probe in probes:
        probe.join(max(0.0, end - time.monotonic()))


def _new_edge() -> Edge:
    return Edge(secrets.token_bytes(EDGE_BYTES), secrets.token_bytes(SECRET_BYTES))


def _source_of(site: Site) -> PeerSource:
    return PeerSource(site.address, site.incarnation)


def unreachable(
    found: Partitions,
    sites: Sequence[Site | None],
    wires: PartitionWiring,
    target: int,
    error: HeliographError,
) -> Iterator[tuple[Site, Site]]:
    """Yield pairs of hosts whose first could not reach the second, although it is alive, so that
    the partition failed.

    Hosts that the first one reached while it lost a third one are not among them.
    """
    reader = sites[target]
    if reader is None:
        return
    arrivals = wires.partitions[target].arrivals
    crossings = (one for one in found.crossings if one.target == target)
    pairs = [(one.source, arrival.source) for one, arrival in zip(crossings, arrivals, strict=True)]
    # Between two steps of a loop it may fetch from hosts of which no run reads anything.
    of_loops = wires.partitions[target].loop_arrivals
    pairs += [
        (place, of_loops[pair.arrival].source)
        for (place, to), pair in wires.loop_edges.items()
        if to == target
    ]
    for place in dict.fromkeys(
        place for place, source in pairs if source is not None and is_loss(error, source)
    ):
        source = sites[place]
        if source is not None and _is_there(source):
            yield reader, source


def _is_there(site: Site) -> bool:
    try:
        site.check()
    except HeliographError:
        return False
    return True


def bindings_of(piece: PartitionGraph | SplitGraph, leaves: Mapping[int, Tensor]) -> LeafBindings:
    """Return the weights and variables of a partition or a split, given those of the whole graph."""
    weights: dict[int, Tensor] = {}
    variables: dict[int, Tensor] = {}
    for leaf, value in piece.bound:
        into = weights if piece.graph.leaves[leaf].kind is LeafKind.WEIGHT else variables
        into[leaf] = leaves[value]
    return LeafBindings(weights, variables)


def explained(graph: Graph, piece: PartitionGraph, error: HeliographError) -> HeliographError:
    """Return an error of a piece with the whole graph's number, name and operands of its node."""
    if not error.origin.op or not 0 <= error.origin.node < len(piece.nodes):
        return error
    number = piece.nodes[error.origin.node]
    if error.origin.node not in piece.inserted:
        return error.at(replace(error.origin, node=number))
    whole = graph.origin(number)
    return error.at(replace(whole, sequence=error.origin.sequence))
