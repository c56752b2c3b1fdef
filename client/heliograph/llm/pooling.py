"""One vector of a text's rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from heliograph_proto.gguf import GgufHeader

#: The names of a file's numbers of ways to pool.
MEAN = 1
POOLING = {0: "mean", 1: "mean", 2: "first", 3: "last"}


def pooling_of(header: GgufHeader) -> str:
    """Return how a model's rows are pooled: "mean", "first" or "last"."""
    return POOLING.get(header.value(f"{header.architecture}.pooling_type", int, MEAN), "mean")


def pooled(rows: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    """Return the mean, the first or the last of rows [n, w] at unit length, [w]."""
    chosen = {"mean": rows.mean(axis=0), "first": rows[0], "last": rows[-1]}[how]
    length = float(np.linalg.norm(chosen))
    made: np.ndarray[Any, Any] = (chosen / (length or 1.0)).astype(np.float32)
    return made
