"""The splits of a schedule as graphs of their own."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, reordered
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
    devices = {split.device for split in schedule.splits}
    return tuple(part for _, part in parts_on(graph, schedule, devices))


def parts_on(graph: Graph, schedule: Schedule, devices: Container[int]) -> Iterator[tuple[int, Part]]:
    """The parts of some devices, each with its device, in order."""
    # A copy that an earlier split of the same device made is read as well.
    copied: dict[int, set[int]] = {}
    for split in schedule.splits:
        if split.device in devices:
            here = copied.setdefault(split.device, set())
            here.update(copy.value for copy in split.copies)
            yield split.device, _part(graph, split, here)


def in_order(part: Part, order: Sequence[int]) -> Part:
    """The part with its nodes in the order that its device wants: numbers of the part."""
    if list(order) == list(range(len(part.nodes))):
        return part
    nodes = tuple(part.nodes[number] for number in order)
    return replace(part, graph=reordered(part.graph, order), nodes=nodes)


def _part(graph: Graph, split: Split, copied: Set[int]) -> Part:
    leaves: list[Leaf] = []
    inputs: list[int] = []
    bound: list[tuple[int, int]] = []
    for place, value in enumerate(split.inputs):
        leaf = graph.leaves[value] if value < len(graph.leaves) else None
        if leaf is None or leaf.kind is LeafKind.INPUT or value in copied:
            inputs.append(value)
            leaves.append(Leaf(LeafKind.INPUT, f"value {value}", graph.type_of(value)))
        else:
            bound.append((place, value))
            leaves.append(Leaf(leaf.kind, f"leaf {value}", leaf.type, leaf.digest))
    renumbered = {value: number for number, value in enumerate(split.inputs)}
    nodes = _nodes(graph, split, renumbered)
    outputs = tuple(Output(f"value {value}", renumbered[value]) for value in split.outputs)
    made = Graph(tuple(leaves), nodes, outputs)
    return Part(made, tuple(inputs), split.outputs, tuple(bound), split.nodes)


def _nodes(graph: Graph, split: Split, renumbered: dict[int, int]) -> tuple[Node, ...]:
    """The split's nodes; their values are added to `renumbered`: those so far, in the part's numbers."""
    nodes: list[Node] = []
    for value, number in enumerate(split.nodes, len(split.inputs)):
        node = graph.nodes[number]
        renumbered[len(graph.leaves) + number] = value
        operands = tuple([renumbered[operand] for operand in node.operands])
        nodes.append(Node(node.op, operands, node.type, node.attributes, node.name))
    return tuple(nodes)
