"""`plan.explain()`: the placement of a plan's nodes with reasons, its copies, memory and times.

print(plan.explain())
plan.explain().svg("plan.svg")
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from heliograph.explain.graphviz import dot_text, draw_svg
from heliograph.explain.parts import (
    ExplainedCopy,
    ExplainedNode,
    ExplainedPart,
    ExplainedShare,
    ExplainedSplit,
)
from heliograph.explain.perfetto import trace_events
from heliograph.explain.steps import ExplainedStep, steps_of
from heliograph.explain.tables import (
    align,
    device_table,
    edge_table,
    link_table,
    node_table,
    share_table,
    split_table,
    step_table,
    time_text,
)
from heliograph.graph.arguments import checked_timeout, counted
from heliograph.graph.atomic_files import replacing
from heliograph_proto.errors import InvalidArgumentError, ProtocolError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import (
    CopyReport,
    DeviceShare,
    LinkReport,
    NodePlacement,
    PlanReport,
    Route,
    SplitReport,
    WeightShare,
)
from heliograph_proto.types import size_text

PathArgument = str | os.PathLike[str]
T = TypeVar("T")

#: The most measured steps of a table, unless every node is shown.
MOST_STEPS = 20
#: The default timeout of drawing.
DRAW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a plan. Its text is tables of splits and devices."""

    #: In the graph's order.
    nodes: tuple[ExplainedNode, ...]
    #: In the order in which they run.
    splits: tuple[ExplainedSplit, ...]
    #: Those that it may use, by priority, and what it takes of each.
    devices: tuple[DeviceShare, ...]
    _graph: Graph = field(repr=False)
    #: The rows of split weights on each device.
    weights: tuple[ExplainedShare, ...] = ()
    #: The predicted time of a single run when the plan was made, in microseconds; 0 if unknown,
    #: since no link between the hosts of its devices was measured.
    predicted_us: float = 0.0
    #: The links between hosts that its copies take, as they were known then.
    links: tuple[LinkReport, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """Between devices, in each run."""
        return sum(split.copied_bytes for split in self.splits)

    @property
    def bytes_between_hosts(self) -> dict[str, int]:
        """Bytes that cross hosts in each run, by route: "direct", "relayed" or "through head"."""
        found: dict[str, int] = {}
        for copy in (one for split in self.splits for one in split.copies):
            if copy.route is not Route.WITHIN:
                found[str(copy.route)] = found.get(str(copy.route), 0) + copy.size_bytes
        return found

    @property
    def run_us(self) -> float:
        """The time until the last run's last split ended, in microseconds; 0 before the first
        run."""
        return max((split.ended_us for split in self.splits), default=0.0)

    @property
    def steps(self) -> tuple[ExplainedStep, ...]:
        """The steps of the measured runs, the longest first; none before a measurement.

        `plan.profile(inputs)` measures some runs, `plan.explain(measure=True)` those that follow.
        """
        return steps_of(self._graph, self.nodes)

    def step_table(self, *, most: int | None = None) -> str:
        """A table of the measured steps, or of the `most` longest; empty before a measurement."""
        found = self.steps
        return "\n".join(align(step_table(found, most))) if found else ""

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Explanation: {self.summary()}>"

    def summary(self) -> str:
        """One line."""
        names = ", ".join(dict.fromkeys(split.device for split in self.splits))
        splits, nodes = counted(len(self.splits), "split"), counted(len(self.nodes), "node")
        ran = f"; the last run took {time_text(self.run_us)}" if self.run_us else ""
        expected = f"; predicted were {time_text(self.predicted_us)}" if self.predicted_us else ""
        return f"{splits} on {names}, {nodes}, {size_text(self.copied_bytes)} copied in a run{ran}{expected}"

    def table(self, *, nodes: bool = False) -> str:
        """Tables of splits and devices; with `nodes` also of every node, with all names in full."""
        edges = edge_table(self.splits, everything=nodes)
        tables = [split_table(self.splits, everything=nodes), *([edges] if len(edges) > 1 else [])]
        tables.append(device_table(self.devices))
        if self.links:
            tables.append(link_table(self.links))
        if self.weights:
            tables.append(share_table(self.weights, everything=nodes))
        if steps := self.steps:
            tables.append(step_table(steps, None if nodes else MOST_STEPS))
        if nodes:
            tables.append(node_table(self.nodes))
        notes = self._routes()
        notes += [f"split {one.number} on {one.device}: {one.note}" for one in self.splits if one.note]
        shown = ["\n".join(align(table)) for table in tables]
        return "\n\n".join([self.summary(), *shown, *(["\n".join(notes)] if notes else [])])

    def _routes(self) -> list[str]:
        """A line about the bytes that cross hosts, if any do."""
        routes = ", ".join(f"{size_text(size)} {route}" for route, size in self.bytes_between_hosts.items())
        waits = "; copy times there include waiting for the values" if self.run_us else ""
        return [f"between hosts in a run: {routes}{waits}"] if routes else []

    def json(self) -> str:
        """Return a JSON object for programs.

        Its keys are "copied_bytes", "devices", "splits", "nodes", "weights" (the split ones),
        "predicted_us", "links" and "steps" (the measured ones). Sizes are in bytes, times in
        microseconds, bandwidths in bytes a second. Later versions may add fields; existing ones
        keep their meaning.
        """
        document = {
            "copied_bytes": self.copied_bytes,
            "devices": [asdict(one) for one in self.devices],
            "splits": [_split_as_json(one) for one in self.splits],
            "nodes": [_node_as_json(one) for one in self.nodes],
            "weights": [asdict(one) for one in self.weights],
            "predicted_us": self.predicted_us,
            "links": [asdict(one) for one in self.links],
            "steps": [_step_as_json(one) for one in self.steps],
        }
        return json.dumps(document, indent=2)

    def dot(self) -> str:
        """Return text for Graphviz: the graph with splits as boxes in their devices' colours.

        Several hosts are boxes around them; copies are labelled edges.
        """
        return dot_text(self._graph, self.splits, [one.name for one in self.devices])

    def svg(self, path: PathArgument, *, timeout: float = DRAW_SECONDS) -> None:
        """Write the graph as an SVG picture, which Graphviz draws.

        Raises ConfigurationError if Graphviz is not installed, or fails; DeadlineExceededError
        after `timeout` seconds; InvalidArgumentError if the file cannot be written.
        """
        _write(path, draw_svg(self.dot(), checked_timeout(timeout)))

    def trace(self, path: PathArgument) -> None:
        """Write the last run as a trace for ui.perfetto.dev or chrome://tracing.

        It shows when each device copied and computed, with a process for each host. Raises
        InvalidArgumentError before the first run, and if the file cannot be written.
        """
        if not self.run_us:
            raise InvalidArgumentError(
                "the plan has not run yet", advice="run it, explain it then: plan.explain().trace(path)"
            )
        document = {"displayTimeUnit": "ms", "traceEvents": trace_events(self.splits)}
        _write(path, json.dumps(document).encode())


def explanation(graph: Graph, report: PlanReport) -> Explanation:
    """Join a server's report of a plan with the names of its graph.

    Raises ProtocolError if the two do not fit together.
    """
    check_report(graph, report)
    placements = enumerate(report.nodes)
    nodes = tuple(_node(graph, report, number, placement) for number, placement in placements)
    of_split: list[list[ExplainedNode]] = [[] for _ in report.splits]
    for node in nodes:
        of_split[node.split].append(node)
    shares = tuple(_share(graph, report, one) for one in report.weights)
    parts: list[list[ExplainedPart]] = [[] for _ in report.splits]
    for one in report.parts:
        name = _name(graph, len(graph.leaves) + one.node)
        parts[one.split].append(ExplainedPart(one.node, name, shares[one.share]))
    splits = tuple(
        _split(graph, report, number, tuple(members), tuple(parts[number]))
        for number, members in enumerate(of_split)
    )
    return Explanation(nodes, splits, report.devices, graph, shares, report.predicted_us, report.links)


def _named(kind: type[T], report: Any, **named: Any) -> T:
    """The fields of a report under their own names, and `named` where it has numbers."""
    own = (one.name for one in fields(kind) if one.name not in named and hasattr(report, one.name))  # type: ignore[arg-type]
    return kind(**{name: getattr(report, name) for name in own}, **named)


def _share(graph: Graph, report: PlanReport, one: WeightShare) -> ExplainedShare:
    device = report.devices[one.device].name
    return _named(ExplainedShare, one, name=_name(graph, one.leaf), device=device)


def _node(graph: Graph, report: PlanReport, number: int, placement: NodePlacement) -> ExplainedNode:
    node = graph.nodes[number]
    why = placement.why
    if placement.names_operand:
        why += f", {_name(graph, node.operands[placement.operand])}"
    name = _name(graph, len(graph.leaves) + number)
    device = report.devices[report.splits[placement.split].device].name
    return _named(
        ExplainedNode, placement, number=number, name=name, op=node.op, type=node.type, device=device, why=why
    )


def _split(
    graph: Graph,
    report: PlanReport,
    number: int,
    nodes: tuple[ExplainedNode, ...],
    parts: tuple[ExplainedPart, ...],
) -> ExplainedSplit:
    found = report.splits[number]
    device = report.devices[found.device].name
    copies = tuple(_copy(graph, report, one) for one in found.copies)
    return _named(
        ExplainedSplit, found, number=number, device=device, nodes=nodes, copies=copies, parts=parts
    )


def _copy(graph: Graph, report: PlanReport, copy: CopyReport) -> ExplainedCopy:
    name, source = _name(graph, copy.value), report.devices[copy.source].name
    return _named(ExplainedCopy, copy, name=name, type=graph.type_of(copy.value), source=source)


def _name(graph: Graph, value: int) -> str:
    leaves = len(graph.leaves)
    if value < leaves:
        return graph.leaves[value].name
    node = graph.nodes[value - leaves]
    return node.name or f"{node.op}_{value - leaves}"


# Reports are not trusted


def check_report(graph: Graph, report: PlanReport) -> None:
    """Raises ProtocolError unless the report is of a plan of this graph."""
    splits_fit = all(_split_fits(graph, report, one) for one in report.splits)
    routes = (number for one in report.links for number in (one.round_trip_us, one.bytes_per_s))
    times_fit = _are_times(report.predicted_us, *routes)
    if not (_nodes_fit(graph, report) and splits_fit and _shares_fit(graph, report) and times_fit):
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


# Files


def _write(path: PathArgument, data: bytes) -> None:
    with replacing(Path(path)) as part:
        part.write_bytes(data)


def _split_as_json(one: ExplainedSplit) -> dict[str, Any]:
    parts = [{"node": part.node, "first": part.share.first, "count": part.share.count} for part in one.parts]
    copies = [_as_json(copy, route=str(copy.route)) for copy in one.copies]
    return _as_json(one, nodes=[node.number for node in one.nodes], parts=parts, copies=copies)


def _step_as_json(one: ExplainedStep) -> dict[str, Any]:
    rates = {"flops_per_s": one.flops_per_s, "bytes_per_s": one.bytes_per_s}
    nodes = [node.number for node in one.nodes]
    return _as_json(one, nodes=nodes, name=one.name, ops=one.ops, device=one.device, **rates)


def _node_as_json(one: ExplainedNode) -> dict[str, Any]:
    return _as_json(one, type=one.type.dtype.name, shape=one.type.shape, cause=str(one.cause))


def _as_json(one: Any, **others: Any) -> dict[str, Any]:
    """The fields of a dataclass by name without its type, and `others` instead or besides."""
    names = (field.name for field in fields(one) if field.name != "type")
    return {name: getattr(one, name) for name in names} | others
