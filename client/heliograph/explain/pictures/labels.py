"""The texts, heat and colours of a picture's boxes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph.explain.pictures.coordinates import SIZES
from heliograph.explain.pictures.model import Picture
from heliograph.explain.pictures.scopes import Box, Tree
from heliograph.explain.pictures.wires import Wiring
from heliograph.explain.pictures.words import fitted, heat_of, time_text
from heliograph_proto.types import size_text

#: Sizes of fonts: names, and what stands below.
NAME_SIZE, TEXT_SIZE = 12.5, 11.0
#: Bold letters are wider.
BOLD = 1.1
_SIDES = 24.0


@dataclass(slots=True)
class Label:
    """The texts of a box, which fit its width, and what colours it."""

    title: str
    detail: str = ""
    #: Further lines: its weights, and values that are named instead of wired.
    lines: tuple[str, ...] = ()
    #: From 0 to 1, and the share of the time.
    heat: float = 0.0
    share: float = 0.0
    #: The number of nodes inside, their time and work, and the bytes of their weights.
    nodes: int = 0
    time: float = 0.0
    weights_bytes: int = 0
    #: Devices, by place, and the share of the nodes on each.
    devices: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class _Sum:
    nodes: int
    time: float
    weights: set[int]
    devices: dict[int, int]


def lines_of(picture: Picture, tree: Tree, wiring: Wiring) -> dict[int, tuple[str, ...]]:
    """Return the further lines of the boxes that have some."""
    found: dict[int, tuple[str, ...]] = {}
    for number, box in enumerate(tree.boxes):
        weights = _weights(picture, tree, box.number) if box.kind == "node" else []
        named = wiring.named.get(number, [])
        if not (weights or named):
            continue
        width = _width(picture, box)
        texts = [f"◆ {', '.join(_weight_text(picture, one) for one in weights)}"] if weights else []
        texts += [f"↳ {', '.join(_name(picture, value) for value in named)}"] if named else []
        found[number] = tuple(fitted(text, width, TEXT_SIZE) for text in texts)
    return found


def labels_of(picture: Picture, tree: Tree, lines: dict[int, tuple[str, ...]]) -> list[Label]:
    """Return the label of each box."""
    sums = _sums(picture, tree)
    total = sums[0].time
    return [
        _label(picture, box, sums[number], total, lines.get(number, ()))
        for number, box in enumerate(tree.boxes)
    ]


def _label(picture: Picture, box: Box, found: _Sum, total: float, lines: tuple[str, ...]) -> Label:
    width = _width(picture, box)
    share = found.time / total if total else 0.0
    weights = sum(picture.leaves[one].size_bytes for one in found.weights)
    devices = tuple((device, count / found.nodes) for device, count in sorted(found.devices.items()))
    title, detail = _texts(picture, box, found, weights)
    return Label(
        fitted(title, width, NAME_SIZE * BOLD),
        fitted(detail, width, TEXT_SIZE),
        lines,
        heat_of(share),
        share,
        found.nodes,
        found.time,
        weights,
        devices,
    )


def _texts(picture: Picture, box: Box, found: _Sum, weights: int) -> tuple[str, str]:
    if box.is_open:
        parts = [f"{found.nodes:,} node{'s' * (found.nodes != 1)}"]
        if picture.timing != "work" and found.time:
            parts.append(time_text(found.time))
        if weights:
            parts.append(f"◆ {size_text(weights)}")
        return box.name, " · ".join(parts)
    if box.kind == "node":
        node = picture.nodes[box.number]
        if node.is_view:
            return f"{node.op} {_compact(node.type[node.type.find('[') :])}", ""
        took = [time_text(node.time)] if picture.timing == "measured" and node.time else []
        # The names that nodes get by themselves have the op.
        op = "" if box.name.startswith(node.op) else f"{node.op} "
        return box.name, " · ".join([f"{op}{_compact(node.type)}", *took])
    if box.kind == "output":
        return box.name, "output"
    leaf = picture.leaves[box.number]
    return box.name, f"{leaf.role} {_compact(leaf.type)}"


def _compact(type: str) -> str:
    return type.replace(", ", "×")


def _width(picture: Picture, box: Box) -> float:
    view = box.kind == "node" and picture.nodes[box.number].is_view
    return SIZES["view" if view else box.kind][0] - _SIDES


def _sums(picture: Picture, tree: Tree) -> list[_Sum]:
    """Sum up what lies in each box, from the inside out."""
    found = [_Sum(0, 0.0, set(), {}) for _ in tree.boxes]
    for number, place in enumerate(tree.of_node):
        if tree.boxes[place].number != number:
            found[place].nodes += 1
    for number, box in reversed(list(enumerate(tree.boxes))):
        mine = found[number]
        if box.kind == "node":
            node = picture.nodes[box.number]
            mine.nodes += 1
            mine.time, mine.devices = node.time, {node.device: mine.nodes}
            leaves = len(picture.leaves)
            mine.weights = {one for one in _weights(picture, tree, box.number) if one < leaves}
        if box.parent >= 0:
            outer = found[box.parent]
            outer.nodes += mine.nodes
            outer.time += mine.time
            outer.weights |= mine.weights
            for device, count in mine.devices.items():
                outer.devices[device] = outer.devices.get(device, 0) + count
    return found


def _weights(picture: Picture, tree: Tree, number: int) -> Sequence[int]:
    """The weights and constants that a node reads, also through views that are not drawn."""
    leaves, found = len(picture.leaves), dict[int, None]()
    stack = list(picture.nodes[number].operands)
    for value in stack:
        if value not in tree.apart:
            continue
        operands = picture.nodes[value - leaves].operands if value >= leaves else ()
        if operands:
            stack.extend(operands)
        else:
            found[value] = None
    return list(found)


def _weight_text(picture: Picture, leaf: int) -> str:
    if leaf >= len(picture.leaves):
        constant = picture.nodes[leaf - len(picture.leaves)]
        return f"{constant.name.rpartition('/')[2]} {_compact(constant.type)}"
    found = picture.leaves[leaf]
    return f"{found.name.rpartition('/')[2]} {size_text(found.size_bytes)}"


def _name(picture: Picture, value: int) -> str:
    leaves = len(picture.leaves)
    name = picture.leaves[value].name if value < leaves else picture.nodes[value - leaves].name
    return name.rpartition("/")[2]
