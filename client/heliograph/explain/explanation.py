"""`plan.explain()`: the placement of a plan's nodes with reasons, its copies, memory and times.

print(plan.explain())
plan.explain().html("plan.html")
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heliograph.explain.graphviz import dot_text
from heliograph.explain.parts import (
    ExplainedBlock,
    ExplainedCopy,
    ExplainedNode,
    ExplainedPart,
    ExplainedShare,
    ExplainedSplit,
    ExplainedValue,
)
from heliograph.explain.perfetto import trace_events
from heliograph.explain.pictures.words import time_text
from heliograph.explain.report_checks import check_report
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
)
from heliograph.graph.arguments import counted
from heliograph.graph.files.atomic_files import replacing
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import (
    CopyReport,
    DeviceShare,
    LinkReport,
    NodePlacement,
    PlanReport,
    Route,
    WeightShare,
)
from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from heliograph.explain.compared import ComparedPlans

PathArgument = str | os.PathLike[str]
T = TypeVar("T")

#: The most measured steps of a table, unless every node is shown.
MOST_STEPS = 20
#: The title of a picture.
TITLE = "Plan"


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
    #: The memory that a run computes in, and the values there; empty if the server does not tell.
    blocks: tuple[ExplainedBlock, ...] = ()
    stored: tuple[ExplainedValue, ...] = ()

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
    def _tells_memory(self) -> bool:
        """True if it is known where results lie in memory."""
        return any(split.memory_steps for split in self.splits)

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

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph.explain.notebook_view import explanation_view

        return explanation_view(self)

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
        "predicted_us", "links", "steps" (the measured ones), "blocks" and "stored" (the memory that
        a run computes in, and the values there). Sizes are in bytes, times in microseconds,
        bandwidths in bytes a second. Later versions may add fields; existing ones keep their
        meaning.
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
            "blocks": [_as_json(one, use=str(one.use)) for one in self.blocks],
            "stored": [asdict(one) for one in self.stored],
        }
        return json.dumps(document, indent=2)

    def dot(self) -> str:
        """Return the graph in the DOT language, for Graphviz and other programs that read it.

        Splits are boxes in their devices' colours, hosts boxes around them; copies are labelled
        edges.
        """
        return dot_text(self._graph, self.splits, [one.name for one in self.devices])

    def svg(self, path: PathArgument, *, title: str = TITLE, unfold: int | None = None) -> None:
        """Write the graph as an SVG picture: scopes are boxes.

        `unfold` is the number of levels of scopes that are open; by default as many as show about
        60 boxes. Raises InvalidArgumentError if the file cannot be written.
        """
        from heliograph.explain.picturing import svg_of

        if unfold is not None and not unfold >= 0:
            raise InvalidArgumentError(f"unfold is {unfold}", advice="the number of levels, 0 or more")
        _write(path, svg_of(self, self._graph, title, unfold).encode())

    def memory_svg(self, path: PathArgument, *, title: str = TITLE) -> None:
        """Write the memory of a run over its steps as an SVG picture.

        Of a plan over several hosts each device has its part. Raises InvalidArgumentError if the
        server does not tell where results lie, and if the file cannot be written.
        """
        from heliograph.explain.pictures.memory import memory_svg
        from heliograph.explain.picturing import memory_of

        if not self._tells_memory:
            raise InvalidArgumentError(
                "the server does not tell where the plan's results lie in memory",
                advice="its hosts may be of an older version",
            )
        _write(path, memory_svg(memory_of(self, title)).encode())

    def html(self, path: PathArgument, *, title: str = TITLE) -> None:
        """Write the plan as a page in one file, which needs no network: its graph with scopes that
        fold, its memory, and its tables.

        Raises InvalidArgumentError if the file cannot be written.
        """
        from heliograph.explain.picturing import page_of

        _write(path, page_of(self, self._graph, title).encode())

    def compare(self, other: Explanation, *, tolerance: float = 0.1) -> ComparedPlans:
        """Return the nodes that differ from those of another plan, by name: in device, time, memory
        or fusion.

        Times differ by more than `tolerance`, a share of the shorter one, and are compared if both
        plans have the same kind: measured steps, last runs, or predictions. Steps are known after a
        run. Raises InvalidArgumentError.
        """
        from heliograph.explain.compared import compare

        return compare(self, other, tolerance)

    def trace(self, path: PathArgument) -> None:
        """Write the last run as a trace for ui.perfetto.dev or chrome://tracing.

        It shows when each device copied and computed, with a process for each host. Raises
        InvalidArgumentError before the first run, and if the file cannot be written.
        """
        if not self.run_us:
            raise InvalidArgumentError(
                "the plan has not run yet", advice="run it, explain it then: plan.explain().trace(path)"
            )
        document = {"displayTimeUnit": "ms", "traceEvents": trace_events(self)}
        _write(path, json.dumps(document).encode())


def explanation(
    graph: Graph, report: PlanReport, source_of: Callable[[int], str] = lambda _: ""
) -> Explanation:
    """Join a server's report of a plan with the names of its graph, and the line of code that built
    each node, by number.

    Raises ProtocolError if the two do not fit together.
    """
    check_report(graph, report)
    placements = enumerate(report.nodes)
    nodes = tuple(_node(graph, report, number, one, source_of(number)) for number, one in placements)
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
    blocks = tuple(
        ExplainedBlock(report.devices[one.device].name, one.size_bytes, one.use) for one in report.blocks
    )
    stored = tuple(_named(ExplainedValue, one, name=_name(graph, one.value)) for one in report.stored)
    predicted = report.predicted_us, report.links
    return Explanation(nodes, splits, report.devices, graph, shares, *predicted, blocks, stored)


def _named(kind: type[T], report: Any, **named: Any) -> T:
    """The fields of a report under their own names, and `named` where it has numbers."""
    own = (one.name for one in fields(kind) if one.name not in named and hasattr(report, one.name))  # type: ignore[arg-type]
    return kind(**{name: getattr(report, name) for name in own}, **named)


def _share(graph: Graph, report: PlanReport, one: WeightShare) -> ExplainedShare:
    device = report.devices[one.device].name
    return _named(ExplainedShare, one, name=_name(graph, one.leaf), device=device)


def _node(
    graph: Graph, report: PlanReport, number: int, placement: NodePlacement, source: str
) -> ExplainedNode:
    node = graph.nodes[number]
    why = placement.why
    if placement.names_operand:
        why += f", {_name(graph, node.operands[placement.operand])}"
    name = _name(graph, len(graph.leaves) + number)
    device = report.devices[report.splits[placement.split].device].name
    named = {"number": number, "name": name, "op": node.op, "type": node.type}
    return _named(ExplainedNode, placement, **named, device=device, why=why, source=source)


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
