"""Which steps may run side by side: those that do not need each other's results.

As ggml's Metal backend finds them: steps are walked in order, and each joins the set before it as long as
it needs nothing that the set writes, and writes nothing that it needs. The memory of a set is that of one
moment: what its members read and write lies apart, but for a result that takes over its own operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import ValuePlace
from heliograph_proto.graph import Graph
from heliograph_proto.ops.table import OPS


def side_by_side(
    graph: Graph,
    places: Sequence[ValuePlace],
    groups: Sequence[Group],
    may_join: Callable[[Group], bool],
    most: int,
) -> tuple[int, ...]:
    """The set of each step, by number; sets follow each other. `may_join`: whether a step can run beside
    others at all; `most`: how many steps a set has at most.

    What writes a variable runs alone, since two variables may share bytes.
    """
    sets = _Sets(graph, places, most)
    return tuple(sets.add(group, may_join(group)) for group in groups)


def one_by_one(groups: Sequence[Group]) -> range:
    """Every step is a set of its own."""
    return range(len(groups))


def concurrent_nodes(nodes: int, groups: Sequence[Group], sets: Sequence[int]) -> list[int]:
    """For each node the number, from 1, of its set among those of several steps; 0: it is in none."""
    sizes = Counter(sets)
    numbers = {one: place for place, one in enumerate((one for one in sizes if sizes[one] > 1), 1)}
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
        if OPS[last.op].group == "source":
            # A constant: it is made before the first step.
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
        """Whether a step reads what the set writes."""
        roots = (self._places[value].root for number in group.nodes for value in self._nodes[number].operands)
        return not self._written.isdisjoint(roots)
