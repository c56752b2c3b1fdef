"""Writes the model `scores`, of 8 numbers to 4 scores, as version 1: write_model.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import heliograph as hg

ROWS = 8


def main(folder: str) -> None:
    g = hg.Graph()
    x = g.input("x", (ROWS, 8), "f32")
    g.output("scores", x @ g.weight("w", np.ones((8, 4), np.float32)))
    version = Path(folder, "scores", "1")
    version.mkdir(parents=True, exist_ok=True)
    hg.save(g, version / "model.hgraph")
    # Requests of fewer rows share runs of these.
    (version.parent / "model.toml").write_text(f"max_batch_size = {ROWS}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
