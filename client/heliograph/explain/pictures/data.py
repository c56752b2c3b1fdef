"""A scene as plain data, for the script of a page. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from heliograph.explain.pictures import coordinates
from heliograph.explain.pictures.drawing import HEATS
from heliograph.explain.pictures.layers import Layers
from heliograph.explain.pictures.model import TIMING_TEXT, PictureNode
from heliograph.explain.pictures.scene import Scene
from heliograph.explain.pictures.wires import Wire
from heliograph.explain.pictures.words import DEVICE_COLOURS, heat_of

#: The kinds of vertices, by the numbers that the script knows.
_KINDS = {"box": 0, "upper": 1, "lower": 2, "bend": 3}


def scene_data(scene: Scene, opened: Iterable[int], marked: Iterable[int] = ()) -> dict[str, Any]:
    """Return the data of a scene with these scopes open: lists and texts, for JSON.

    `marked` are numbers of nodes whose boxes are outlined, with the scopes around them.
    """
    picture, layout = scene.picture, scene.layout
    texts = _Texts()
    return {
        "title": picture.title,
        "summary": picture.summary,
        "timing": picture.timing,
        "timingText": TIMING_TEXT[picture.timing],
        "devices": list(picture.devices),
        "colours": list(DEVICE_COLOURS),
        "heats": [[share, heat_of(share)] for share in HEATS],
        "lengths": _lengths(),
        "boxes": _boxes(scene),
        "nodes": [_node(node, texts) for node in picture.nodes],
        "leaves": [[leaf.role, leaf.name, leaf.type, leaf.size_bytes] for leaf in picture.leaves],
        "outputs": [list(one) for one in picture.outputs],
        "boxOf": layout.tree.of_node,
        "texts": texts.all,
        "copies": [[value, words] for (value, _), words in picture.copies.items()],
        "namers": layout.wiring.namers,
        "scopes": {
            number: _scope(layers, layout.wiring.wires.get(number, []))
            for number, layers in layout.layers.items()
        },
        "wired": layout.ports,
        "open": sorted(opened),
        "marked": _around(scene, marked),
    }


def _boxes(scene: Scene) -> list[list[Any]]:
    layout = scene.layout
    return [
        [
            "view" if number in layout.views else box.kind,
            box.name,
            box.parent,
            box.number,
            label.title,
            label.detail,
            list(label.lines),
            round(label.heat, 3),
            round(label.share, 6),
            label.nodes,
            round(label.time, 3),
            label.weights_bytes,
            [[device, round(share, 3)] for device, share in label.devices],
        ]
        for number, (box, label) in enumerate(zip(layout.tree.boxes, scene.labels, strict=True))
    ]


def _node(node: PictureNode, texts: _Texts) -> list[Any]:
    return [
        node.name,
        texts(node.op),
        texts(node.type),
        list(node.operands),
        node.device,
        node.split,
        texts(node.why),
        node.size_bytes,
        round(node.time, 3),
        node.step,
        node.together,
        texts(node.source),
    ]


def _around(scene: Scene, nodes: Iterable[int]) -> list[int]:
    """Return the boxes of nodes, and those around them."""
    tree, found = scene.layout.tree, set[int]()
    for number in nodes:
        box = tree.of_node[number]
        while box > 0 and box not in found:
            found.add(box)
            box = tree.boxes[box].parent
    return sorted(found)


class _Texts:
    """Texts that many nodes share, by number."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._known.setdefault(text, len(self._known))

    @property
    def all(self) -> list[str]:
        return list(self._known)


def _scope(layers: Layers, wires: Iterable[Wire]) -> dict[str, Any]:
    return {
        "vertices": [[_KINDS[kind], number] for kind, number in layers.vertices],
        "rows": layers.rows,
        "links": layers.links,
        "routes": [[wire, target, bends, int(back)] for wire, target, bends, back in layers.routes],
        "wires": [
            [
                *wire.source,
                [[*end, int(crosses)] for end, crosses in zip(wire.targets, wire.crosses, strict=True)],
                wire.size_bytes,
                "; ".join(wire.copies),
            ]
            for wire in wires
        ],
    }


def _lengths() -> dict[str, Any]:
    """The lengths with which the script places boxes."""
    names = ("LINE", "PAD", "FOOT", "HEADER", "GAP", "BEND_GAP", "BEND", "ROW_GAP", "PORT", "PASSES", "SIZES")
    return {name: getattr(coordinates, name) for name in names}
