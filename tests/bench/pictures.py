"""The pictures of a large plan: how long a page and its script take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from figures import Figure, least_computing

from heliograph.explain.pictures.model import Picture, PictureLeaf, PictureNode
from heliograph.explain.pictures.page import page
from heliograph.explain.pictures.scene import scene_of

NODES, RUNS = 10_000, 3
BAR_SECONDS = 3.0


def figures() -> Iterator[Figure]:
    """Seconds that a page of 10,000 nodes takes: layers in scopes, and a flat graph without any."""
    for picture in (layers(), flat()):
        seconds = least_computing(partial(made, picture), RUNS)
        note = f"{len(picture.nodes):,} nodes; a file of {len(made(picture)) / 1e6:.1f} MB"
        against = f"{BAR_SECONDS:g} s"
        yield Figure(f"pictures/{picture.title}", seconds, BAR_SECONDS, 1.0, "s", against, note)


def made(picture: Picture) -> str:
    """Return the page of a picture, from its layout on."""
    return page(picture.title, picture.summary, [scene_of(picture)])


def layers() -> Picture:
    """Layers of 20 nodes in two scopes, with a mask and weights for each."""
    leaves = [_leaf("input", "x"), _leaf("input", "mask")]
    leaves += [_leaf("weight", f"layer{number}/w") for number in range(NODES // 20)]
    nodes = list[PictureNode]()
    for number in range(NODES):
        layer, place = divmod(number, 20)
        last = len(leaves) + number - 1 if number else 0
        operands = {0: (last, 2 + layer), 5: (last, 1), 19: (last, max(0, last - 18))}.get(place, (last,))
        nodes.append(_node(f"layer{layer}/part{place // 10}/op{place}", operands, device=layer * 20 // NODES))
    return _picture("layers", leaves, nodes)


def flat() -> Picture:
    """Nodes without scopes, which mostly read the one before, and others close to it."""
    rng = random.Random(0)
    nodes = [
        _node(f"op_{number}", tuple({number, max(0, number - rng.randrange(12)) if number % 3 else number}))
        for number in range(NODES)
    ]
    return _picture("flat", [_leaf("input", "x")], nodes)


def _leaf(role: str, name: str) -> PictureLeaf:
    return PictureLeaf(role, name, "f32[8, 64]", 2048)  # type: ignore[arg-type]


def _node(name: str, operands: tuple[int, ...], device: int = 0) -> PictureNode:
    words = ("first that can", 2048, 1.5, 1, 1, "model.py:12 in layer: x = gelu(x)")
    return PictureNode(name, "gelu", "f32[8, 64]", operands, device, device, *words)


def _picture(name: str, leaves: list[PictureLeaf], nodes: list[PictureNode]) -> Picture:
    outputs = (("y", len(leaves) + len(nodes) - 1),)
    return Picture(name, "", tuple(leaves), tuple(nodes), outputs, ("cpu0",), "measured")
