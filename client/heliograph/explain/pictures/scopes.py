"""The tree of a picture: scopes as boxes in boxes, and groups where names have no scopes. Pure.

A scope with very many members is cut into groups of members that follow each other in the graph's
order. A cut lies where a split ends, or else where the fewest values are live, so that a group of a
flat graph is a chain with few values in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeAlias

from heliograph.explain.pictures.model import Picture

BoxKind = Literal["scope", "group", "node", "input", "variable", "output"]
#: The most scopes in scopes; the names of further ones stay together.
MOST_DEPTH = 16
#: The most members of a scope that are drawn side by side, and the least and most of a group.
MOST_MEMBERS = 40
LEAST_GROUP, MOST_GROUP = 10, 28
#: The least members between two cuts where splits end: many tiny splits share a group.
LEAST_BETWEEN = 4


@dataclass(slots=True)
class Box:
    """A box of the tree: a scope or group with members, or a node, a leaf or an output."""

    kind: BoxKind
    name: str
    parent: int
    #: The number of the node, leaf or output; -1 for others.
    number: int = -1
    members: list[int] = field(default_factory=list)
    #: The place of its first node in the order of the graph.
    first: float = 0.0
    depth: int = 0

    @property
    def is_open(self) -> bool:
        """True if it can have members."""
        return self.kind in ("scope", "group")


@dataclass(slots=True)
class Tree:
    """All boxes; the first is the whole picture."""

    boxes: list[Box]
    #: The box of each node, and of each leaf that is drawn as one.
    of_node: list[int]
    of_leaf: dict[int, int]
    of_output: list[int]
    #: Values that have no wires: weights and constants, and views of them. Their nodes lie in the
    #: boxes of their first readers.
    apart: frozenset[int] = frozenset()

    def box_of(self, value: int, leaves: int) -> int:
        """The box of a value; -1 if it has no wires."""
        if value in self.apart:
            return -1
        return self.of_leaf.get(value, -1) if value < leaves else self.of_node[value - leaves]


def tree_of(picture: Picture) -> Tree:
    """Return the tree of boxes of a picture."""
    tree = _Builder(picture).tree
    _cut(picture, tree)
    _unwrap(tree)
    _number(tree)
    return tree


class _Builder:
    """The tree of names, before it is cut into groups."""

    def __init__(self, picture: Picture) -> None:
        self._boxes = [Box("scope", picture.title, -1)]
        self._scopes: dict[tuple[str, ...], int] = {(): 0}
        apart, readers = _apart(picture)
        of_node = []
        for number, node in enumerate(picture.nodes):
            path, name = parts_of(node.name)
            of_node.append(-1 if number in readers else self._add("node", name, path, number, number))
        for number, reader in sorted(readers.items(), reverse=True):
            of_node[number] = of_node[reader]
        of_leaf = self._leaves(picture, of_node)
        of_output = []
        for number, (name, _) in enumerate(picture.outputs):
            of_output.append(self._add("output", name, (), number, len(picture.nodes) + number))
        self.tree = Tree(self._boxes, of_node, of_leaf, of_output, apart)

    def _leaves(self, picture: Picture, of_node: Sequence[int]) -> dict[int, int]:
        """Add inputs and variables, each in front of its first reader, or of the scope around it."""
        first: dict[int, int] = {}
        for number, node in enumerate(picture.nodes):
            for value in node.operands:
                first.setdefault(value, number)
        for _, value in picture.outputs:
            first.setdefault(value, len(picture.nodes))
        found = {}
        for number, leaf in enumerate(picture.leaves):
            if leaf.role == "weight" or number not in first:
                continue
            path, name = parts_of(leaf.name)
            here = path if path in self._scopes else ()
            shown = name if here == path else leaf.name
            before = self._first_in(self._scopes[here], first[number], of_node)
            found[number] = self._add(leaf.role, shown, here, number, before - 0.5)
        return found

    def _first_in(self, scope: int, reader: int, of_node: Sequence[int]) -> float:
        """The place in the order of a scope's member in which a node lies; else the node's own."""
        box = of_node[reader] if reader < len(of_node) else -1
        while box > 0 and self._boxes[box].parent != scope:
            box = self._boxes[box].parent
        return self._boxes[box].first if box > 0 else reader

    def _add(self, kind: BoxKind, name: str, path: tuple[str, ...], number: int, first: float) -> int:
        parent = self._scope(path, first)
        self._boxes.append(Box(kind, name, parent, number, first=first, depth=len(path) + 1))
        self._boxes[parent].members.append(len(self._boxes) - 1)
        return len(self._boxes) - 1

    def _scope(self, path: tuple[str, ...], first: float) -> int:
        for depth in range(1, len(path) + 1):
            part = path[:depth]
            if part not in self._scopes:
                parent = self._scopes[part[:-1]]
                self._boxes.append(Box("scope", part[-1], parent, first=first, depth=depth))
                self._scopes[part] = len(self._boxes) - 1
                self._boxes[parent].members.append(len(self._boxes) - 1)
        return self._scopes[path]


def _apart(picture: Picture) -> tuple[frozenset[int], dict[int, int]]:
    """Return the values that have no wires, and the first reader of each node among them."""
    leaves = len(picture.leaves)
    found = {value for value, leaf in enumerate(picture.leaves) if leaf.role == "weight"}
    returned = {value for _, value in picture.outputs}
    first: dict[int, int] = {}
    for number, node in enumerate(picture.nodes):
        for value in node.operands:
            first.setdefault(value, number)
    readers = {}
    for number, node in enumerate(picture.nodes):
        value = leaves + number
        is_fixed = not node.operands or (node.is_view and found.issuperset(node.operands))
        if is_fixed and value in first and value not in returned:
            found.add(value)
            readers[number] = first[value]
    return frozenset(found), readers


def parts_of(name: str) -> tuple[tuple[str, ...], str]:
    """Return the scopes of a name, and its own part."""
    parts = [part for part in name.split("/") if part] or [name]
    path = parts[:-1][:MOST_DEPTH]
    return tuple(path), "/".join(parts[len(path) :])


# Groups


#: The box of a value and those of its readers, all members of one scope, or once were.
Edge: TypeAlias = tuple[int, list[int]]


def _cut(picture: Picture, tree: Tree) -> None:
    """Cut each scope with too many members into groups, of which there may be several levels."""
    large = {number for number, box in enumerate(tree.boxes) if len(box.members) > MOST_MEMBERS}
    if not large:
        return
    edges = _edges(picture, tree)
    for number in sorted(large):
        tree.boxes[number].members.sort(key=lambda one: tree.boxes[one].first)
        while len(tree.boxes[number].members) > MOST_MEMBERS:
            if not _cut_once(picture, tree, number, edges.get(number, [])):
                break


def _edges(picture: Picture, tree: Tree) -> dict[int, list[Edge]]:
    """Return the edges between members of each scope, by the scope in which their ends part."""
    leaves, boxes = len(picture.leaves), tree.boxes
    found: dict[int, dict[int, Edge]] = {}
    for number, node in enumerate(picture.nodes):
        for value in set(node.operands):
            box = tree.box_of(value, leaves)
            if box >= 0:
                source, target = parting(boxes, box, tree.of_node[number])
                edge = found.setdefault(boxes[source].parent, {}).setdefault(value, (source, []))
                edge[1].append(target)
    return {scope: list(edges.values()) for scope, edges in found.items()}


def parting(boxes: Sequence[Box], a: int, b: int) -> tuple[int, int]:
    """Return the two members of the innermost common scope of two boxes in which they lie."""
    while boxes[a].depth > boxes[b].depth:
        a = boxes[a].parent
    while boxes[b].depth > boxes[a].depth:
        b = boxes[b].parent
    while boxes[a].parent != boxes[b].parent:
        a, b = boxes[a].parent, boxes[b].parent
    return a, b


def _cut_once(picture: Picture, tree: Tree, scope: int, edges: Sequence[Edge]) -> bool:
    """Put the members of a scope into groups. False if they stay as they were."""
    boxes, members = tree.boxes, tree.boxes[scope].members
    crossing = _crossing(tree, scope, edges)
    splits = [_split_of(picture, tree, one) for one in members]
    groups, begin = [], 0
    while begin < len(members):
        end = _end(begin, crossing, splits)
        groups.append(members[begin:end])
        begin = end
    if len(groups) >= len(members):
        return False
    found = []
    for those in groups:
        if len(those) == 1:
            found.append(those[0])
            continue
        first, last = boxes[those[0]], boxes[those[-1]]
        name = f"{_end_name(tree, first, 0)} … {_end_name(tree, last, -1)}"
        boxes.append(Box("group", name, scope, members=those, first=first.first))
        for one in those:
            boxes[one].parent = len(boxes) - 1
        found.append(len(boxes) - 1)
    boxes[scope].members = found
    return True


def _end_name(tree: Tree, box: Box, which: int) -> str:
    """The name of the first or last box in a group of groups."""
    while box.kind == "group":
        box = tree.boxes[box.members[which]]
    return box.name


def _crossing(tree: Tree, scope: int, edges: Sequence[Edge]) -> list[int]:
    """Return the number of values that are live behind each member of a scope."""
    boxes = tree.boxes
    place = {one: number for number, one in enumerate(boxes[scope].members)}

    def place_of(box: int) -> int:
        while box not in place:
            box = boxes[box].parent
        return place[box]

    more = [0] * (len(place) + 1)
    for source, targets in edges:
        begin, end = place_of(source), max(map(place_of, targets))
        if end > begin:
            more[begin] += 1
            more[end] -= 1
    return list(accumulate(more))


def _end(begin: int, crossing: Sequence[int], splits: Sequence[int]) -> int:
    """Return where the group ends that begins here: behind a member after which few values live."""
    count = len(splits)
    most = min(count, begin + MOST_GROUP)
    for end in range(begin + LEAST_BETWEEN, most):
        if splits[end] != splits[end - 1]:
            return end
    if most == count:
        return count
    return min(range(begin + LEAST_GROUP, most + 1), key=lambda end: (crossing[end - 1], -end))


def _split_of(picture: Picture, tree: Tree, box: int) -> int:
    """Return the split of a box's first node; that of a leaf is that of its first reader."""
    first = tree.boxes[box].first
    number = min(int(first + 0.5), len(picture.nodes) - 1)
    return picture.nodes[number].split if number >= 0 else 0


