"""Which times of a plan's runs are recorded, so that they decide where others are placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heliograph_backends.contract import Device
from heliograph_proto.graph import Graph
from heliograph_server.compile.candidates import kinds_of
from heliograph_server.compile.placement import Placement
from heliograph_server.resources.measurements import Recorder, TenantTimes, op_kinds


def recorder_of(
    times: TenantTimes, everyone: Sequence[Device], graph: Graph, placement: Placement
) -> Recorder | None:
    """What takes the times of a plan, where that helps to place others: on devices of several sites."""
    if not any(one.site_name for one in everyone):
        return None
    kinds = kinds_of(graph).of
    if placement.schedule is None:
        parts: list[tuple[Device, Iterable[int]]] = [(placement.main, range(len(kinds)))]
    else:
        parts = [(placement.devices[one.device], one.nodes) for one in placement.schedule.splits]
    trips = [times.host.round_trip_s(device.site_name) * 1e6 for device, _ in parts]
    return Recorder(times, [(device.name, op_kinds(graph, nodes, kinds)) for device, nodes in parts], trips)
