"""A plan in the DOT language, which Graphviz and many other programs read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from heliograph.explain.parts import ExplainedCopy, ExplainedPart, ExplainedSplit, host_of
from heliograph.explain.pictures.words import time_text
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Route
from heliograph_proto.types import size_text

#: Colours of devices by priority, repeating: light, and distinct for colour-blind readers.
COLOURS = ("#cfe3f7", "#fde0b8", "#cdebc9", "#f6cfe3", "#fbf3b0", "#d9d2ee", "#c9eef0", "#e3e3e3")
_COPY = 'color="#b3261e", fontcolor="#b3261e", penwidth=2'
#: Labels of the routes that are not direct.
_ROUND = {Route.RELAYED: "relayed by the head", Route.THROUGH_HEAD: "through the head"}
_SHAPES = {
    LeafKind.INPUT: 'shape=ellipse, style="filled", fillcolor="#ffffff"',
    LeafKind.WEIGHT: 'shape=box, style="filled", fillcolor="#ffffff", color="#999999"',
    LeafKind.VARIABLE: 'shape=cylinder, style="filled", fillcolor="#ffffff"',
}
_HEADER = """digraph plan {
  graph [fontname="Helvetica", fontsize=11, labeljust=l];
  node [fontname="Helvetica", fontsize=10];
  edge [fontname="Helvetica", fontsize=9];"""


def dot_text(graph: Graph, splits: Sequence[ExplainedSplit], devices: Sequence[str]) -> str:
    """The graph in the DOT language: a box for each split, in its device's colour, and one around
    those of each host; copies as labelled edges.

    Names mean themselves, whatever they contain.
    """
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(devices)}
    boxes = chain.from_iterable(_hosts(graph, splits, colours))
    return "\n".join([_HEADER, *_leaves(graph), *boxes, *_outputs(graph), *_edges(graph, splits), "}", ""])


def _leaves(graph: Graph) -> Iterator[str]:
    """The operands of a node or part."""
    read = {value for node in graph.nodes for value in node.operands} | {one.value for one in graph.outputs}
    for value, leaf in enumerate(graph.leaves):
        if value in read:
            label = _label(leaf.name, f"{leaf.kind.value} {leaf.type}")
            yield f"  v{value} [label={label}, {_SHAPES[leaf.kind]}];"


def _hosts(
    graph: Graph, splits: Sequence[ExplainedSplit], colours: Mapping[str, str]
) -> Iterator[Iterable[str]]:
    """The boxes of splits, in one for each host if there are several."""
    hosts = list(dict.fromkeys(host_of(one.device) for one in splits))
    for number, host in enumerate(hosts):
        boxes = [_box(graph, one, colours[one.device]) for one in splits if host_of(one.device) == host]
        if len(hosts) == 1:
            yield from boxes
        else:
            yield [f"  subgraph cluster_host_{number} {{"]
            yield [f'    label={_label(host or "the server")}; style=dashed; color="#444444";']
            yield from boxes
            yield ["  }"]


def _box(graph: Graph, split: ExplainedSplit, colour: str) -> Iterator[str]:
    yield f"  subgraph cluster_{split.number} {{"
    times = [f"{time_text(split.predicted_us)} predicted"] if split.predicted_us else []
    if times and split.compute_us:
        times.append(f"{time_text(split.copy_us + split.compute_us)} measured")
    lines = [f"split {split.number} on {split.device}", *([", ".join(times)] if times else [])]
    yield f'    label={_label(*lines)}; color="#999999";'
    for node in split.nodes:
        label = _label(node.name, f"{node.op} {node.type}")
        style = f'shape=box, style="rounded,filled", fillcolor="{colour}"'
        yield f"    v{len(graph.leaves) + node.number} [label={label}, {style}];"
    for part in split.parts:
        label = _label(part.name, f"{graph.nodes[part.node].op} {part.share.rows}")
        style = f'shape=box, style="rounded,filled,dashed", fillcolor="{colour}"'
        yield f"    {_part_name(part)} [label={label}, {style}];"
    yield "  }"


def _outputs(graph: Graph) -> Iterator[str]:
    for place, output in enumerate(graph.outputs):
        yield f"  o{place} [label={_label(output.name, 'output')}, shape=ellipse];"
        yield f"  v{output.value} -> o{place};"


def _edges(graph: Graph, splits: Sequence[ExplainedSplit]) -> Iterator[str]:
    """The edges from operands to nodes, through the parts of products.

    A copy is drawn to the first node of its split that reads the value, and dashed to the others.
    """
    joined = {part.node for split in splits for part in split.parts}
    for split in splits:
        nodes = {one.number for one in split.nodes}
        made_here = {len(graph.leaves) + number for number in nodes & joined}
        copies = {copy.value: copy for copy in split.copies if copy.value not in made_here}
        drawn: set[int] = set()
        whole = [(f"v{len(graph.leaves) + one.number}", one.number) for one in split.nodes]
        readers = [one for one in whole if one[1] not in joined]
        readers += [(_part_name(part), part.node) for part in split.parts]
        for reader, number in readers:
            for value in dict.fromkeys(graph.nodes[number].operands):
                style = _edge_style(copies.get(value), split.device, value in drawn)
                drawn.add(value)
                yield f"  v{value} -> {reader}{style};"
    yield from _joins(graph, splits)


def _joins(graph: Graph, splits: Sequence[ExplainedSplit]) -> Iterator[str]:
    """The edges from the parts of products to the nodes that join them."""
    split_of = {node.number: split for split in splits for node in split.nodes}
    for split in splits:
        for part in split.parts:
            value, there = len(graph.leaves) + part.node, split_of[part.node]
            copies = (one for one in there.copies if (one.value, one.source) == (value, split.device))
            style = _edge_style(next(copies, None), there.device, False)
            yield f"  {_part_name(part)} -> v{value}{style};"


def _part_name(part: ExplainedPart) -> str:
    return f"p{part.node}_{part.share.first}"


def _edge_style(copy: ExplainedCopy | None, device: str, again: bool) -> str:
    if copy is None:
        return ""
    if again:
        return f" [{_COPY}, style=dashed]"
    lines = [size_text(copy.size_bytes), f"{copy.source} to {device}"]
    lines += [_ROUND[copy.route]] if copy.route in _ROUND else []
    lines += [f"{time_text(copy.predicted_us)} predicted"] if copy.predicted_us else []
    return f" [label={_label(*lines)}, {_COPY}]"


def _label(*lines: str) -> str:
    """Quote lines of text, without Graphviz's backslashes and entities."""
    escaped = (
        line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        for line in lines
    )
    return '"{}"'.format("\\n".join(escaped))
