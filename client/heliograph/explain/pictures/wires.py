"""Wires: the edges of a picture, drawn scope by scope. Pure.

A value that leaves a scope passes a port in its lower border, and one that enters a port in its
upper border; so each scope is laid out by itself, and opening or folding one changes no other's
order. A wire goes from one end of a scope to others: members and ports.

Values that many members of a scope read, such as a mask, are not drawn as wires there: each reader
has their name. Weights are not drawn as boxes at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from heliograph.explain.pictures.model import Picture
from heliograph.explain.pictures.scopes import Tree, parting

#: The most ports of a border; with more values they share one.
MOST_PORTS = 6
#: A value with this many readers in a scope is named there instead of wired.
MANY_READERS = 6
#: The most copies that a wire tells of.
MOST_WORDS = 8


class End(NamedTuple):
    """An end of a wire in a scope: a member, or a port of the scope itself.

    `port` is the place of a port of that member's own border, or with `box` -1 or -2 that of a port
    in the scope's upper or lower border.
    """

    box: int
    port: int = 0


#: The `box` of an end in the scope's own upper and lower border.
UPPER, LOWER = -1, -2


@dataclass(frozen=True, slots=True)
class Wire:
    """Values that go from one end to others in a scope."""

    values: tuple[int, ...]
    source: End
    targets: tuple[End, ...]
    size_bytes: int
    #: For each target: True if the values are copied to another device on their way.
    crosses: tuple[bool, ...]
    #: Words about the copies.
    copies: tuple[str, ...] = ()


@dataclass(slots=True)
class Wiring:
    """The wires inside of each scope, the ports of each box, and the values named at readers."""

    #: By scope.
    wires: dict[int, list[Wire]] = field(default_factory=dict)
    #: By box: the values of each port of its upper and lower border.
    uppers: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    lowers: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    #: By box: the values that are named at it, instead of wired, in the scope around it.
    named: dict[int, list[int]] = field(default_factory=dict)
    #: By box: how many boxes name its value.
    namers: dict[int, int] = field(default_factory=dict)


def wiring_of(picture: Picture, tree: Tree) -> Wiring:
    """Return the wires of all scopes."""
    return _Wirer(picture, tree).wiring()


class _Wirer:
    def __init__(self, picture: Picture, tree: Tree) -> None:
        self._picture, self._tree = picture, tree
        self._leaves = len(picture.leaves)
        self._copied: dict[int, list[str]] = {}
        for (value, _), words in picture.copies.items():
            self._copied.setdefault(value, []).append(words)
        #: By scope, value and source: the readers, and whether each gets a copy from another device.
        self._edges: dict[int, dict[tuple[int, int], dict[int, bool]]] = {}
        #: By box, in the order of first use.
        self._enters: dict[int, dict[int, None]] = {}
        self._leaves_it: dict[int, dict[int, None]] = {}

    def wiring(self) -> Wiring:
        for value, box, crosses in self._readings():
            self._lift(value, box, crosses)
        found = Wiring()
        upper_of = {box: self._ports(box, list(those), found.uppers) for box, those in self._enters.items()}
        lower_of = {
            box: self._ports(box, list(those), found.lowers) for box, those in self._leaves_it.items()
        }
        for scope, edges in sorted(self._edges.items()):
            found.wires[scope] = list(self._wires(scope, edges, upper_of, lower_of, found))
        return found

    def _readings(self) -> Iterator[tuple[int, int, bool]]:
        """Yield each value and a box that reads it."""
        picture, leaves = self._picture, self._leaves
        for number, node in enumerate(picture.nodes):
            for value in dict.fromkeys(node.operands):
                if self._tree.box_of(value, leaves) >= 0:
                    yield value, self._tree.of_node[number], (value, node.device) in picture.copies
        for place, (_, value) in enumerate(picture.outputs):
            if self._tree.box_of(value, leaves) >= 0:
                yield value, self._tree.of_output[place], False

    def _lift(self, value: int, reader: int, crosses: bool) -> None:
        """Draw an edge in every scope that it passes."""
        boxes = self._tree.boxes
        box = self._tree.box_of(value, self._leaves)
        source, target = parting(boxes, box, reader)
        self._edge(boxes[source].parent, value, source, target, crosses)
        while box != source:
            self._leaves_it.setdefault(box, {})[value] = None
            self._edge(boxes[box].parent, value, box, LOWER, crosses)
            box = boxes[box].parent
        self._leaves_it.setdefault(source, {})[value] = None
        while reader != target:
            self._enters.setdefault(reader, {})[value] = None
            self._edge(boxes[reader].parent, value, UPPER, reader, crosses)
            reader = boxes[reader].parent
        self._enters.setdefault(target, {})[value] = None

    def _edge(self, scope: int, value: int, source: int, target: int, crosses: bool) -> None:
        readers = self._edges.setdefault(scope, {}).setdefault((value, source), {})
        readers[target] = readers.get(target, False) or crosses

    def _ports(self, box: int, values: list[int], ports: dict[int, list[tuple[int, ...]]]) -> dict[int, int]:
        """Give the values of a border ports; return the place of each value's port."""
        if self._tree.boxes[box].is_open and len(values) <= MOST_PORTS:
            ports[box] = [(value,) for value in values]
            return {value: place for place, value in enumerate(values)}
        ports[box] = [tuple(values)]
        return dict.fromkeys(values, 0)

    def _wires(
        self,
        scope: int,
        edges: dict[tuple[int, int], dict[int, bool]],
        upper_of: dict[int, dict[int, int]],
        lower_of: dict[int, dict[int, int]],
        found: Wiring,
    ) -> Iterator[Wire]:
        """Join the edges that begin at one port, and yield the wires."""
        joined: dict[End, tuple[dict[int, None], dict[End, bool]]] = {}
        for (value, source), readers in edges.items():
            inside = [one for one in readers if one >= 0]
            if len(inside) >= MANY_READERS:
                for one in inside:
                    found.named.setdefault(one, []).append(value)
                if source >= 0:
                    found.namers[source] = found.namers.get(source, 0) + len(inside)
                readers = {one: crosses for one, crosses in readers.items() if one < 0}
                if not readers:
                    continue
            if source == UPPER:
                start = End(UPPER, upper_of[scope][value])
            else:
                start = End(source, lower_of[source][value])
            values, targets = joined.setdefault(start, ({}, {}))
            values[value] = None
            for reader, crosses in readers.items():
                end = (
                    End(LOWER, lower_of[scope][value]) if reader < 0 else End(reader, upper_of[reader][value])
                )
                targets[end] = targets.get(end, False) or crosses
        for start, (values, targets) in joined.items():
            size = sum(map(self._size, values))
            words = self._words(values) if any(targets.values()) else ()
            yield Wire(tuple(values), start, tuple(targets), size, tuple(targets.values()), words)

    def _words(self, values: Iterable[int]) -> tuple[str, ...]:
        return tuple(words for value in values for words in self._copied.get(value, ()))[:MOST_WORDS]

    def _size(self, value: int) -> int:
        leaves = self._picture.leaves
        if value < len(leaves):
            return leaves[value].size_bytes
        return self._picture.nodes[value - len(leaves)].size_bytes
