"""Reports of plans are not trusted: whether one fits its graph. Pure."""

from __future__ import annotations

import math

from heliograph_proto.errors import ProtocolError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanReport, SplitReport

#: The most bytes of a block.
_MOST_BYTES = 2**56


def check_report(graph: Graph, report: PlanReport) -> None:
    """Raises ProtocolError unless the report is of a plan of this graph."""
    splits_fit = all(_split_fits(graph, report, one) for one in report.splits)
    routes = (number for one in report.links for number in (one.round_trip_us, one.bytes_per_s))
    times_fit = _are_times(report.predicted_us, *routes)
    parts_fit = _nodes_fit(graph, report) and splits_fit and _shares_fit(graph, report)
    if not (parts_fit and times_fit and _memory_fits(graph, report)):
        raise ProtocolError(
            "the server's explanation does not fit the plan's graph",
            advice="compile the graph anew, and explain that plan",
        )


def _nodes_fit(graph: Graph, report: PlanReport) -> bool:
    if len(report.nodes) != len(graph.nodes):
        return False
    return all(
        one.split < len(report.splits)
        and _are_times(one.step_us)
        and (one.operand < len(node.operands) or not one.names_operand)
        for node, one in zip(graph.nodes, report.nodes, strict=True)
    )


def _split_fits(graph: Graph, report: PlanReport, split: SplitReport) -> bool:
    devices, values = len(report.devices), len(graph.leaves) + len(graph.nodes)
    return (
        split.device < devices
        and all(copy.source < devices and copy.value < values for copy in split.copies)
        and _are_times(split.copy_us, split.compute_us, split.began_us)
        and _are_times(split.predicted_copy_us, split.predicted_compute_us, split.predicted_began_us)
        and _are_times(*(copy.predicted_us for copy in split.copies))
    )


def _are_times(*times: float) -> bool:
    return all(0 <= time < math.inf for time in times)


def _shares_fit(graph: Graph, report: PlanReport) -> bool:
    devices, leaves, nodes = len(report.devices), len(graph.leaves), len(graph.nodes)
    splits, shares = len(report.splits), len(report.weights)
    return all(one.leaf < leaves and one.device < devices for one in report.weights) and all(
        one.node < nodes and one.split < splits and one.share < shares for one in report.parts
    )


def _memory_fits(graph: Graph, report: PlanReport) -> bool:
    values = len(graph.leaves) + len(graph.nodes)
    sizes = [one.size_bytes for one in report.blocks]
    # A result lies in one place, and in one more for each copy; parts of products have their own.
    # Each host of a plan has those that it reads of others, and may compute some again.
    hosts = max(1, len(report.devices))
    copies = sum(len(one.copies) for one in report.splits)
    # Divided weights make several nodes of one.
    steps = sum(one.memory_steps for one in report.splits)
    most = hosts * (4 * (len(graph.nodes) + len(report.parts)) + len(report.splits))
    return (
        steps <= most
        and all(one.device < len(report.devices) and one.size_bytes <= _MOST_BYTES for one in report.blocks)
        and len(report.stored) <= 2 * hosts * (values + copies + len(report.parts))
        and all(
            one.value < values
            and one.block < len(sizes)
            and one.offset_bytes + one.size_bytes <= sizes[one.block]
            and one.first_step <= one.last_step < steps
            for one in report.stored
        )
    )
