"""Fusion of nodes into steps: elementwise chains, a matrix product with its elementwise epilogue, a
norm with its weight and bias, windows of images with an elementwise epilogue.

Chains may have several data types if the values between their nodes have four bytes an element, or
are truth values; products and windows take f32 alone.

A group has one result, that of its last node, and runs in that node's place. A node joins the group
of a producer only if:

- no other node needs the producer's value;
- no assignment lies between them, since a read of a variable would move behind its write;
- delaying the producer, whose operands stay alive until it runs, does not raise the peak of memory.

Windows of images take an epilogue whose operands have planes without gaps.

Fusion does not change results: every kernel rounds after each op, as the single ops do.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, starmap
from typing import Protocol

from heliograph_backends.planning.groups import Group, PlainGroup, Role
from heliograph_backends.planning.layout import VIEWS, ValuePlace, broadcast_strides, is_step, value_types
from heliograph_backends.planning.memory import Headroom
from heliograph_proto.graph import Graph
from heliograph_proto.pace import in_turns
from heliograph_proto.types import TensorType


class FusedKernels(Protocol):
    """The fused steps that a device can run."""

    def role(self, number: int) -> Role:
        """Return the role that a node can have in a group."""

    def is_row_operand(self, value: int) -> bool:
        """True if norms can take this value as their weight or bias."""


#: Limit that keeps a chain's operands and temporaries in the first-level cache: a group is a tree
#: of nodes with few operands each, so it reads at most two or three values for each node.
MAX_NODES = 12
#: The ops that follow a norm in its step.
_AFFINE = {"norm": ["mul", "add"], "rms_norm": ["mul"]}
#: The roles of nodes in chains.
CHAINS = ("elementwise", "mixed")
#: The roles of steps that take elementwise nodes.
_WITH_CHAINS: tuple[Role, ...] = ("matmul", "windows", "norm")
#: The role of a group joined with a producer, by the roles of both.
_JOINED: dict[tuple[Role, Role], Role] = {
    ("elementwise", "elementwise"): "elementwise",
    **dict.fromkeys([("mixed", "mixed"), ("mixed", "elementwise"), ("elementwise", "mixed")], "mixed"),
    **{("elementwise", role): role for role in _WITH_CHAINS},
    **{(role, "elementwise"): role for role in _WITH_CHAINS},
}
#: Ops whose nodes may be no steps, see `is_step`.
NO_STEPS = VIEWS | {"assign"}


def needed_nodes(graph: Graph) -> list[bool]:
    """Return for each node whether an output or an assignment depends on it."""
    count = len(graph.leaves)
    needed = [False] * count + [node.op == "assign" for node in graph.nodes]
    for output in graph.outputs:
        needed[output.value] = True
    for value in range(len(needed) - 1, count - 1, -1):
        if needed[value]:
            for operand in graph.nodes[value - count].operands:
                needed[operand] = True
    return needed[count:]


def group_nodes(
    graph: Graph, places: tuple[ValuePlace, ...], kernels: FusedKernels, *, fusion: bool
) -> tuple[Group, ...]:
    """Return the steps of a graph in execution order. Views that move no data have no step."""
    needed = needed_nodes(graph)
    role = kernels.role
    single: list[PlainGroup] = [
        (role(number), (number,))
        for number, node in enumerate(in_turns(graph.nodes))
        if needed[number] and (node.op not in NO_STEPS or is_step(graph, places, number))
    ]
    if not fusion or all(role == "other" for role, _ in single):
        return tuple(starmap(Group, single))
    grouping = _Grouping(graph, places, kernels, needed, single)
    for group in in_turns(single):
        grouping.add(group)
    return grouping.finish()


class _Grouping:
    """Groups under construction. `open` maps a value to the group whose result it is."""

    def __init__(
        self,
        graph: Graph,
        places: tuple[ValuePlace, ...],
        kernels: FusedKernels,
        needed: list[bool],
        single: list[PlainGroup],
    ) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.types = value_types(graph)
        self.sizes = [type.nbytes for type in self.types]
        self.places = places
        self.roots = [place[0] for place in places]
        self.kernels = kernels
        self.leaves = len(graph.leaves)
        self.uses, self.last_read = _count_uses(graph, self.roots, needed)
        #: The steps without fusion, and for the node of each how many come before it.
        self.single = single
        self.order = [0] * len(graph.nodes)
        for place, (_, (number,)) in enumerate(single):
            self.order[number] = place
        self.has_mixed = any(role == "mixed" for role, _ in single)
        self._headroom: Headroom | None = None
        self.open: dict[int, PlainGroup] = {}
        self.closed: list[PlainGroup] = []

    def add(self, group: PlainGroup) -> None:
        role, (number,) = group
        if role in CHAINS:
            group = self._joined(group)
        value = self.leaves + number
        if self.nodes[number].op == "assign" or self.roots[value] < self.leaves:
            # The group writes a variable; groups that may read it stay before it.
            self.closed.extend(self.open.values())
            self.open.clear()
            self.closed.append(group)
        elif role == "other":
            self.closed.append(group)
        else:
            self.open[value] = group

    def finish(self) -> tuple[Group, ...]:
        found: list[PlainGroup | None] = [None] * len(self.nodes)
        for group in chain(self.closed, self.open.values()):
            found[group[1][-1]] = group
        return tuple(starmap(Group, filter(None, found)))

    def _joined(self, joined: PlainGroup) -> PlainGroup:
        """Merge a node with the groups of its producers where allowed, the latest producer
        first."""
        number = joined[1][-1]
        node, open, uses = self.nodes[number], self.open, self.uses
        operands = node.operands
        found = [
            value
            for value in operands
            if value in open and (uses[value] == 1 or uses[value] == operands.count(value))
        ]
        if len(found) > 1:
            found = sorted({*found}, reverse=True)
            if self.has_mixed:
                # Chains of several data types, which join no others, are the last.
                found.sort(key=lambda value: open[value][0] == "mixed")
        writes_variable = self.roots[self.leaves + number] < self.leaves
        for value in found:
            producer, type = open[value], self.types[value]
            role = _JOINED.get((joined[0], producer[0]))
            if role is None or len(joined[1]) + len(producer[1]) > MAX_NODES:
                continue
            # Equal types are mostly one object.
            if type is not node.type and type != node.type:
                mixed = "mixed" in (joined[0], producer[0])
                if not mixed or type.shape != node.type.shape:
                    continue
            merged = self._merge(role, joined[1], producer[1])
            if merged is None or (writes_variable and not self._may_write(merged)):
                continue
            if self._may_wait(producer, joined):
                joined = merged
                del open[value]
        return joined

    def _merge(self, role: Role, nodes: tuple[int, ...], before: tuple[int, ...]) -> PlainGroup | None:
        """Return the nodes of a group and of its producer as one group of this role, or None if no
        kernel runs that."""
        if role == "norm" and self.nodes[nodes[0]].op not in _AFFINE.get(self.nodes[before[0]].op, ()):
            return None
        whole = before + nodes if before[-1] < nodes[0] else tuple(sorted(before + nodes))
        if role == "windows" and not self._has_flat_planes(whole):
            return None
        if role == "norm" and not is_affine_norm(self.graph, whole, self.kernels):
            return None
        return role, whole

    def _has_flat_planes(self, numbers: tuple[int, ...]) -> bool:
        """True if each operand of elementwise nodes walks the last two dimensions as one."""
        for number in numbers:
            node = self.nodes[number]
            for value in node.operands if self.kernels.role(number) == "elementwise" else ():
                steps = broadcast_strides(
                    self.types[value].shape, self.places[value].strides, node.type.shape
                )
                if not is_flat(node.type.shape[-2:], steps[-2:]):
                    return False
        return True

    def _may_write(self, group: PlainGroup) -> bool:
        """True unless a group that writes a variable also reads it; an elementwise group may read
        it in place."""
        role, numbers = group
        variable = self.places[self.leaves + numbers[-1]]
        read = {self.places[value] for number in numbers for value in self.nodes[number].operands}
        found = {place for place in read if place.root == variable.root}
        return not found or (role == "elementwise" and found == {variable})

    def _may_wait(self, producer: PlainGroup, group: PlainGroup) -> bool:
        """True if memory allows the producer to run in the group's place."""
        nodes, number = group[1], producer[1][-1]
        end = nodes[-1]
        first, last = self.order[number] + 1, self.order[end]
        # True also if all steps between them are the group's own.
        if last - first == len(nodes) - 1 - bisect_right(nodes, number):
            return True
        more = self._kept_bytes(producer, end) - self.sizes[self.leaves + number]
        if self._headroom is None and more <= 0:
            return True
        return self.headroom.take(first, last, more)

    @property
    def headroom(self) -> Headroom:
        """The headroom of the graph without fusion; computed at the first use, as most graphs need
        none."""
        if self._headroom is None:
            self._headroom = Headroom(self.graph, self.places, self.single)
        return self._headroom

    def _kept_bytes(self, producer: PlainGroup, end: int) -> int:
        """Return the bytes of the producer's operands whose other readers all run before node
        `end`."""
        nodes, roots, last_read, leaves = self.nodes, self.roots, self.last_read, self.leaves
        made, sizes = producer[1], self.sizes
        read = {roots[value] for number in made for value in nodes[number].operands}
        kept = [root for root in read if root >= leaves and last_read[root] < end]
        return sum([sizes[root] for root in kept if root - leaves not in made]) if kept else 0


