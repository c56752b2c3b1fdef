"""A graph with weights that take a while to upload."""

from __future__ import annotations

import numpy as np

import heliograph as hg

#: Two contents that are large enough to break off in the middle.
#: Many times what is on its way at once.
LARGE = 64 * 2**20


def graph_of(*seeds: int, size_bytes: int = LARGE) -> hg.Graph:
    """y = x + the first element of each weight."""
    g = hg.Graph()
    total = g.input("x", (1,), "f32")
    for seed in seeds:
        array = np.random.default_rng(seed).random(size_bytes // 4, np.float32)
        total = total + g.weight(f"w{seed}", array)[:1]
    g.output("y", total)
    return g


#: Of the weights of a client that is killed.
SEEDS = (11, 12, 13, 14)
