"""Coordinates of a picture, given which scopes are open. Pure; all lengths are in pixels.

Sizes come from the inside out: an open scope is as large as its rows. In a row, each member is as
close to its neighbours in other rows as the order and the gaps allow: the places with the least
squares of distances, by pooling adjacent violators. `assets/plan.js` does the same in a browser.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from heliograph.explain.pictures.layers import Layers, Ports
from heliograph.explain.pictures.scopes import Box, Tree
from heliograph.explain.pictures.wires import Wiring

#: Width and height of a box by its kind, and of a node that only views a value.
SIZES: dict[str, tuple[float, float]] = {
    "scope": (232, 50),
    "group": (232, 50),
    "node": (196, 42),
    "view": (172, 22),
    "input": (170, 38),
    "variable": (170, 38),
    "output": (170, 38),
}
#: The height of a further line of a box.
LINE = 15
#: Around the rows of an open scope: at its sides, at its lower border, and its header.
PAD, FOOT, HEADER = 18, 14, 34
#: Between boxes of a row, at a bend, and between rows.
GAP, BEND_GAP, ROW_GAP = 26, 12, 40
#: The width of a bend.
BEND = 10
#: The least distance of ports: room for a size.
PORT = 68
#: The passes that place the members of rows.
PASSES = 6


@dataclass(slots=True)
class Placed:
    """A box with its place, relative to the scope around it."""

    width: float
    height: float
    #: Of its upper left corner.
    x: float = 0.0
    y: float = 0.0
    #: Its row in that scope.
    row: int = 0
    #: Of an open scope: the centre of each vertex, and the upper and lower edge of each row.
    centres: list[float] = field(default_factory=list)
    edges: list[tuple[float, float]] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    #: The places of its ports, relative to its centre.
    uppers: dict[int, float] = field(default_factory=dict)
    lowers: dict[int, float] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """True if its members are shown."""
        return bool(self.edges)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tree, its wires, and the rows of each scope."""

    tree: Tree
    wiring: Wiring
    layers: Mapping[int, Layers]
    ports: Ports
    #: Boxes of nodes that only view a value.
    views: Container[int]
    #: The number of further lines of boxes that have some.
    lines: Mapping[int, int]

    def size_of(self, number: int) -> tuple[float, float]:
        """The size of a folded box."""
        box = self.tree.boxes[number]
        kind = "view" if number in self.views else box.kind
        width, height = SIZES[kind]
        return width, height + LINE * self.lines.get(number, 0)


def place(layout: Layout, opened: Container[int]) -> dict[int, Placed]:
    """Return the place of every box that is shown. The whole picture is open in any case."""
    return _Placing(layout, opened).placed()


class _Placing:
    def __init__(self, layout: Layout, opened: Container[int]) -> None:
        self._layout, self._opened = layout, opened
        self._found: dict[int, Placed] = {}

    def placed(self) -> dict[int, Placed]:
        shown = [0]
        for number in shown:
            if self._is_open(number):
                shown.extend(self._layout.tree.boxes[number].members)
        for number in reversed(shown):
            self._found[number] = self._open(number) if self._is_open(number) else self._folded(number)
        return self._found

    def _is_open(self, number: int) -> bool:
        box: Box = self._layout.tree.boxes[number]
        return box.is_open and (number == 0 or number in self._opened)

    def _folded(self, number: int) -> Placed:
        width, height = self._layout.size_of(number)
        found = Placed(width, height)
        uppers, lowers = self._layout.ports.get(number, ([], []))
        found.width = max(width, PORT * max(len(uppers), len(lowers)) + 8)
        found.uppers, found.lowers = _spread(uppers), _spread(lowers)
        return found

    def _open(self, number: int) -> Placed:
        layers = self._layout.layers[number]
        widths, heights = self._sizes(layers)
        centres = _centres(layers, widths, self._shifts(layers))
        least = min((x - w / 2 for x, w in zip(centres, widths, strict=True)), default=0.0)
        most = max((x + w / 2 for x, w in zip(centres, widths, strict=True)), default=0.0)
        header = HEADER + LINE * self._layout.lines.get(number, 0)
        inner, head = most - least, self._layout.size_of(number)[0]
        left = PAD + max(0.0, head - inner) / 2 - least
        found = Placed(max(inner, head) + 2 * PAD, 0.0, centres=[x + left for x in centres])
        y = float(header)
        found.row_of = [0] * len(layers.vertices)
        for row, vertices in enumerate(layers.rows):
            height = max((heights[one] for one in vertices), default=0.0)
            found.edges.append((y, y + height))
            for one in vertices:
                found.row_of[one] = row
                self._put(layers, one, found.centres[one], y, height, found)
            y += height + ROW_GAP
        found.height = y - ROW_GAP + FOOT if layers.rows else y + FOOT
        return found

    def _put(self, layers: Layers, vertex: int, x: float, y: float, height: float, inside: Placed) -> None:
        kind, number = layers.vertices[vertex]
        if kind == "box":
            box = self._found[number]
            box.x, box.y = x - box.width / 2, y + (height - box.height) / 2
            box.row = inside.row_of[vertex]
        elif kind == "upper":
            inside.uppers[number] = x - inside.width / 2
        elif kind == "lower":
            inside.lowers[number] = x - inside.width / 2

    def _sizes(self, layers: Layers) -> tuple[list[float], list[float]]:
        widths, heights = [], []
        for kind, number in layers.vertices:
            if kind == "box":
                widths.append(self._found[number].width)
                heights.append(self._found[number].height)
            else:
                widths.append(BEND if kind == "bend" else PORT)
                heights.append(0.0)
        return widths, heights

    def _shifts(self, layers: Layers) -> list[float]:
        """Return for each link how far its lower vertex is to be right of its upper one.

        A box with several ports has its centre under what it reads, so that rows of such boxes do
        not drift.
        """

        def at(vertex: int, port: int, *, lower: bool) -> float:
            if port < 0:
                return 0.0
            box = self._found[layers.vertices[vertex].number]
            ports = box.lowers if lower else box.uppers
            return ports[port] if len(ports) == 1 else 0.0

        return [
            at(link.upper, link.out, lower=True) - at(link.lower, link.into, lower=False)
            for link in layers.links
        ]


