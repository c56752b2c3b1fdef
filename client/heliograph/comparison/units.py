"""A graph split into units: each node by itself, with the views in front of it. Pure.

Variables are replaced first, by a new input or by the value assigned last. A unit therefore writes
no state, and computing it twice gives the same. Weights that are bound to tensors are inputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import TensorType


@dataclass(frozen=True, slots=True)
class ComparedUnit:
    """A computing node as a graph of its own, whose inputs are other values."""

    #: The node's number in the whole graph.
    number: int
    node: Node
    operands: tuple[TensorType, ...]
    #: The values of the whole graph that are its inputs, in order.
    inputs: tuple[int, ...]
    #: The node behind its views, with one output.
    graph: Graph
    #: Equal for units whose graphs are equal but for names.
    key: Hashable


def without_variables(graph: Graph) -> Graph:
    """The same values under the same numbers, without state: an assignment is a view of its
    value."""
    leaves = _as_inputs(graph.leaves)
    #: For an assignment, and for a variable that was assigned: the value.
    same: dict[int, int] = {}
    nodes = []
    for number, node in enumerate(graph.nodes, len(leaves)):
        operands = tuple(same.get(value, value) for value in node.operands)
        if node.op == "assign":
            same[node.operands[0]] = same[number] = operands[1]
            nodes.append(Node("reshape", operands[1:], node.type, {"shape": node.type.shape}, node.name))
        else:
            nodes.append(replace(node, operands=operands))
    outputs = tuple(Output(one.name, same.get(one.value, one.value)) for one in graph.outputs)
    return Graph(leaves, tuple(nodes), outputs)


def _as_inputs(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    taken = {leaf.name for leaf in leaves if leaf.kind is LeafKind.INPUT}
    found = []
    for leaf in leaves:
        if leaf.kind is not LeafKind.INPUT and not leaf.digest:
            name = leaf.name
            while name in taken:
                name += "_"
            taken.add(name)
            leaf = Leaf(LeafKind.INPUT, name, leaf.type)
        found.append(leaf)
    return tuple(found)


def units(graph: Graph) -> Iterator[ComparedUnit]:
    """Each node that is not a view, in order."""
    for number, node in enumerate(graph.nodes):
        if not OPS[node.op].is_view:
            yield _unit(graph, number)


def last_uses(found: Sequence[ComparedUnit]) -> dict[int, int]:
    """The place of the last unit that takes each value."""
    return {value: place for place, unit in enumerate(found) for value in unit.inputs}


def with_outputs(graph: Graph, chosen: Sequence[int]) -> Graph:
    """The graph with these nodes as its only outputs, named by their numbers."""
    first = len(graph.leaves)
    return replace(graph, outputs=tuple(Output(str(number), first + number) for number in chosen))


def _unit(graph: Graph, number: int) -> ComparedUnit:
    first = len(graph.leaves)
    inputs: list[int] = []
    members = _members(graph, first + number, inputs.append)
    places = {value: place for place, value in enumerate((*inputs, *members))}
    leaves = tuple(
        Leaf(LeafKind.INPUT, f"x{place}", graph.type_of(value)) for place, value in enumerate(inputs)
    )
    nodes = tuple(
        replace(node, operands=tuple(places[value] for value in node.operands))
        for node in (graph.nodes[value - first] for value in members)
    )
    node = graph.nodes[number]
    return ComparedUnit(
        number,
        node,
        tuple(map(graph.type_of, node.operands)),
        tuple(inputs),
        Graph(leaves, nodes, (Output("y", len(leaves) + len(nodes) - 1),)),
        _key(leaves, nodes),
    )


def _members(graph: Graph, value: int, add_input: Callable[[int], Any]) -> list[int]:
    """The value and the views between it and what others compute, each behind its operands."""
    first = len(graph.leaves)
    seen: set[int] = set()
    members: list[int] = []
    pending = [(value, False)]
    while pending:
        current, done = pending.pop()
        if done:
            members.append(current)
        elif current not in seen:
            seen.add(current)
            if current != value and (current < first or not OPS[graph.nodes[current - first].op].is_view):
                add_input(current)
                continue
            pending.append((current, True))
            pending += [(operand, False) for operand in reversed(graph.nodes[current - first].operands)]
    return members


def _key(leaves: Sequence[Leaf], nodes: Sequence[Node]) -> Hashable:
    # As text, so that 0.0 is not -0.0.
    attributes = [tuple(sorted((name, repr(one)) for name, one in node.attributes.items())) for node in nodes]
    types = tuple(leaf.type for leaf in leaves)
    return types, tuple((node.op, node.operands, one) for node, one in zip(nodes, attributes, strict=True))
