"""Loops that are fed while they run, and the same computation in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import heliograph as hg
from heliograph_proto.commands import MAX_LOOP_STEPS

Array = np.ndarray[Any, Any]

SECONDS = 60.0
ROWS, WIDTH = 4, 3
X = np.zeros((ROWS, WIDTH), np.float32)


def adding(last: int = 0) -> hg.Graph:
    """x is halved and grows by b, and n counts; the loop ends when it is the last one."""
    g = hg.Graph()
    x, b = g.input("x", (ROWS, WIDTH), "f32"), g.input("b", (ROWS, WIDTH), "f32")
    n = g.input("n", (), "i32")
    with g.scope("half"):
        half = x * 0.5
    g.output("y", half + b)
    g.output("same", x * 1.0)
    g.output("m", n + 1)
    g.output("done", hg.equal(n + 1, last))
    return g


CARRY = {"y": "x", "m": "n"}
FED = ["x", "b"]
N = np.int32(0)


def endless(plan: Any, **options: Any) -> Any:
    """A loop that only stops when it is told to."""
    loop = {"x": X, "b": X, "n": N, "steps": MAX_LOOP_STEPS, "carry": CARRY, "feed": FED, **options}
    return plan.loop(**loop)


class Replay:
    """The same computation in NumPy, given the steps that took the feeds."""

    def __init__(self) -> None:
        self.x, self.b, self.step = X.copy(), X.copy(), 0

    def run(self, until: int) -> None:
        for _ in range(until - self.step):
            self.x = self.x * np.float32(0.5) + self.b
            self.step += 1

    def feed(self, values: dict[str, Array], rows: list[int] | None) -> None:
        for name, value in values.items():
            mine = getattr(self, name)
            mine[slice(None) if rows is None else rows] = value


def random_feed(random: np.random.Generator) -> tuple[dict[str, Array], list[int] | None]:
    """Some rows, or all, of one input or of both; whole numbers, so that sums are exact."""
    names = [name for name in FED if random.random() < 0.6] or ["x"]
    rows = None
    if random.random() < 0.7:
        rows = [int(one) for one in random.permutation(ROWS)[: random.integers(1, ROWS + 1)]]
    shape = (ROWS if rows is None else len(rows), WIDTH)
    return {name: random.integers(-8, 8, shape).astype(np.float32) for name in names}, rows


def check_random_feeds(plan: hg.Plan, steps: int, feeds: int, seed: int) -> None:
    """A loop with feeds at random moments computes what NumPy does at the steps that are told."""
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    loop = endless(plan, steps=steps)
    sent, too_late = [], 0
    for _ in range(feeds):
        values, rows = random_feed(random)
        sent.append((values, rows, loop.feed(values, rows=rows)))
        if random.random() < 0.3:
            # Wait for a step, and so for a random number of them.
            sent[-1][2].exception(SECONDS)
    found, replay, before = loop.result(SECONDS), Replay(), 0
    for values, rows, fed in sent:
        if isinstance(fed.exception(SECONDS), hg.LoopEndedError):
            too_late += 1
            continue
        assert not too_late
        step = fed.result()
        assert before <= step < steps
        replay.run(step)
        replay.feed(values, rows)
        before = step
    replay.run(steps)
    assert loop.steps == steps
    assert np.array_equal(found["y"], replay.x)
