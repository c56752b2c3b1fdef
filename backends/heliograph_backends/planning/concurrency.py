"""Sets of steps that may run at the same time because none needs another's result.

The method is that of ggml's Metal backend: walk the steps in order and add each to the current set
unless it reads a value that the set writes. All members of a set are live at once, so the memory
that they read and write does not overlap, except where a result takes over its own operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import SOURCES, ValuePlace
from heliograph_proto.graph import Graph


def side_by_side(
    graph: Graph,
    places: Sequence[ValuePlace],
    groups: Sequence[Group],
    may_join: Callable[[Group], bool],
    most: int,
) -> tuple[int, ...]:
    """Return the number of each step's set; the numbers never decrease. `may_join` is true for a
    step that can run beside others; `most` limits the steps of a set.

    A step that writes a variable runs alone, since two variables may share bytes.
    """
    sets = _Sets(graph, places, most)
    return tuple(sets.add(group, may_join(group)) for group in groups)


def concurrent_nodes(nodes: int, groups: Sequence[Group], sets: Sequence[int]) -> list[int]:
    """Return for each node the number, from 1, of its set among the sets with several steps; 0 for
    none."""
    several = (one for one, size in Counter(sets).items() if size > 1)
    numbers = {one: number for number, one in enumerate(several, 1)}
    found = [0] * nodes
    for group, one in zip(groups, sets, strict=True):
        for node in group.nodes:
            found[node] = numbers.get(one, 0)
    return found


class _Sets:
    """The set that is being filled."""

    def __init__(self, graph: Graph, places: Sequence[ValuePlace], most: int) -> None:
        self._nodes = graph.nodes
        self._places = places
        self._leaves = len(graph.leaves)
        self._most = most
        self._number = 0
        self._size = 0
        self._is_open = False
        self._written: set[int] = set()

    def add(self, group: Group, may_join: bool) -> int:
        last = self._nodes[group.last]
        if last.op in SOURCES:
            # A constant, which is computed before the first step.
            return self._number
        target = self._places[self._leaves + group.last].root
        alone = not may_join or last.op == "assign" or target < self._leaves
        if alone or not self._is_open or self._size == self._most or self._needs(group):
            self._begin()
        self._is_open = not alone
        self._size += 1
        self._written.add(target)
        return self._number

    def _begin(self) -> None:
        if self._size:
            self._number += 1
        self._size = 0
        self._written.clear()

    def _needs(self, group: Group) -> bool:
        """True if the step reads a value that the set writes."""
        places, nodes = self._places, self._nodes
        roots = [places[value].root for number in group.nodes for value in nodes[number].operands]
        return not self._written.isdisjoint(roots)
