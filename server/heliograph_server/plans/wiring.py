"""The partitions of a plan on their hosts: an edge for each value that crosses, and each host's graph."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heliograph_backends.contract import (
    BufferType,
    DeviceCompileOptions,
    LeafBindings,
    Site,
    SitePlan,
    SiteWork,
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
    Partition,
    PeerSource,
    Route,
    is_loss,
)
from heliograph_server.scheduler.partitions import Crossing, PartitionGraph, Partitions


@dataclass(frozen=True, slots=True)
class RelayErrand:
    """A value that the head takes to a daemon in each run."""

    edge: Edge
    size_bytes: int
    destination: PeerSource
    #: Where it fetches it; None: its own partition makes it.
    source: PeerSource | None = None


@dataclass(frozen=True, slots=True)
class PartitionWiring:
    """How the partitions of a plan are connected."""

    #: Of each piece.
    partitions: tuple[Partition, ...]
    #: What the head takes to others in each run.
    errands: tuple[RelayErrand, ...]
    #: Of each crossing.
    routes: tuple[Route, ...]


def wire(found: Partitions, sites: Sequence[Site | None]) -> PartitionWiring:
    """Makes up edges. `sites`: of each piece; None: this process, which fetches from daemons and takes to
    them what they want of it, so that none need reach it."""
    arrivals: list[list[Arrival]] = [[] for _ in found.pieces]
    departures: list[list[Departure]] = [[] for _ in found.pieces]
    errands: list[RelayErrand] = []
    routes: list[Route] = []
    for one in found.crossings:
        source, target = sites[one.source], sites[one.target]
        edge = _new_edge()
        if source is None or target is None or target.can_reach(source):
            routes.append(Route.DIRECT)
            from_there = _source_of(source) if source is not None else None
            if source is None:
                assert target is not None
                errands.append(RelayErrand(edge, one.size_bytes, _source_of(target)))
        else:
            routes.append(Route.RELAYED)
            from_there = None
            errands.append(RelayErrand(edge, one.size_bytes, _source_of(target), _source_of(source)))
        arrivals[one.target].append(Arrival(one.leaf, edge, from_there))
        departures[one.source].append(Departure(one.node, edge))
    partitions = tuple(
        Partition(tuple(come), tuple(go), piece.begins)
        for piece, come, go in zip(found.pieces, arrivals, departures, strict=True)
    )
    return PartitionWiring(partitions, tuple(errands), tuple(routes))


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
    """Pairs of hosts of which the first did not find the second, which is alive, so that the partition there
    failed with an error. Those that it found, while it lost a third one, are not among them."""
    reader = sites[target]
    arrivals = wires.partitions[target].arrivals
    for one, arrival in zip(_crossings_to(found, target), arrivals, strict=True):
        source = sites[one.source]
        if reader is None or source is None or arrival.source is None or not is_loss(error, arrival.source):
            continue
        try:
            source.check()
        except HeliographError:
            continue
        yield reader, source


def _crossings_to(found: Partitions, target: int) -> Iterator[Crossing]:
    return (one for one in found.crossings if one.target == target)


def bindings_of(piece: PartitionGraph, leaves: Mapping[int, Tensor]) -> LeafBindings:
    """A piece's weights and variables, which lie on its host."""
    weights: dict[int, Tensor] = {}
    variables: dict[int, Tensor] = {}
    for leaf, value in piece.bound:
        into = weights if piece.graph.leaves[leaf].kind is LeafKind.WEIGHT else variables
        into[leaf] = leaves[value]
    return LeafBindings(weights, variables)


def explained(graph: Graph, piece: PartitionGraph, error: HeliographError) -> HeliographError:
    """An error of a piece with the whole graph's number, name and operands of its node."""
    if not error.origin.op or not 0 <= error.origin.node < len(piece.nodes):
        return error
    number = piece.nodes[error.origin.node]
    if error.origin.node not in piece.inserted:
        return error.at(replace(error.origin, node=number))
    whole = graph.origin(number)
    return error.at(replace(whole, sequence=error.origin.sequence))


def site_work(
    piece: PartitionGraph,
    partition: Partition,
    memories: Sequence[BufferType],
    leaves: Mapping[int, Tensor],
    options: DeviceCompileOptions,
    pipeline: int,
) -> SiteWork:
    """What a host is to compile."""
    devices = tuple(memories[place].device for place in piece.devices)
    return SiteWork(piece.graph, partition, devices, bindings_of(piece, leaves), options, pipeline)


def compile_on(site: Site, graph: Graph, piece: PartitionGraph, work: SiteWork) -> SitePlan:
    """Raises what `Site.compile` does, with the whole graph's node."""
    try:
        return site.compile(work)
    except HeliographError as error:
        raise explained(graph, piece, error) from None
