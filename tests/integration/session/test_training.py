"""A small model trained by the op table's ops of training, whose weights and moments are variables."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

import heliograph as hg

SEED = 20250314
SAMPLES, FEATURES, CLASSES = 64, 8, 3
Array: TypeAlias = np.ndarray[Any, Any]


@pytest.fixture
def batch() -> dict[str, Array]:
    """Samples, and the classes that a linear rule gives them, one column for each."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    x = random.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    best = (x @ random.standard_normal((FEATURES, CLASSES))).argmax(-1)
    return {"x": x, "labels": np.eye(CLASSES, dtype=np.float32)[best]}


def model() -> tuple[hg.Graph, hg.Value, hg.Value]:
    """A linear classifier of a batch: its graph, its weights, and the gradient of the loss by them."""
    g = hg.Graph()
    x, labels = g.input("x", (SAMPLES, FEATURES), "f32"), g.input("labels", (SAMPLES, CLASSES), "f32")
    weights = g.variable("weights", (CLASSES, FEATURES), "f32")
    logits = hg.ops.mul_mat(weights, x)
    g.output("loss", hg.ops.cross_entropy_loss(logits, labels))
    slopes = hg.ops.cross_entropy_loss_back(g.constant(np.ones((), np.float32)), logits, labels)
    gradient = hg.ops.out_prod(x, slopes)
    g.output("gradient", gradient)
    return g, weights, gradient


def feeds(batch: dict[str, Array], parameters: list[float]) -> dict[str, Any]:
    """The inputs of a step."""
    return {**batch, "parameters": np.array(parameters, np.float32)}


def loss(weights: Array, batch: dict[str, Array]) -> tuple[float, Array]:
    """The same in float64: the loss and its gradient."""
    logits = batch["x"].astype(float) @ weights.T
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True)
    value = -(batch["labels"] * np.log(shares)).sum(-1).mean()
    return float(value), (shares - batch["labels"]).T @ batch["x"] / SAMPLES


def test_steps_of_sgd_are_those_of_the_formula_and_the_loss_falls(
    session: hg.Session, batch: dict[str, Array]
) -> None:
    g, weights, gradient = model()
    hg.assign(weights, hg.ops.opt_step_sgd(weights, gradient, g.input("parameters", (2,), "f32")))
    plan, expected, losses = session.compile(g), np.zeros((CLASSES, FEATURES)), []
    alpha, decay = 0.5, 0.01
    for _ in range(20):
        found = plan.run(**feeds(batch, [alpha, decay]))
        value, slope = loss(expected, batch)
        np.testing.assert_allclose(found["loss"], value, rtol=1e-5)
        np.testing.assert_allclose(found["gradient"], slope, rtol=1e-3, atol=1e-6)
        expected = expected * (1 - alpha * decay) - alpha * slope
        losses.append(value)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


def test_steps_of_adamw_keep_their_moments_in_variables(session: hg.Session, batch: dict[str, Array]) -> None:
    g, weights, gradient = model()
    m, v = (g.variable(name, (CLASSES, FEATURES), "f32") for name in ("m", "v"))
    after = hg.ops.opt_step_adamw(weights, gradient, m, v, g.input("parameters", (7,), "f32"))
    for place, variable in enumerate((weights, m, v)):
        hg.assign(variable, after[place])
    plan, expected = session.compile(g), np.zeros((3, CLASSES, FEATURES))
    alpha, beta1, beta2, eps, decay = 0.05, 0.9, 0.99, 1e-8, 0.1
    for turn in range(1, 11):
        scales = [1 / (1 - beta1**turn), 1 / (1 - beta2**turn)]
        found = plan.run(**feeds(batch, [alpha, beta1, beta2, eps, decay, *scales]))
        (w, first, second), (value, slope) = expected, loss(expected[0], batch)
        np.testing.assert_allclose(found["loss"], value, rtol=1e-5)
        first, second = beta1 * first + (1 - beta1) * slope, beta2 * second + (1 - beta2) * slope**2
        step = alpha * first * scales[0] / (np.sqrt(second * scales[1]) + eps)
        expected = np.stack([w * (1 - alpha * decay) - step, first, second])
    kept = plan.checkpoint()
    for name, now in zip(("weights", "m", "v"), expected, strict=True):
        np.testing.assert_allclose(kept[name], now, rtol=1e-3, atol=1e-5)
