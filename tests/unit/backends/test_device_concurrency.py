"""Nodes of one device that run at the same time: how many is the device's, and explain() tells which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.cpu import kernels
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry

if not kernels.available():
    pytest.skip("numba is not installed", allow_module_level=True)

X = np.linspace(-1, 1, 64 * 96, dtype=np.float32).reshape(64, 96)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    devices = [CpuDevice(f"cpu{place}", 2, concurrency=most) for place, most in enumerate((1, 2, 8))]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))
    with hg.connect("local:") as made:
        yield made


def heads() -> hg.Graph:
    """Queries, keys and values of one operand, and what is made of them."""
    random = np.random.default_rng(20261121)
    g = hg.Graph()
    x = g.input("x", X.shape, "f32")
    q, k, v = (x @ g.weight(name, random.standard_normal((96, 96), np.float32)) for name in "qkv")
    g.output("y", hg.softmax(q @ k.T / 10.0) @ v)
    return g


@pytest.mark.parametrize(
    ("device", "together"),
    # Where two run at the same time, the values do so with the scores.
    [("cpu0", [0, 0, 0, 0, 0]), ("cpu1", [1, 1, 2, 2, 0]), ("cpu2", [1, 1, 1, 0, 0])],
)
def test_what_needs_nothing_of_the_others_runs_beside_them(
    session: hg.Session, device: str, together: list[int]
) -> None:
    found = session.compile(heads(), device).explain()
    assert [node.concurrent for node in found.nodes if node.op == "matmul"] == together
    assert "together" in found.table(nodes=True)


def test_each_node_has_the_step_that_computes_it(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 8), "f32")
    y = hg.relu(x @ g.weight("w", np.ones((8, 8), np.float32)) + 0.5)
    g.output("y", hg.softmax(y))
    together = session.compile(g).explain()
    steps = [(node.op, node.step) for node in together.nodes]
    assert ("matmul", 1) in steps and ("add", 1) in steps and ("fill", 0) in steps and steps[-1][1] == 2
    assert " step " in together.table(nodes=True)
    alone = [node.step for node in session.compile(g, fusion=False).explain().nodes if node.step]
    assert alone == sorted(set(alone)) and len(alone) == 4
    several = session.compile(g, ["cpu0", "cpu1"], pins={lambda node: node.op == "soft_max": "cpu1"})
    assert [node.step for node in several.explain().nodes if node.op in ("matmul", "soft_max")] == [1, 1]


def test_results_do_not_depend_on_how_many_run_at_the_same_time(session: hg.Session) -> None:
    results = [session.compute(heads(), x=X, devices=f"cpu{place}")["y"] for place in range(3)]
    assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_splits_have_sets_of_their_own(session: hg.Session) -> None:
    plan = session.compile(heads(), ["cpu2", "cpu1"], pins={lambda node: node.op == "soft_max": "cpu1"})
    found = plan.explain()
    assert len(found.splits) == 2
    assert [node.concurrent for node in found.nodes if node.op == "matmul"] == [1, 1, 1, 0, 0]
