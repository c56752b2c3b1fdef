"""Matrix products: one element has the same bits however the graph asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import heliograph as hg

RNG = np.random.default_rng(5)
LEFT = RNG.normal(size=(2, 3, 7, 33)).astype(np.float32)


def run(graph: hg.Graph, fusion: bool = True, **inputs: Any) -> Any:
    with hg.connect("local:") as session:
        return session.compile(graph, fusion=fusion).run(inputs)["y"]


@pytest.mark.parametrize("shape", [(40, 33), (1, 1, 40, 33), (2, 3, 40, 33)])
@pytest.mark.parametrize("constant", [True, False], ids=["weight", "input"])
def test_mul_mat_has_the_bits_of_matmul_with_the_transpose(shape: tuple[int, ...], constant: bool) -> None:
    """Packed or not, repeated over the batch or not, with what follows in the same step or not."""
    right = RNG.normal(size=shape).astype(np.float32)
    found = []
    for raw in (True, False):
        for fusion in (True, False):
            g = hg.Graph()
            a = g.input("a", LEFT.shape, "f32")
            w = g.weight("w", right) if constant else g.input("w", shape, "f32")
            y = hg.ops.mul_mat(w, a) if raw else a @ w.mT
            g.output("y", hg.relu(y + 1.0))
            given = {"a": LEFT} if constant else {"a": LEFT, "w": right}
            found.append(run(g, fusion, **given))
    assert all(np.array_equal(one, found[0]) for one in found)
    expected = np.maximum(LEFT.astype(np.float64) @ np.swapaxes(right, -1, -2) + 1.0, 0)
    assert np.abs(found[0] - expected).max() < 1e-4


def test_mul_mat_repeats_each_weight_for_consecutive_batches() -> None:
    """ggml's grouped heads: three matrices for six."""
    weights = RNG.normal(size=(1, 3, 5, 33)).astype(np.float32)
    rows = RNG.normal(size=(2, 6, 7, 33)).astype(np.float32)
    g = hg.Graph()
    g.output("y", hg.ops.mul_mat(g.weight("w", weights), g.input("a", rows.shape, "f32")))
    expected = rows @ np.swapaxes(np.repeat(weights, 2, axis=1), -1, -2)
    assert np.allclose(run(g, a=rows), expected, atol=1e-4)