def _count_uses(graph: Graph, roots: list[int], needed: list[bool]) -> tuple[list[int], list[int]]:
    """Return the number of reads of each value, with those by views and outputs, and the last node
    that reads each root."""
    uses, last_read = [0] * len(roots), [0] * len(roots)
    for number, node in enumerate(graph.nodes):
        if needed[number]:
            for value in node.operands:
                uses[value] += 1
                last_read[roots[value]] = number
    for output in graph.outputs:
        uses[output.value] += 1
        last_read[roots[output.value]] = len(graph.nodes)
    return uses, last_read


def is_affine_norm(graph: Graph, nodes: tuple[int, ...], kernels: FusedKernels) -> bool:
    """True if the nodes are a norm times a row, optionally plus a row, or an rms_norm times a
    row."""
    first, *rest = nodes
    ops = _AFFINE.get(graph.nodes[first].op, [])
    if len(rest) > len(ops):
        return False
    value = len(graph.leaves) + first
    for number, op in zip(rest, ops, strict=False):
        node = graph.nodes[number]
        if node.op != op or value not in node.operands:
            return False
        row = other_operand(node.operands, value)
        if row == value or not is_row(graph.type_of(row), node.type) or not kernels.is_row_operand(row):
            return False
        value = len(graph.leaves) + number
    return True


def other_operand(operands: tuple[int, ...], value: int) -> int:
    """Return the operand of a two-operand node that is not `value` (or `value` if both are)."""
    return operands[1] if operands[0] == value else operands[0]


def is_flat(sizes: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """True if a stride walks two dimensions as one, or there are fewer."""
    return 1 in sizes or len(sizes) < 2 or steps[0] == sizes[1] * steps[1]


def is_row(found: TensorType, target: TensorType) -> bool:
    """True if a tensor is one row that repeats over all rows of the target."""
    return found.ndim > 0 and found.shape[-1] == target.shape[-1] and found.size == found.shape[-1]
