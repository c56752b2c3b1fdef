"""A graph with two large weights, for the devices of several daemons."""

from __future__ import annotations

from typing import Any

import numpy as np

import heliograph as hg
import heliograph.aio

DEVICE = "cpu:threads=1,memory=256MiB"
X = np.ones((2, 512), np.float32)
SECONDS = 60


def weights(seed: int, size_bytes: int = 2**20) -> list[np.ndarray[Any, Any]]:
    """Two matrices, so that 512 elements become 512 again."""
    random, rows = np.random.default_rng(seed), size_bytes // 4 // 512
    return [random.random((512, rows), np.float32), random.random((rows, 512), np.float32)]


def graph(arrays: list[np.ndarray[Any, Any]]) -> hg.Graph:
    g = hg.Graph()
    x, first, second = (
        g.input("x", X.shape, "f32"),
        g.weight("first", arrays[0]),
        g.weight("second", arrays[1]),
    )
    with g.scope("front"):
        hidden = x @ first
    with g.scope("behind"):
        y = hidden @ second
    g.output("y", y)
    return g


def expected(arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    with hg.connect("local:") as session:
        found: np.ndarray[Any, Any] = session.compile(graph(arrays)).run(x=X)["y"]
    return found


def compiled(session: hg.Session, arrays: list[np.ndarray[Any, Any]]) -> hg.Plan:
    """On the members: the first matrix on one, the other on the other."""
    _, first, second = [one.name for one in session.devices]
    pins = {"front/*": first, "behind/*": second}
    return session.compile(graph(arrays), [first, second], pins=pins, timeout=SECONDS)
