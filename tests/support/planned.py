"""Graphs planned without a device, and an oracle of where their results lie while they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heliograph_backends.cpu.lowering.lowering import CpuLowering
from heliograph_backends.planning.concurrency import side_by_side
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import place_values
from heliograph_backends.planning.memory import UNBOUNDED, padded
from heliograph_backends.planning.storage import StorageLayout, plan_storage
from heliograph_proto.graph import Graph
from heliograph_proto.ops.table import OPS


class DefinitionOnly:
    """No op has a kernel."""

    def role(self, number: int) -> Any:
        return "other"

    def is_row_operand(self, value: int) -> bool:
        return False


def planned(
    graph: Graph, *, fusion: bool = True, native: bool = True, max_size: int = UNBOUNDED, most: int = 1
) -> tuple[tuple[Group, ...], StorageLayout]:
    """The steps of a graph and their storage; up to `most` of them at the same time."""
    places = place_values(graph)
    kernels = CpuLowering(graph, places) if native else DefinitionOnly()
    groups = group_nodes(graph, places, kernels, fusion=fusion)
    sets = side_by_side(graph, places, groups, lambda _: True, most)
    return groups, plan_storage(graph, places, groups, max_size, sets)


class Versions:
    """How often a variable was assigned to when a value is read, as the order of the nodes has it."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.leaves = graph, len(graph.leaves)
        self.assignments = [
            (number, *node.operands) for number, node in enumerate(graph.nodes) if node.op == "assign"
        ]

    def read(self, value: int, reader: int) -> int:
        """Of the variable in which a value lies that node `reader` reads."""
        if value < self.leaves:
            return sum(target == value and number < reader for number, target, _ in self.assignments)
        number = value - self.leaves
        node = self.graph.nodes[number]
        if node.op == "assign":
            return self.read(node.operands[0], number + 1)
        return self.read(node.operands[0], number) if OPS[node.op].is_view else 0

    def written(self, number: int) -> int:
        """Of the variable that a node writes, itself or through its assignment."""
        for assignment, target, value in self.assignments:
            made = value - self.leaves
            while made >= 0 and made != number and self.graph.nodes[made].op == "reshape":
                made = self.graph.nodes[made].operands[0] - self.leaves
            if number in (assignment, made):
                return self.read(target, assignment + 1)
        raise AssertionError(f"node {number} is assigned to no variable")


class Memory:
    """What lies where, in units of 64 bytes, as the steps of a plan run: an oracle of its own."""

    UNIT = 64

    def __init__(self, graph: Graph, storage: StorageLayout) -> None:
        self.graph, self.storage = graph, storage
        #: (root, version) by (slot, unit).
        self.holders: dict[tuple[int, int], tuple[int, int]] = {}

    def units(self, root: int) -> Iterator[tuple[int, int]]:
        slot, start = self.storage.regions[root]
        assert start % self.UNIT == 0
        size = padded(self.graph.type_of(root).nbytes, self.UNIT)
        return ((slot, place) for place in range(start // self.UNIT, (start + size) // self.UNIT))

    def write(self, root: int, version: int = 0) -> None:
        self.holders |= dict.fromkeys(self.units(root), (root, version))

    def assert_holds(self, root: int, version: int, why: str) -> None:
        for unit in self.units(root):
            assert self.holders.get(unit) == (root, version), f"{why}: value {root} is not at {unit}"


def run(graph: Graph, groups: tuple[Group, ...], storage: StorageLayout) -> Memory:
    """Every step reads what its operands are and writes its result; outputs are read at last."""
    memory, versions, leaves = Memory(graph, storage), Versions(graph), len(graph.leaves)
    for value in range(leaves):
        memory.write(value)
    for group in groups:
        if OPS[graph.nodes[group.last].op].group == "source":
            memory.write(leaves + group.last)
    members: dict[int, list[Group]] = {}
    for group, number in zip(groups, storage.sets, strict=True):
        members.setdefault(number, []).append(group)
    for number, together in members.items():
        for group in together:
            # Whatever the others have written meanwhile.
            before = dict(memory.holders)
            for other in together:
                if other is not group:
                    _write(memory, versions, other)
            _read(memory, versions, group, f"set {number}")
            memory.holders = before
        for group in together:
            _write(memory, versions, group)
    for output in graph.outputs:
        root = storage.places[output.value].root
        version = versions.read(output.value, len(graph.nodes)) if root < leaves else 0
        memory.assert_holds(root, version, f"output {output.name}")
    return memory


def _read(memory: Memory, versions: Versions, group: Group, where: str) -> None:
    """What the group reads is there."""
    graph, leaves = memory.graph, versions.leaves
    inside = {leaves + number for number in group.nodes}
    for number in group.nodes:
        assign = graph.nodes[number].op == "assign"
        for value in graph.nodes[number].operands[1 if assign else 0 :]:
            root = memory.storage.places[value].root
            if value not in inside:
                version = versions.read(value, number) if root < leaves else 0
                memory.assert_holds(root, version, where)


def _write(memory: Memory, versions: Versions, group: Group) -> None:
    """The group's result, and the variable that an assignment writes."""
    root = memory.storage.places[versions.leaves + group.last].root
    node = memory.graph.nodes[group.last]
    if node.op == "assign":
        memory.write(node.operands[0], versions.written(group.last))
    if root >= versions.leaves:
        memory.write(root)
    elif node.op != "assign":
        memory.write(root, versions.written(group.last))
