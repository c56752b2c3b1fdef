"""The order of a scope's members: rows by longest path, and in rows by barycenters. Pure.

After Sugiyama, Tagawa and Toda ("Methods for visual understanding of hierarchical system
structures", 1981). Each scope is ordered by itself, whether its members are open or folded, so its
cost is that of its own members. Wires against the order of the graph, which folded scopes may have
between them, count for nothing here.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from heliograph.explain.pictures.scopes import Tree
from heliograph.explain.pictures.wires import LOWER, UPPER, End, Wire, Wiring

#: The most passes over the rows of a scope.
MOST_PASSES = 4
#: The weight of a piece between two bends.
STRAIGHT = 4


class Vertex(NamedTuple):
    """A place in a row: a member, a port of the scope's border, or the bend of a wire."""

    kind: Literal["box", "upper", "lower", "bend"]
    #: The box; the place of the port; the wire.
    number: int


class Route(NamedTuple):
    """The way of a wire to one of its targets: its bends from the source on, by vertex."""

    wire: int
    target: int
    bends: tuple[int, ...]
    #: True if it goes against the order of the rows.
    is_back: bool = False


class Link(NamedTuple):
    """A piece of a wire between two neighbouring rows: its vertices, by number."""

    upper: int
    lower: int
    #: The port of the upper box that it leaves, and of the lower one that it enters; -1: none.
    out: int = -1
    into: int = -1
    #: Of wires between two bends, which are to be straight, it is large.
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Layers:
    """The rows of a scope, from above, and the routes of its wires."""

    vertices: tuple[Vertex, ...]
    #: Numbers of vertices, from the left.
    rows: tuple[tuple[int, ...], ...]
    routes: tuple[Route, ...]
    links: tuple[Link, ...]


#: By box: the ports in its upper and its lower border that have wires outside, from the left.
Ports: TypeAlias = dict[int, tuple[list[int], list[int]]]


def layers_of(tree: Tree, wiring: Wiring) -> tuple[dict[int, Layers], Ports]:
    """Return the layers of each scope and group, from the outside in, and the ports of boxes.

    Ports are in the order of the ends of their wires outside; inside of a scope they stay so.
    """
    found: dict[int, Layers] = {}
    ports: Ports = {}
    for number, box in enumerate(tree.boxes):
        if box.is_open:
            order = ports.get(number, ([], []))
            wires = wiring.wires.get(number, [])
            found[number] = _Scope(box.members, wires, order).layers()
            ports.update(_ports(found[number], wires))
    return found, ports


def _ports(layers: Layers, wires: Sequence[Wire]) -> Ports:
    """Return the ports of the members of a scope in the order of the other ends; those of wires
    against the order of rows come last."""
    place = {vertex: at / len(row) for row in layers.rows for at, vertex in enumerate(row)}
    keys: dict[tuple[int, int, int], list[float]] = {}
    for wire in wires:
        for end, side in ((wire.source, 1), *((end, 0) for end in wire.targets)):
            if end.box >= 0:
                keys[end.box, side, end.port] = []
    for link in layers.links:
        if link.into >= 0:
            keys[layers.vertices[link.lower].number, 0, link.into].append(place[link.upper])
        if link.out >= 0:
            keys[layers.vertices[link.upper].number, 1, link.out].append(place[link.lower])
    found: Ports = {}
    for box, side, port in sorted(keys, key=lambda key: (_mean(keys[key]), key)):
        found.setdefault(box, ([], []))[side].append(port)
    return found


def _mean(places: Sequence[float]) -> float:
    return sum(places) / len(places) if places else 2.0


