"""Explanations as pictures: what `pictures` draws of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from heliograph.explain.pictures.drawing import svg_text
from heliograph.explain.pictures.memory import MemoryPicture, memory_svg
from heliograph.explain.pictures.model import Picture, PictureLeaf, PictureNode, Timing
from heliograph.explain.pictures.page import Panel, linked_table, page, table
from heliograph.explain.pictures.scene import Scene, opened, scene_of
from heliograph.explain.pictures.words import time_text
from heliograph.explain.tables import device_table, edge_table, split_table
from heliograph_proto.graph import Graph
from heliograph_proto.ops.table import OPS
from heliograph_proto.ops.work import flops_of, read_bytes
from heliograph_proto.plans import Route
from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from heliograph.explain.compared import ComparedPlans
    from heliograph.explain.explanation import Explanation
    from heliograph.explain.parts import ExplainedCopy, ExplainedNode

#: The most rows of differences on a page.
MOST_PAGE_ROWS = 2000
#: The operations that take the time of a byte, where times of nodes are shared out by work.
_FLOPS_A_BYTE = 8.0


def picture_of(found: Explanation, graph: Graph, title: str) -> Picture:
    """Return an explained plan as a picture."""
    timing, times = times_of(found, graph)
    places = {one.name: place for place, one in enumerate(found.devices)}
    together: dict[tuple[int, int], int] = {}
    for one in found.nodes:
        together[one.split, one.step] = together.get((one.split, one.step), 0) + 1
    nodes = tuple(
        PictureNode(
            one.name,
            one.op,
            str(one.type),
            graph.nodes[one.number].operands,
            places[one.device],
            one.split,
            one.why,
            one.type.nbytes,
            took,
            one.step,
            together[one.split, one.step] if one.step else 0,
            one.source,
            OPS[one.op].is_view,
        )
        for one, took in zip(found.nodes, times, strict=True)
    )
    leaves = tuple(
        PictureLeaf(one.kind.value, one.name, str(one.type), one.type.nbytes) for one in graph.leaves
    )
    outputs = tuple((one.name, one.value) for one in graph.outputs)
    copies = {
        (copy.value, places[split.device]): _copied(copy, split.device)
        for split in found.splits
        for copy in split.copies
    }
    return Picture(title, found.summary(), leaves, nodes, outputs, tuple(places), timing, copies)


def _copied(copy: ExplainedCopy, device: str) -> str:
    """Words about a copy."""
    route = "" if copy.route is Route.WITHIN else f", {copy.route}"
    took = f", {time_text(copy.predicted_us)} predicted" if copy.predicted_us else ""
    return f"{copy.label}: {size_text(copy.size_bytes)} from {copy.source} to {device}{route}{took}"


def times_of(found: Explanation, graph: Graph) -> tuple[Timing, list[float]]:
    """Return the time of each node in microseconds, or its work, and what it is."""
    work = [_work(graph, number) for number in range(len(graph.nodes))]
    if any(one.step_us for one in found.nodes):
        return "measured", _measured(found.nodes, work)
    ran = any(split.compute_us for split in found.splits)
    took = [split.compute_us if ran else split.predicted_compute_us for split in found.splits]
    if not any(took):
        return "work", work
    return "run" if ran else "predicted", _shared(found.nodes, work, took)


def _measured(nodes: Sequence[ExplainedNode], work: Sequence[float]) -> list[float]:
    """The time of each step, divided over its nodes by their work."""
    whole: dict[tuple[int, int], float] = {}
    for node in nodes:
        if node.step:
            key = node.split, node.step
            whole[key] = whole.get(key, 0.0) + work[node.number]
    return [
        node.step_us * (work[node.number] / whole[node.split, node.step] if node.step else 1.0)
        for node in nodes
    ]


def _shared(nodes: Sequence[ExplainedNode], work: Sequence[float], took: Sequence[float]) -> list[float]:
    """The time of each split, divided over its nodes by their work."""
    whole = [0.0] * len(took)
    for node in nodes:
        whole[node.split] += work[node.number]
    return [took[node.split] * work[node.number] / (whole[node.split] or 1.0) for node in nodes]


def _work(graph: Graph, number: int) -> float:
    """The work of a node, in bytes: those that it reads and writes, or its operations where these
    take longer. A view has next to none."""
    node = graph.nodes[number]
    if OPS[node.op].is_view:
        return 1e-9
    types = [graph.type_of(value) for value in node.operands]
    moved = sum(read_bytes(node.op, types, node.type)) + node.type.nbytes
    return max(float(moved), flops_of(node.op, types, node.type) / _FLOPS_A_BYTE, 1e-9)


# Files


def svg_of(found: Explanation, graph: Graph, title: str, unfold: int | None) -> str:
    """Return a plan as an SVG document with some levels of scopes open."""
    scene = scene_of(picture_of(found, graph, title))
    return svg_text(scene, opened(scene, unfold))


def memory_of(found: Explanation, title: str) -> MemoryPicture:
    """Return the memory of a plan."""
    lasting = tuple(
        (
            one.name,
            (
                ("weights", one.weights_bytes),
                ("variables", one.variables_bytes),
                ("for computing", one.compute_bytes),
            ),
        )
        for one in found.devices
    )
    begins = (0, *accumulate(split.memory_steps for split in found.splits[:-1]))
    return MemoryPicture(title, found.blocks, found.stored, lasting, begins)


def page_of(found: Explanation, graph: Graph, title: str) -> str:
    """Return a plan as a page: its graph, its memory, and its tables."""
    scene = scene_of(picture_of(found, graph, title))
    return page(title, found.summary(), [scene], [_memory(found, title), _tables(found)])


def page_of_two(compared: ComparedPlans, titles: Sequence[str]) -> str:
    """Return two plans side by side as a page, with the nodes that differ."""
    sides = (compared.a, compared.b)
    scenes: list[Scene] = [
        scene_of(picture_of(one, one._graph, title)) for one, title in zip(sides, titles, strict=True)
    ]
    panels = [Panel("Differences", _differences(compared))]
    panels += [_memory(one, title, f"Memory: {title}") for one, title in zip(sides, titles, strict=True)]
    marked = [
        [side.node.number for side in those if side is not None]
        for those in zip(*((one.a, one.b) for one in compared.differences), strict=True)
    ]
    return page(f"{titles[0]} and {titles[1]}", compared.summary(), scenes, panels, marked)


def _memory(found: Explanation, title: str, name: str = "Memory") -> Panel:
    drawn = memory_svg(memory_of(found, title), alone=False)
    told = "" if found._tells_memory else "<p>The server does not tell where results lie in memory.</p>"
    devices = table(device_table(found.devices), "Memory of devices")
    return Panel(name, f'{told}<div class="charts">{drawn}</div>{devices}')


def _tables(found: Explanation) -> Panel:
    edges = edge_table(found.splits)
    tables = [table(split_table(found.splits), "Splits")]
    if len(edges) > 1:
        tables.append(table(edges, "Values between hosts"))
    return Panel("Splits", "".join(tables))


def _differences(compared: ComparedPlans) -> str:
    whole = table(compared.whole_table(), "The plans as a whole")
    rows = compared.node_table(MOST_PAGE_ROWS)
    numbers = [
        ",".join("" if side is None else str(side.node.number) for side in (one.a, one.b))
        for one in compared.differences[:MOST_PAGE_ROWS]
    ]
    return whole + (linked_table(rows, numbers, "Nodes that differ") if numbers else "")
