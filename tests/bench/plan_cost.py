"""What a compiled plan costs above its kernels: 1,000 tiny nodes, fusion off."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np
from figures import Figure, seconds_of

import heliograph as hg
from heliograph.testing import running_daemon

NODES = 1_000
SHAPE = (16,)
#: Microseconds a node above NumPy's own calls.
BAR_US = 1.0
RUNS = 60
NUMPY = {"f32": np.float32, "f64": np.float64}


def chain(nodes: int, dtype: str) -> hg.Graph:
    """x + y + y + ...: each node depends on the one before."""
    graph = hg.Graph()
    x, y = graph.input("x", SHAPE, dtype), graph.input("y", SHAPE, dtype)
    for _ in range(nodes):
        x = x + y
    graph.output("z", x)
    return graph


def numpy_seconds(dtype: str) -> float:
    """The same additions as NumPy calls with out=, arguments bound beforehand."""
    x, y, z = (np.ones(SHAPE, NUMPY[dtype]) for _ in range(3))
    calls = [(x, y, z)] * NODES

    def run() -> None:
        for a, b, out in calls:
            np.add(a, b, out)

    return statistics.median(seconds_of(run, RUNS))


def plan_seconds(session: hg.Session, nodes: int, dtype: str) -> float:
    """A run of the chain, whole, as the client sees it."""
    plan = session.compile(chain(nodes, dtype), fusion=False)
    x = np.ones(SHAPE, NUMPY[dtype])
    run: Callable[[], object] = lambda: plan.run(x=x, y=x)  # noqa: E731
    return statistics.median(seconds_of(run, RUNS))


def figures() -> Iterator[Figure]:
    """Microseconds a node above NumPy's, in process and through the daemon less one round trip."""
    for dtype in ("f32", "f64"):
        with hg.connect("local:") as session:
            yield _figure(session, f"plan-cost/local-{dtype}", dtype)
    with running_daemon("--log-level", "warning") as url, hg.connect(url) as session:
        yield _figure(session, "plan-cost/daemon-f32", "f32")


def _figure(session: hg.Session, name: str, dtype: str) -> Figure:
    long, short = plan_seconds(session, NODES, dtype), plan_seconds(session, 1, dtype)
    above_us = (long - short - numpy_seconds(dtype)) / NODES * 1e6
    note = f"{long * 1e3:.2f} ms a run, {short * 1e3:.2f} ms with one node"
    return Figure(name, max(above_us, 0.0), BAR_US, 1.0, "us/node", "1 us above np.add(out=)", note)
