"""Which nodes share one step: elementwise chains, a matrix product with what follows it, a norm with
its weight and bias.

A group has one result, that of its last node, and runs where that node stands; so a node joins the
group of a producer only if nobody else needs the producer's value, and never across an assignment,
since that would move a read of a variable behind a write. Fusion changes no bits: every kernel rounds
after each op, as the ops by themselves do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from heliograph_backends.planning.layout import Place
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType

#: What a node can be in a group; "other": it is always a step by itself.
Role: TypeAlias = Literal["elementwise", "matmul", "norm", "other"]


class Kernels(Protocol):
    """What a device can run as one step."""

    def role(self, number: int) -> Role:
        """What a node can be in a group."""

    def is_row_operand(self, value: int) -> bool:
        """Whether norms can take this value as their weight or bias."""


#: Keeps a chain's operands and temporaries in the first-level cache: a group is a tree of nodes with at
#: most two operands each, so it reads at most one value more than it has nodes.
MAX_NODES = 12


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that run as one step, by number, in order; the last one's value is the result."""

    role: Role
    nodes: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.nodes[-1]


def needed_nodes(graph: Graph) -> list[bool]:
    """Which nodes matter: those that an output or an assignment depends on."""
    count = len(graph.leaves)
    needed = [node.op == "assign" for node in graph.nodes]
    for output in graph.outputs:
        if output.value >= count:
            needed[output.value - count] = True
    for number in range(len(graph.nodes) - 1, -1, -1):
        if needed[number]:
            for value in graph.nodes[number].operands:
                if value >= count:
                    needed[value - count] = True
    return needed


def group_nodes(
    graph: Graph, places: tuple[Place, ...], kernels: Kernels, *, fusion: bool
) -> tuple[Group, ...]:
    """The steps of a graph, in the order in which they run. Views that move nothing have none."""
    grouping = _Grouping(graph, places, kernels)
    needed = needed_nodes(graph)
    for number, node in enumerate(graph.nodes):
        value = len(graph.leaves) + number
        if not needed[number] or (places[value].root != value and node.op != "assign"):
            continue
        grouping.add(number, fusion=fusion)
    return grouping.finish()


class _Grouping:
    """Groups under construction. `open` maps a value to the group whose result it is."""

    def __init__(self, graph: Graph, places: tuple[Place, ...], kernels: Kernels) -> None:
        self.graph = graph
        self.places = places
        self.kernels = kernels
        self.leaves = len(graph.leaves)
        self.uses = _count_uses(graph)
        self.open: dict[int, Group] = {}
        self.closed: list[Group] = []

    def add(self, number: int, *, fusion: bool) -> None:
        node = self.graph.nodes[number]
        role = self.kernels.role(number)
        group = Group(role, (number,))
        if fusion and role == "elementwise":
            group = self._joined(number)
        if node.op == "assign":
            self.closed.extend(self.open.values())
            self.open.clear()
        self.open[self.leaves + number] = group

    def finish(self) -> tuple[Group, ...]:
        groups = [*self.closed, *self.open.values()]
        return tuple(sorted(groups, key=lambda group: group.last))

    def _joined(self, number: int) -> Group:
        """The node with the groups of its producers, as far as they may join."""
        joined = Group("elementwise", (number,))
        for value in dict.fromkeys(self.graph.nodes[number].operands):
            producer = self.open.get(value)
            if producer is None or not self._may_join(number, value, producer):
                continue
            merged = self._merge(joined, producer)
            if merged is not None:
                joined = merged
                del self.open[value]
        return joined

    def _may_join(self, number: int, value: int, producer: Group) -> bool:
        node = self.graph.nodes[number]
        if producer.role == "other" or self.uses[value] != node.operands.count(value):
            return False
        return self.graph.type_of(value) == node.type

    def _merge(self, group: Group, producer: Group) -> Group | None:
        """Both groups as one, or None if no kernel runs that."""
        roles = {group.role, producer.role} - {"elementwise"}
        if len(roles) > 1 or (group.role == producer.role != "elementwise"):
            return None
        nodes = tuple(sorted({*group.nodes, *producer.nodes}))
        if len(nodes) > MAX_NODES:
            return None
        merged = Group(roles.pop() if roles else "elementwise", nodes)
        if merged.role == "norm" and not is_affine_norm(self.graph, nodes, self.kernels):
            return None
        return merged


def _count_uses(graph: Graph) -> Counter[int]:
    """How often each value is read. A view's reads of its source count too, as do outputs."""
    uses: Counter[int] = Counter()
    for node in graph.nodes:
        uses.update(node.operands)
    uses.update(output.value for output in graph.outputs)
    return uses


def is_affine_norm(graph: Graph, nodes: tuple[int, ...], kernels: Kernels) -> bool:
    """Whether the nodes are norm or rms_norm, then a product with a row, then perhaps a sum with one."""
    first, *rest = (graph.nodes[number] for number in nodes)
    expected = {"norm": ["mul", "add"], "rms_norm": ["mul"]}.get(first.op, [])
    if [node.op for node in rest] != expected[: len(rest)]:
        return False
    value = len(graph.leaves) + nodes[0]
    for number, node in zip(nodes[1:], rest, strict=True):
        row = other_operand(node.operands, value)
        if value not in node.operands or row == value:
            return False
        if not is_row(graph.type_of(row), node.type) or not kernels.is_row_operand(row):
            return False
        value = len(graph.leaves) + number
    return True


def other_operand(operands: tuple[int, ...], value: int) -> int:
    """The operand of a two-operand node that is not `value` (or `value`, if both are)."""
    return operands[1] if operands[0] == value else operands[0]


def is_row(found: TensorType, target: TensorType) -> bool:
    """Whether a tensor is one row that repeats over all rows of the target."""
    return found.ndim > 0 and found.shape[-1] == target.shape[-1] and found.size == found.shape[-1]
