"""Optimizers as parts of a graph: their steps against the formulas in float64, and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]
STEPS = 6


def sgd(w: Array, d: Array, state: dict[str, Any], **how: Any) -> Array:
    d = d + how.get("weight_decay", 0) * w
    share = how.get("momentum", 0)
    state["v"] = share * state.get("v", 0) + d
    step = d + share * state["v"] if how.get("nesterov") else state["v"]
    return w - 0.1 * step


def adam(w: Array, d: Array, state: dict[str, Any], *, decay: float = 0, apart: float = 0) -> Array:
    d = d + decay * w
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * d
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * d * d
    step = state["m"] / (1 - 0.9**t) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8)
    return w - 0.1 * apart * w - 0.1 * step


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Array]]] = {
    "sgd": (hg.optim.sgd, {}, sgd),
    "decay": (hg.optim.sgd, {"weight_decay": 0.1}, sgd),
    "momentum": (hg.optim.sgd, {"momentum": 0.9}, sgd),
    "nesterov": (hg.optim.sgd, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}, sgd),
    "adam": (hg.optim.adam, {}, adam),
    "adam with decay": (
        hg.optim.adam, {"weight_decay": 0.1}, lambda w, d, state, **_: adam(w, d, state, decay=0.1)
    ),
    "adamw": (
        hg.optim.adamw, {"weight_decay": 0.1}, lambda w, d, state, **_: adam(w, d, state, apart=0.1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_formula(local: hg.Session, case: str, dtype: str) -> None:
    optimizer, how, formula = CASES[case]
    start, aim = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.2, -4.0])
    g = hg.Graph()
    with g.scope(f"{case} {dtype}"):
        w = g.variable("w", (3,), dtype, init=start)
        loss = hg.sum((w - aim.astype(dtype.replace("f", "float"))) ** 2)
        new = optimizer(w, hg.grad(loss, w), 0.1, **how)
    g.output("w", new)
    plan, expected, state = local.compile(g), start, {}
    for _ in range(STEPS):
        expected = formula(expected, 2 * (expected - aim), state, **how)
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype == "f32" else {"rtol": 1e-12}
        np.testing.assert_allclose(plan.run()["w"], expected, **close)


def test_the_rate_may_be_an_input_and_the_variables_a_structure(local: hg.Session) -> None:
    g = hg.Graph()
    rate = g.input("rate", (), "f32")
    model = {"w": g.variable("rated/w", (2,), "f32", init=1.0), "b": [g.variable("rated/b", (), "f32")]}
    loss = hg.sum(model["w"] * 3.0) + model["b"][0]
    new = hg.optim.sgd(model, hg.grad(loss, model), rate)
    assert new["b"][0].shape == ()
    g.output("w", new["w"])
    plan = local.compile(g)
    assert plan.run(rate=np.float32(0.5))["w"].tolist() == [-0.5, -0.5]
    assert plan.run(rate=np.float32(0))["w"].tolist() == [-0.5, -0.5]


def test_narrow_weights_move_by_steps_in_f32_with_state_in_f32(local: hg.Session) -> None:
    g = hg.Graph()
    w = g.variable("narrow", (2,), "f16", init=1.0)
    g.output("w", hg.optim.adam(w, hg.grad(hg.sum(w * w), w), 0.25))
    plan = local.compile(g)
    assert plan.run()["w"].tolist() == [0.75, 0.75]
    assert {name: one.dtype.name for name, one in g.variables.items()} == {
        "narrow": "f16", "adam/narrow/m": "f32", "adam/narrow/v": "f32", "adam/t": "i64",
    }  # fmt: skip


def test_a_checkpoint_has_the_state(local: hg.Session) -> None:
    g = hg.Graph()
    w = g.variable("kept", (), "f32", init=1.0)
    g.output("w", hg.optim.adamw(w, hg.grad(w * w, w), 0.1))
    plan = local.compile(g)
    plan.run()
    taken = plan.checkpoint()
    after = [float(plan.run()["w"]) for _ in range(2)]
    plan.restore(taken)
    assert taken["adamw/t"] == 1 and [float(plan.run()["w"]) for _ in range(2)] == after


def test_arguments_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    w, x = g.variable("w", (2,), "f32"), g.input("x", (2,), "f32")
    d = hg.grad(hg.sum(w * x), w)
    for message, call in {
        "the learning rate is 'fast'": lambda: hg.optim.sgd(w, d, "fast"),
        "momentum is 1": lambda: hg.optim.sgd(w, d, 0.1, momentum=1.0),
        "nesterov without momentum": lambda: hg.optim.sgd(w, d, 0.1, nesterov=True),
        "weight_decay is -1": lambda: hg.optim.adamw(w, d, 0.1, weight_decay=-1),
        "beta2 is 1": lambda: hg.optim.adam(w, d, 0.1, beta2=1.0),
        "their structures differ": lambda: hg.optim.sgd([w], d, 0.1),
        "its gradient": lambda: hg.optim.sgd(w, d[:1], 0.1),
        "is no variable": lambda: hg.optim.sgd(x, d, 0.1),
        "no name of an optimizer": lambda: hg.optim.sgd(w, d, 0.1, name=""),
    }.items():
        with pytest.raises((hg.InvalidArgumentError, hg.InvalidGraphError), match=message) as caught:
            call()
        assert "test_optim.py" in caught.value.origin.source