# Order


def _unwrap(tree: Tree) -> None:
    """Put the single member of a scope in the scope's place, under both names."""
    boxes = tree.boxes
    for number in range(len(boxes) - 1, 0, -1):
        box = boxes[number]
        if box.is_open and len(box.members) == 1:
            only = boxes[box.members[0]]
            if box.kind == "scope":
                only.name = f"{box.name}/{only.name}"
            only.parent = box.parent
            siblings = boxes[box.parent].members
            siblings[siblings.index(number)] = box.members[0]
            box.members, box.parent = [], -2


def _number(tree: Tree) -> None:
    """Leave out unwrapped boxes, and number the others as they come from the outside in."""
    order, old = [0], tree.boxes
    for number in order:
        members = old[number].members
        members.sort(key=lambda one: (old[one].first, one))
        order.extend(members)
    place = {number: new for new, number in enumerate(order)}
    for number in order:
        box = old[number]
        box.members = [place[one] for one in box.members]
        box.parent = place.get(box.parent, -1)
    tree.boxes = [old[number] for number in order]
    for box in tree.boxes[1:]:
        box.depth = tree.boxes[box.parent].depth + 1
    tree.of_node = [place[one] for one in tree.of_node]
    tree.of_leaf = {leaf: place[one] for leaf, one in tree.of_leaf.items()}
    tree.of_output = [place[one] for one in tree.of_output]
