"""What a plan over several hosts says of itself, put together from what each says of its portion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heliograph_backends.contract import Device
from heliograph_proto.description import (
    CopyReport,
    DeviceShare,
    NodePlacement,
    PlanReport,
    SplitReport,
    Way,
)
from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling import Copy, Schedule
from heliograph_server.core.scheduling.model import ALL_ROWS
from heliograph_server.core.scheduling.portions import Portions
from heliograph_server.core.wiring import Wires


def pooled_report(
    graph: Graph,
    schedule: Schedule,
    devices: Sequence[Device],
    portions: Portions,
    wires: Wires,
    reports: Mapping[int, PlanReport],
) -> PlanReport:
    """`reports`: of each portion. What one splits further is one split here; began: after its portion did."""
    split_of = {node: number for number, one in enumerate(schedule.splits) for node in one.nodes}
    concurrent, parts = _by_split(portions, reports, split_of)
    ways = _ways(portions, wires)
    places = {one.site: place for place, one in enumerate(portions.pieces)}
    site_of = [places.get(number, -1) for number in _site_numbers(devices)]
    return PlanReport(
        nodes=tuple(
            NodePlacement(split_of[node], one.cause, max(0, one.operand), concurrent.get(node, 0))
            for node, one in enumerate(schedule.assignments)
        ),
        splits=tuple(
            _split(
                one.device,
                tuple(_copy(copy, site_of, ways) for copy in one.copies),
                parts.get(number, []),
            )
            for number, one in enumerate(schedule.splits)
        ),
        devices=tuple(_share(graph, schedule, devices, place, parts) for place in range(len(devices))),
    )


def _site_numbers(devices: Sequence[Device]) -> list[int]:
    sites: list[object] = []
    for one in devices:
        if one.site not in sites:
            sites.append(one.site)
    return [sites.index(one.site) for one in devices]


def _by_split(
    portions: Portions, reports: Mapping[int, PlanReport], split_of: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, list[SplitReport]]]:
    """Of each node the set that it runs in, and the reports of the splits that each split became."""
    concurrent: dict[int, int] = {}
    found: dict[int, dict[tuple[int, int], SplitReport]] = {}
    for place, report in reports.items():
        piece = portions.pieces[place]
        for node, one in enumerate(report.nodes):
            if node not in piece.inserted:
                concurrent[piece.nodes[node]] = one.concurrent
                whole = found.setdefault(split_of[piece.nodes[node]], {})
                whole[place, one.split] = report.splits[one.split]
    return concurrent, {number: list(one.values()) for number, one in found.items()}


def _split(device: int, copies: tuple[CopyReport, ...], parts: Sequence[SplitReport]) -> SplitReport:
    return SplitReport(
        device,
        copies,
        sum(one.steps for one in parts),
        sum(one.compute_bytes for one in parts),
        sum(one.copy_us for one in parts),
        sum(one.compute_us for one in parts),
        min((one.began_us for one in parts), default=0.0),
        next((one.note for one in parts if one.note), ""),
    )


def _ways(portions: Portions, wires: Wires) -> dict[tuple[int, int], Way]:
    """By value and the portion that reads it."""
    pairs = zip(portions.crossings, wires.ways, strict=True)
    return {(one.value, one.target): way for one, way in pairs}


def _copy(copy: Copy, site_of: Sequence[int], ways: Mapping[tuple[int, int], Way]) -> CopyReport:
    way = ways.get((copy.value, site_of[copy.destination]), Way.WITHIN)
    if site_of[copy.source] == site_of[copy.destination]:
        way = Way.WITHIN
    return CopyReport(copy.value, copy.source, copy.size_bytes, copy.rows != ALL_ROWS, False, way)


def _share(
    graph: Graph,
    schedule: Schedule,
    devices: Sequence[Device],
    place: int,
    parts: Mapping[int, Sequence[SplitReport]],
) -> DeviceShare:
    sizes = dict.fromkeys(LeafKind, 0)
    for leaf, home in zip(graph.leaves, schedule.homes, strict=True):
        sizes[leaf.kind] += leaf.type.nbytes if home == place else 0
    computing = sum(
        part.compute_bytes
        for number, one in enumerate(schedule.splits)
        if one.device == place
        for part in parts.get(number, ())
    )
    made = sum(
        node.type.nbytes
        for node, one in zip(graph.nodes, schedule.assignments, strict=True)
        if one.device == place
    )
    name = devices[place].name
    return DeviceShare(name, sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE], computing, made)