class _Scope:
    def __init__(
        self, members: Sequence[int], wires: Sequence[Wire], order: tuple[list[int], list[int]]
    ) -> None:
        self._wires = wires
        uppers = {wire.source.port for wire in wires if wire.source.box == UPPER}
        lowers = {end.port for wire in wires for end in wire.targets if end.box == LOWER}
        self._vertices = [
            *(Vertex("upper", port) for port in _in_order(uppers, order[0])),
            *(Vertex("box", box) for box in members),
            *(Vertex("lower", port) for port in _in_order(lowers, order[1])),
        ]
        self._place = {vertex: place for place, vertex in enumerate(self._vertices)}
        self._uppers, self._lowers = len(uppers), len(lowers)

    def layers(self) -> Layers:
        ends = [(self._of(wire.source), [self._of(end) for end in wire.targets]) for wire in self._wires]
        ranks = self._ranks(ends)
        routes, links = self._routes(ends, ranks)
        rows = _ordered(ranks, links, range(self._uppers > 0, max(ranks, default=-1) + (self._lowers == 0)))
        return Layers(tuple(self._vertices), rows, tuple(routes), tuple(links))

    def _of(self, end: End) -> int:
        if end.box == UPPER:
            return self._place[Vertex("upper", end.port)]
        if end.box == LOWER:
            return self._place[Vertex("lower", end.port)]
        return self._place[Vertex("box", end.box)]

    def _ranks(self, ends: Sequence[tuple[int, list[int]]]) -> list[int]:
        """Return the row of each vertex: the longest path to it; a source is close to its
        readers."""
        count = len(self._vertices)
        readers: list[list[int]] = [[] for _ in range(count)]
        has_source = [False] * count
        for source, targets in ends:
            for target in targets:
                if source < target:
                    readers[source].append(target)
                    has_source[target] = True
        ranks = [0] * self._uppers + [int(self._uppers > 0)] * (count - self._uppers)
        for one in range(count):
            for reader in readers[one]:
                ranks[reader] = max(ranks[reader], ranks[one] + 1)
        for one in reversed(range(self._uppers, count - self._lowers)):
            if readers[one] and not has_source[one]:
                ranks[one] = max(ranks[one], min(ranks[reader] for reader in readers[one]) - 1)
        if self._lowers:
            inner = ranks[: count - self._lowers]
            ranks[count - self._lowers :] = [max(inner, default=0) + 1] * self._lowers
        return ranks

    def _routes(
        self, ends: Sequence[tuple[int, list[int]]], ranks: list[int]
    ) -> tuple[list[Route], list[Link]]:
        """Add bends to `ranks`; the routes to several targets share them."""
        routes, links = list[Route](), list[Link]()
        for number, (source, targets) in enumerate(ends):
            low = ranks[source]
            forward = [ranks[target] for target in targets if ranks[target] > low]
            bends = []
            for rank in range(low + 1, max(forward, default=0)):
                bends.append(len(self._vertices))
                self._vertices.append(Vertex("bend", number))
                ranks.append(rank)
            chain = [source, *bends]
            out = self._wires[number].source.port if self._vertices[source].kind == "box" else -1
            for place, (one, next_) in enumerate(zip(chain, bends, strict=False)):
                links.append(Link(one, next_, -1 if place else out, -1, STRAIGHT if place else 1))
            for place, target in enumerate(targets):
                steps = ranks[target] - low
                routes.append(Route(number, place, tuple(bends[: max(0, steps - 1)]), steps <= 0))
                if steps > 0:
                    into = self._wires[number].targets[place].port
                    into = into if self._vertices[target].kind == "box" else -1
                    links.append(Link(chain[steps - 1], target, out if steps == 1 else -1, into))
        return routes, links


def _in_order(ports: set[int], order: Sequence[int]) -> list[int]:
    """Return ports in a given order, those that it lacks last."""
    place = {port: at for at, port in enumerate(order)}
    return sorted(ports, key=lambda port: (place.get(port, len(place)), port))


def _ordered(ranks: Sequence[int], links: Sequence[Link], free: range) -> tuple[tuple[int, ...], ...]:
    """Return the rows in the order with the fewest crossings that was found; only the `free` ones
    change."""
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for vertex, rank in enumerate(ranks):
        rows[rank].append(vertex)
    above: list[list[int]] = [[] for _ in ranks]
    below: list[list[int]] = [[] for _ in ranks]
    for upper, lower, *_ in links:
        above[lower].append(upper)
        below[upper].append(lower)
    best = [list(row) for row in rows]
    fewest = _crossings(best, below)
    for number in range(MOST_PASSES):
        if not fewest:
            break
        down = number % 2 == 0
        for row in free if down else reversed(free):
            if not 0 <= row + (-1 if down else 1) < len(rows):
                continue
            _sort(rows[row], rows[row - 1 if down else row + 1], above if down else below)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return tuple(tuple(row) for row in best)


def _sort(row: list[int], fixed: Sequence[int], neighbours: Sequence[list[int]]) -> None:
    """Sort a row by the mean place of each vertex's neighbours; others keep their place."""
    place = {vertex: number for number, vertex in enumerate(fixed)}
    scale = len(fixed) / max(1, len(row))

    def mean(at: int) -> float:
        found = [place[one] for one in neighbours[row[at]]]
        return sum(found) / len(found) if found else at * scale

    keys = [mean(at) for at in range(len(row))]
    row[:] = [row[at] for at in sorted(range(len(row)), key=lambda at: (keys[at], at))]


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    """Return the number of crossings of links."""
    found = 0
    for upper, lower in zip(rows, rows[1:], strict=False):
        place = {vertex: number for number, vertex in enumerate(lower)}
        seen: list[int] = []
        for vertex in upper:
            ends = [place[one] for one in below[vertex]]
            found += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return found
