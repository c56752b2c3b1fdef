"""The pictures of plans on the pages: `make plan-pictures`.

Two devices compute a small transformer, whose heat is its work, so that the pictures are the same
on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np

import heliograph as hg
from heliograph_backends.registry import open_registry

FOLDER = Path(__file__).parent / "guide"
DEVICES = ("cpu:threads=1", "fake:host=0,memory=16MiB")
LAYERS, TOKENS, WIDTH, HIDDEN, VOCABULARY = 4, 16, 64, 256, 100


def transformer() -> hg.Graph:
    """Return layers of attention and of two products, with a mask for all of them."""
    g = hg.Graph()
    tokens, mask = g.input("tokens", (TOKENS,), "i32"), g.input("mask", (TOKENS, TOKENS), "f32")

    def weight(name: str, *shape: int) -> hg.Value:
        return g.weight(name, np.zeros(shape, np.float32))

    x = hg.ops.get_rows(weight("embedding", VOCABULARY, WIDTH), tokens)
    for number in range(LAYERS):
        with g.scope(f"layer{number}"):
            with g.scope("attention"):
                y = hg.ops.rms_norm(x)
                query, key, value = (y @ weight(name, WIDTH, WIDTH) for name in ("query", "key", "value"))
                scores = hg.ops.soft_max(query @ key.mT + mask)
                x = x + (scores @ value) @ weight("output", WIDTH, WIDTH)
            with g.scope("feed_forward"):
                x = x + hg.gelu(hg.ops.rms_norm(x) @ weight("up", WIDTH, HIDDEN)) @ weight(
                    "down", HIDDEN, WIDTH
                )
    g.output("scores", hg.ops.rms_norm(x) @ weight("head", WIDTH, VOCABULARY))
    return g


def write(folder: Path) -> None:
    """Write plan.svg and plan_memory.svg."""
    registry = patch("heliograph_backends.registry.open_registry", lambda: open_registry(DEVICES))
    with registry, hg.connect("local:") as session:
        pins = {"layer2/*": "fake0", "layer3/*": "fake0"}
        found = session.compile(transformer(), ["cpu0", "fake0"], pins=pins).explain()
    found.svg(folder / "plan.svg", title="A transformer on two devices", unfold=1)
    found.memory_svg(folder / "plan_memory.svg", title="a transformer on two devices")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
