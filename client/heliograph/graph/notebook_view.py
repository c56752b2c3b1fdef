"""A graph in a notebook: its leaves, its outputs, and its nodes by op."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from heliograph.graph.arguments import counted
from heliograph.notebook.elements import Markup, bar, card, folded, heading, note, table
from heliograph_proto.graph import Leaf, LeafKind
from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from heliograph.graph.builder import Graph

#: The most ops with a bar.
MOST_OPS = 8


def graph_view(graph: Graph) -> str:
    """The graph as HTML. Its elements are not read, and nothing is computed."""
    leaves, nodes = graph._leaves, graph._nodes
    weights = [one for one in leaves if one.kind is LeafKind.WEIGHT]
    total = sum(one.type.nbytes for one in leaves if one.kind is not LeafKind.INPUT)
    outputs = [(name, value.type.dtype.name, value.shape) for name, value in graph.outputs.items()]
    summary = f"{counted(len(nodes), 'node')}, {counted(len(weights), 'weight')}, {size_text(total)}"
    return card(
        f"Graph: {summary}",
        _leaves("inputs", leaves, LeafKind.INPUT),
        *([heading("outputs"), table(("name", "type", "shape"), outputs)] if outputs else []),
        _leaves("variables", leaves, LeafKind.VARIABLE),
        _ops(Counter(one.op for one in nodes)),
        folded(counted(len(weights), "weight"), _leaves("", leaves, LeafKind.WEIGHT)),
        *([] if outputs else [note("no output yet: g.output('y', value) names one")]),
    )


def _leaves(title: str, leaves: list[Leaf], kind: LeafKind) -> Markup:
    rows = [
        (one.name, one.type.dtype.name, one.type.shape, size_text(one.type.nbytes))
        for one in leaves
        if one.kind is kind
    ]
    shown = table(("name", "type", "shape", "size"), rows)
    return Markup((heading(title) if title and rows else "") + shown)


def _ops(counts: Counter[str]) -> Markup:
    """The most frequent ops with a bar each."""
    if not counts:
        return Markup("")
    most = max(counts.values())
    rows = [(op, bar(count / most, f"{count:,}")) for op, count in counts.most_common(MOST_OPS)]
    left = len(counts) - len(rows)
    more = note(f"and {counted(left, 'other op')}") if left > 0 else Markup("")
    return Markup(heading("nodes by op") + table(("op", "nodes"), rows) + more)
