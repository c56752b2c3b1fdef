"""A small graph that shows what ggml's planner and its CPU backend do with one."""

from __future__ import annotations

import numpy as np

from peers.ggml import Graph

SEED = 20260823


def planned_and_run() -> tuple[int, list[int], float]:
    """A chain of nodes: planned bytes alone and with a second output, and the error of the run."""
    random = np.random.default_rng(SEED)
    weights, data = random.random((64, 16), np.float32), random.random((8, 16), np.float32)
    with Graph() as graph:
        x = graph.input("f32", (8, 16))
        product = graph.node("mul_mat", graph.array(weights), x)
        last = graph.node("sqr", graph.node("neg", product))
        size, found = x.nbytes, [graph.plan_bytes(last), graph.plan_bytes(last, product)]
        (values,) = graph.run([last], {x: data})
    return size, found, float(np.abs(values[0, 0] - (data @ weights.T) ** 2).max())