def _spread(ports: Sequence[int]) -> dict[int, float]:
    """The places of the ports of a folded box."""
    return {port: (at - (len(ports) - 1) / 2) * PORT for at, port in enumerate(ports)}


def _centres(layers: Layers, widths: Sequence[float], shifts: Sequence[float]) -> list[float]:
    """Return the centre of each vertex."""
    centres = [0.0] * len(layers.vertices)
    above: list[list[Pull]] = [[] for _ in layers.vertices]
    below: list[list[Pull]] = [[] for _ in layers.vertices]
    for link, shift in zip(layers.links, shifts, strict=True):
        above[link.lower].append((link.upper, shift, link.weight))
        below[link.upper].append((link.lower, -shift, link.weight))
    for row in layers.rows:
        _settle(layers, row, widths, centres, [(0.0, 0.0)] * len(row))
    for number in range(PASSES):
        down = number % 2 == 0
        pulls = above if down else below
        for row in layers.rows if down else reversed(layers.rows):
            _settle(layers, row, widths, centres, [_wanted(centres, one, pulls[one]) for one in row])
    return centres


#: A neighbour, how far from its centre a vertex is to be, and the weight of that.
Pull: TypeAlias = tuple[int, float, int]


def _wanted(centres: Sequence[float], vertex: int, pulls: Sequence[Pull]) -> tuple[float, float]:
    """Return the place that a vertex should have, and the weight of that."""
    weight = sum(pull[2] for pull in pulls)
    if not weight:
        return centres[vertex], 0.01
    return sum((centres[one] + shift) * w for one, shift, w in pulls) / weight, float(weight)


def _settle(
    layers: Layers,
    row: Sequence[int],
    widths: Sequence[float],
    centres: list[float],
    wanted: Sequence[tuple[float, float]],
) -> None:
    """Place the vertices of a row as close to the wanted places as their order and gaps allow."""
    starts = [0.0]
    for left, right in zip(row, row[1:], strict=False):
        bent = "bend" in (layers.vertices[left].kind, layers.vertices[right].kind)
        starts.append(starts[-1] + (widths[left] + widths[right]) / 2 + (BEND_GAP if bent else GAP))
    #: Pools: the sum of weighted places, the weight, and the number of vertices.
    pools: list[tuple[float, float, int]] = []
    for start, (x, weight) in zip(starts, wanted, strict=True):
        weight = weight or 1.0
        pool = (x - start) * weight, weight, 1
        while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = last[0] + pool[0], last[1] + pool[1], last[2] + pool[2]
        pools.append(pool)
    at = 0
    for total, weight, count in pools:
        for place in range(at, at + count):
            centres[row[place]] = total / weight + starts[place]
        at += count
