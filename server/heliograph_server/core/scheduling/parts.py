"""The splits of a schedule as graphs of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_server.core.scheduling.model import Schedule, Split


@dataclass(frozen=True, slots=True)
class Part:
    """A split as a graph. Values of the whole graph stand behind its inputs, outputs and bound leaves."""

    graph: Graph
    #: The value behind each input, in order.
    inputs: tuple[int, ...]
    #: The value behind each output, in order.
    outputs: tuple[int, ...]
    #: Weights and variables that its device reads in place: the part's leaf to the whole graph's value.
    bound: tuple[tuple[int, int], ...]
    #: The whole graph's number of each node.
    nodes: tuple[int, ...]


def cut(graph: Graph, schedule: Schedule) -> tuple[Part, ...]:
    """One part for each split."""
    return tuple(_part(graph, schedule, one) for one in schedule.splits)


def _part(graph: Graph, schedule: Schedule, split: Split) -> Part:
    copied = {copy.value for copy in split.copies}
    leaves: list[Leaf] = []
    inputs: list[int] = []
    bound: list[tuple[int, int]] = []
    for value in split.inputs:
        in_place = value < len(graph.leaves) and value not in copied
        if in_place and graph.leaves[value].kind is not LeafKind.INPUT:
            bound.append((len(leaves), value))
            leaves.append(replace(graph.leaves[value], name=f"leaf {value}"))
        else:
            inputs.append(value)
            leaves.append(Leaf(LeafKind.INPUT, f"value {value}", graph.type_of(value)))
    renumbered = {value: number for number, value in enumerate(split.inputs)}
    nodes: list[Node] = []
    for number in split.nodes:
        node = graph.nodes[number]
        renumbered[len(graph.leaves) + number] = len(leaves) + len(nodes)
        nodes.append(replace(node, operands=tuple(renumbered[value] for value in node.operands)))
    outputs = tuple(Output(f"value {value}", renumbered[value]) for value in split.outputs)
    made = Graph(tuple(leaves), tuple(nodes), outputs)
    return Part(made, tuple(inputs), split.outputs, tuple(bound), split.nodes)
