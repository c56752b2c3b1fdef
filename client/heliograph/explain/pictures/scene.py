"""A scene: all that is known of a picture before it is known which scopes are open. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph.explain.pictures.coordinates import Layout
from heliograph.explain.pictures.labels import Label, labels_of, lines_of
from heliograph.explain.pictures.layers import layers_of
from heliograph.explain.pictures.model import Picture
from heliograph.explain.pictures.scopes import tree_of
from heliograph.explain.pictures.wires import wiring_of

#: The most boxes that are shown at first.
MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, its layout, and the labels of its boxes."""

    picture: Picture
    layout: Layout
    labels: Sequence[Label]


def scene_of(picture: Picture) -> Scene:
    """Prepare a picture for drawing; about linear in its nodes."""
    tree = tree_of(picture)
    wiring = wiring_of(picture, tree)
    lines = lines_of(picture, tree, wiring)
    views = {
        number
        for number, box in enumerate(tree.boxes)
        if box.kind == "node" and picture.nodes[box.number].is_view
    }
    counts = {number: len(those) for number, those in lines.items()}
    layout = Layout(tree, wiring, *layers_of(tree, wiring), views, counts)
    return Scene(picture, layout, labels_of(picture, tree, lines))


def opened(scene: Scene, levels: int | None = None) -> set[int]:
    """Return the scopes that are open: those down to a level, by default as many levels as show no
    more than `MOST_SHOWN` boxes."""
    boxes = scene.layout.tree.boxes
    found: set[int] = set()
    shown, level = list(boxes[0].members), 0
    while levels is None or level < levels:
        inner = [one for one in shown if boxes[one].is_open and one not in found]
        more = [one for number in inner for one in boxes[number].members]
        if not inner or (levels is None and len(shown) + len(more) > MOST_SHOWN):
            break
        found.update(inner)
        shown += more
        level += 1
    return found
