"""Formulas: gradients, losses, and optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference import basic, rope, rows
from heliograph_backends.reference.base import (
    Array,
    Attributes,
    Formula,
    accumulated,
    check_indices,
    constant,
    in_wide,
)


def repeat_back(xp: Any, attributes: Attributes, x: Array) -> Array:
    """Split each dimension into tiles and places in a tile, then add up the tiles."""
    shape = tuple(attributes["shape"])
    aligned = (1,) * (x.ndim - len(shape)) + shape
    counts = [have // size for have, size in zip(x.shape, aligned, strict=True)]
    split = [part for pair in zip(counts, aligned, strict=True) for part in pair]
    return x.reshape(split).sum(tuple(range(0, 2 * x.ndim, 2))).reshape(shape)


def relu_back(xp: Any, attributes: Attributes, gradient: Array, x: Array) -> Array:
    return xp.where(x <= 0, constant(x, 0), gradient)


def silu_back(xp: Any, attributes: Attributes, gradient: Array, x: Array) -> Array:
    one, sigmoid = constant(x, 1), basic.sigmoid(xp, attributes, x)
    return gradient * sigmoid * (one + x * (one - sigmoid))


def rms_norm_back(xp: Any, attributes: Attributes, gradient: Array, x: Array) -> Array:
    """With y = x / r: (gradient - y * mean(gradient * y)) / r."""
    root = xp.sqrt((x * x).mean(-1, keepdims=True) + constant(x, attributes["eps"]))
    y = x / root
    return (gradient - y * (gradient * y).mean(-1, keepdims=True)) / root


def soft_max_back(xp: Any, attributes: Attributes, gradient: Array, y: Array) -> Array:
    inner = (gradient * y).sum(-1, keepdims=True)
    return constant(y, attributes["scale"]) * y * (gradient - inner)


def rope_back(
    xp: Any, attributes: Attributes, gradient: Array, positions: Array, factors: Array | None = None
) -> Array:
    """The gradient of a rotation is the rotation back; angles are proportional to positions."""
    return rope.rope(xp, attributes, gradient, -positions.astype(xp.int64), factors)


def get_rows_back(xp: Any, attributes: Attributes, gradient: Array, indices: Array) -> Array:
    check_indices("get_rows_back", indices, attributes["rows"], "rows")
    (gradient,) = accumulated(xp, gradient)
    result = xp.zeros((*gradient.shape[:-2], attributes["rows"], gradient.shape[-1]), gradient.dtype)
    rows.combine(xp, xp.add, result, indices, gradient)
    return result


def cross_entropy_loss(xp: Any, attributes: Attributes, logits: Array, labels: Array) -> Array:
    logits, labels = accumulated(xp, logits, labels)
    shifted = logits - logits.max(-1, keepdims=True)
    logarithms = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
    return -(labels * logarithms).sum(-1).mean()


def cross_entropy_loss_back(
    xp: Any, attributes: Attributes, gradient: Array, logits: Array, labels: Array
) -> Array:
    gradient, logits, labels = accumulated(xp, gradient, logits, labels)
    powers = xp.exp(logits - logits.max(-1, keepdims=True))
    count = constant(logits, logits.size // logits.shape[-1])
    return (powers / powers.sum(-1, keepdims=True) - labels) * (gradient.reshape(()) / count)


def opt_step_adamw(
    xp: Any, attributes: Attributes, weights: Array, gradient: Array, m: Array, v: Array, parameters: Array
) -> Array:
    """AdamW (Loshchilov and Hutter, 2019): the decay applies to the weights, not to the loss."""
    alpha, beta1, beta2, eps, decay, scale1, scale2 = parameters.astype(weights.dtype)
    one = constant(weights, 1)
    m = m * beta1 + gradient * (one - beta1)
    v = v * beta2 + gradient * gradient * (one - beta2)
    step = alpha * (m * scale1) / (xp.sqrt(v * scale2) + eps)
    return xp.stack([weights * (one - alpha * decay) - step, m, v])


def opt_step_sgd(
    xp: Any, attributes: Attributes, weights: Array, gradient: Array, parameters: Array
) -> Array:
    alpha, decay = parameters.astype(weights.dtype)
    return weights * (constant(weights, 1) - alpha * decay) - alpha * gradient


FORMULAS: Mapping[str, Formula] = {
    "repeat_back": in_wide(repeat_back),
    "relu_back": relu_back,
    "silu_back": in_wide(silu_back),
    "rms_norm_back": in_wide(rms_norm_back),
    "soft_max_back": in_wide(soft_max_back),
    "rope_back": in_wide(rope_back),
    "get_rows_back": get_rows_back,
    "cross_entropy_loss": cross_entropy_loss,
    "cross_entropy_loss_back": cross_entropy_loss_back,
    "opt_step_adamw": in_wide(opt_step_adamw),
    "opt_step_sgd": in_wide(opt_step_sgd),
}
