"""`hg.random`: draws that a seed and a counter name, and their distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]
MANY = 40_000


def draw(
    session: hg.Session, function: Callable[..., hg.Value], shape: Any, counter: int = 0, **how: Any
) -> Array:
    g = hg.Graph()
    y = function(shape, 7, g.input("counter", (), "i64"), **how)
    g.output("y", y)
    found: Array = session.compute(g, counter=np.int64(counter))["y"]
    assert found.shape == y.shape
    return found


def test_a_counter_names_a_draw(local: hg.Session) -> None:
    for function in (hg.random.uniform, hg.random.normal, hg.random.bernoulli):
        first, again, other = (draw(local, function, (64,), counter) for counter in (5, 5, 6))
        assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_uniform_numbers_fill_their_range(local: hg.Session) -> None:
    for dtype in ("f32", "f64", "f16"):
        found = draw(local, hg.random.uniform, (MANY,), low=-2.0, high=3.0, dtype=dtype)
        assert found.min() >= -2 and found.max() <= 3
        counts = np.histogram(found.astype(float), 8, (-2, 3))[0]
        assert abs(counts - MANY / 8).max() < MANY / 80
        assert found.dtype.itemsize == {"f32": 4, "f64": 8, "f16": 2}[dtype]


def test_normal_numbers_have_their_mean_their_deviation_and_their_tails(local: hg.Session) -> None:
    for dtype, shape in (("f32", (MANY,)), ("f64", (MANY // 8 + 1, 7))):
        found = draw(local, hg.random.normal, shape, mean=1.0, std=2.0, dtype=dtype).astype(float)
        score = (found.reshape(-1) - 1) / 2
        assert abs(score.mean()) < 0.03 and abs(score.std() - 1) < 0.03
        assert abs((np.abs(score) < 1).mean() - 0.6827) < 0.02 and np.isfinite(score).all()
        assert abs((score > 2).mean() - 0.0228) < 0.006
        # The two halves of the pairs do not follow each other.
        half = len(score) // 2
        assert abs(np.corrcoef(score[:half], score[half : 2 * half])[0, 1]) < 0.03


def test_bools_are_true_with_their_probability(local: hg.Session) -> None:
    g = hg.Graph()
    p = g.constant(np.array([0.0, 0.25, 1.0], np.float32))
    g.output("y", hg.random.bernoulli((MANY, 3), 3, 1, p=p))
    share = local.compute(g)["y"].mean(0)
    assert share[0] == 0 and share[2] == 1 and abs(share[1] - 0.25) < 0.01
    assert abs(draw(local, hg.random.bernoulli, MANY, p=0.9).mean() - 0.9) < 0.01


def test_empty_and_scalar_draws_have_their_shapes(local: hg.Session) -> None:
    for function in (hg.random.uniform, hg.random.normal, hg.random.bernoulli):
        assert draw(local, function, ()).shape == () and draw(local, function, (2, 0)).shape == (2, 0)
        assert draw(local, function, 3).shape == (3,)


def test_a_variable_that_counts_makes_each_run_another_draw(local: hg.Session) -> None:
    g = hg.Graph()
    counter = g.variable("draws", (), "i64")
    g.output("y", hg.random.normal((4,), 0, hg.assign(counter, counter + 1)))
    plan = local.compile(g)
    assert not np.array_equal(plan.run()["y"], plan.run()["y"])


def test_arguments_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    x = g.input("x", (2,), "f32")
    for message, call in {
        "which graph": lambda: hg.random.uniform((2,), 1, 2),
        "the seed is 1.5": lambda: hg.random.uniform((2,), 1.5, 2, graph=g),
        "the counter is": lambda: hg.random.uniform((2,), 1, x),
        "random numbers of i32": lambda: hg.random.normal((2,), 1, 2, dtype="i32", graph=g),
        "p is 2": lambda: hg.random.bernoulli((2,), 1, 2, p=2, graph=g),
        "broadcast to": lambda: hg.random.normal((1,), 1, 2, mean=x, graph=g),
    }.items():
        with pytest.raises((hg.InvalidArgumentError, hg.InvalidGraphError), match=message) as caught:
            call()
        assert "test_random.py" in caught.value.origin.source
