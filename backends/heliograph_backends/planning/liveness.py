"""How long each result's memory is needed, and which results take over that of an operand.

A view keeps its source's memory alive. A result runs in place, as in ggml's graph allocator, where its
op may, the step is the last that needs the operand, and the operand lies in memory of the plan's own,
whole and laid out as the result is. So neither inputs nor weights nor variables nor outputs are ever
written over. Nor is what another step of the same set reads: those run at the same time.

Safe is what reads each element before it is written, and nowhere else later: so no other operand of the
step may lie in that memory, but for one in the same place where the step is elementwise. A matrix product
writes sums before what follows it reads its operands, and never runs in place.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import Place, value_types
from heliograph_backends.planning.memory import Lifetime
from heliograph_proto.graph import Graph
from heliograph_proto.ops import OPS
from heliograph_proto.types import TensorType

_IN_PLACE = {name: row.in_place for name, row in OPS.items() if row.in_place}
_ELEMENTWISE = frozenset(name for name, row in OPS.items() if row.group == "elementwise")


@dataclass(frozen=True, slots=True)
class Liveness:
    """Blocks of memory by their lifetimes, and each root's block, by number."""

    lifetimes: tuple[Lifetime, ...]
    blocks: dict[int, int]


def live_blocks(
    graph: Graph,
    places: Sequence[Place],
    groups: Sequence[Group],
    elsewhere: Container[int],
    lasting: Iterable[int],
    sets: Sequence[int] | None = None,
) -> Liveness:
    """Blocks for the roots that groups write. Steps are groups, by number; lifetimes count sets of steps.

    `elsewhere`: roots that lie in other memory; `lasting`: values that are read after the last step; `sets`:
    see `concurrency.side_by_side`; None: every step by itself.
    """
    return _Blocks(graph, places, groups, elsewhere, lasting, sets or range(len(groups))).found()


class _Blocks:
    """Blocks under construction."""

    def __init__(
        self,
        graph: Graph,
        places: Sequence[Place],
        groups: Sequence[Group],
        elsewhere: Container[int],
        lasting: Iterable[int],
        sets: Sequence[int],
    ) -> None:
        self.sets = sets
        self.nodes = graph.nodes
        self.places = places
        self.groups = groups
        self.types = value_types(graph)
        self.leaves = len(graph.leaves)
        self.elsewhere = elsewhere
        #: By root: the last step that reads it, or -1; and the one before that.
        self.before: dict[int, int] = {}
        self.last = self._last_steps(lasting)
        self.blocks: dict[int, int] = {}
        #: Of each block.
        self.sizes: list[int] = []
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    def _last_steps(self, lasting: Iterable[int]) -> list[int]:
        places, last = self.places, [-1] * len(self.places)
        for step, group in enumerate(self.groups):
            for number in group.nodes:
                for value in self.nodes[number].operands:
                    root = places[value].root
                    if 0 <= last[root] < step:
                        self.before[root] = last[root]
                    last[root] = step
        for value in lasting:
            last[places[value].root] = len(self.groups)
        return last

    def found(self) -> Liveness:
        for step, group in enumerate(self.groups):
            root = self.leaves + group.nodes[-1]
            if self.places[root].root == root and root not in self.elsewhere:
                self._add(root, step, group)
        return Liveness(tuple(map(Lifetime, self.sizes, self.firsts, self.lasts)), self.blocks)

    def _add(self, root: int, step: int, group: Group) -> None:
        source = self._taken_over(root, step, group)
        if source is None:
            block = len(self.sizes)
            self.sizes.append(self.types[root].nbytes)
            self.firsts.append(self.sets[step])
            self.lasts.append(self.sets[step])
        else:
            block = self.blocks[source]
        self.blocks[root] = block
        self.lasts[block] = max(self.sets[step], self._set_of(self.last[root]))

    def _set_of(self, step: int) -> int:
        """The set of a step; behind the last one for what is read after all."""
        if step < len(self.sets):
            return self.sets[step] if step >= 0 else -1
        return self.sets[-1] + 1 if self.sets else 0

    def _taken_over(self, root: int, step: int, group: Group) -> int | None:
        """The root whose memory the group's result takes over: that of the first operand that it may."""
        role, numbers = group
        if role == "matmul":
            return None
        for number in numbers if role == "elementwise" else numbers[:1]:
            node = self.nodes[number]
            for place in _IN_PLACE.get(node.op, ()):
                if place < len(node.operands):
                    source = self.places[node.operands[place]].root
                    if self._is_last(source, step) and self._may_take_over(node.operands[place], root, group):
                        return source
        return None

    def _is_last(self, root: int, step: int) -> bool:
        """Whether a step is the last that reads a root, and nobody else of its set reads it meanwhile."""
        before = self._set_of(self.before.get(root, -1))
        return self.last[root] == step and before < self.sets[step]

    def _may_take_over(self, value: int, root: int, group: Group) -> bool:
        ours = self.places[value].root in self.blocks
        return ours and self._is_whole(value, self.types[root]) and self._is_alone(value, group)

    def _is_whole(self, value: int, type: TensorType) -> bool:
        """Whether a value has this type, is contiguous, and is all that lies in its root's memory."""
        source, offset, strides = self.places[value]
        if offset or self.types[value] != type or self.types[source].nbytes != type.nbytes:
            return False
        return strides == type.strides or _same_walk(type.shape, strides, type.strides)

    def _is_alone(self, value: int, group: Group) -> bool:
        """Whether nothing else that the group reads lies in the value's memory, or all of it as the value
        does and the group is elementwise.
        """
        places, types = self.places, self.types
        place, type = places[value], types[value]
        found = 0
        for number in group.nodes:
            for other in self.nodes[number].operands:
                if places[other].root == place.root:
                    found += 1
                    if other != value and (places[other] != place or types[other] != type):
                        return False
        if found == 1 or group.role == "elementwise":
            return True
        return self.nodes[group.last].op in _ELEMENTWISE


def _same_walk(shape: tuple[int, ...], strides: tuple[int, ...], plain: tuple[int, ...]) -> bool:
    """Whether strides differ only where a dimension has one element."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, plain, strict=True))
