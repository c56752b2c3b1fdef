"""Functions of neural networks, of floats: activations, softmax, norms, attention."""

from __future__ import annotations

import math
from typing import Literal

from heliograph.functions.creation import tril
from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value

__all__ = [
    "gelu",
    "l2_normalize",
    "layer_norm",
    "log_softmax",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]


def sigmoid(x: Operand, /) -> Value:
    """1 / (1 + exp(-x))."""
    return lowering.unary("sigmoid", x)


def relu(x: Operand, /) -> Value:
    """max(x, 0); NaN stays."""
    return lowering.unary("relu", x)


def silu(x: Operand, /) -> Value:
    """x * sigmoid(x)."""
    return lowering.unary("silu", x)


def softplus(x: Operand, /) -> Value:
    """log(1 + exp(x)) without overflow."""
    return lowering.unary("softplus", x)


def gelu(x: Operand, /, approximate: Literal["none", "tanh"] = "none") -> Value:
    """x times the normal distribution's probability of x: exactly, by erf, or by tanh."""
    if approximate not in ("none", "tanh"):
        raise invalid(f"gelu: approximate is {approximate!r}", "it is 'none' or 'tanh'")
    return lowering.unary("gelu_erf" if approximate == "none" else "gelu", x)


def softmax(x: Operand, /, *, axis: int = -1) -> Value:
    """exp(x - max(x)) / sum along an axis."""
    value = lowering.one_value(x)
    return lowering.on_last_axis(value, axis, lambda rows: lowering.apply("soft_max", rows))


def log_softmax(x: Operand, /, *, axis: int = -1) -> Value:
    """log(softmax(x)), without taking the logarithm of a tiny number."""
    value = lowering.one_value(x)
    shifted = value - lowering.reduce("reduce_max", value, axis, True)
    total = lowering.reduce("reduce_sum", lowering.apply("exp", shifted), axis, True)
    return shifted - lowering.apply("log", total)


def layer_norm(
    x: Operand, weight: Operand | None = None, bias: Operand | None = None, *, eps: float = 1e-5
) -> Value:
    """(x - mean) / sqrt(variance + eps) of each row, then * weight + bias where given."""
    result = lowering.apply("norm", lowering.one_value(x), eps=float(eps))
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def rms_norm(x: Operand, weight: Operand | None = None, *, eps: float = 1e-5) -> Value:
    """x / sqrt(mean(x * x) + eps) of each row, then * weight where given."""
    result = lowering.apply("rms_norm", lowering.one_value(x), eps=float(eps))
    return result if weight is None else result * weight


def l2_normalize(x: Operand, /, *, axis: int = -1, eps: float = 1e-12) -> Value:
    """x / max(sqrt(sum(x * x)), eps) along an axis."""
    value = lowering.one_value(x)
    return lowering.on_last_axis(value, axis, lambda rows: lowering.apply("l2_norm", rows, eps=float(eps)))


def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Value:
    """softmax(query @ key^T * scale + mask) @ value, over the last two dimensions [length,
    features].

    The scale is 1 / sqrt(features) unless given; the mask is added and broadcasts to the scores.
    With `is_causal`, the n-th query takes the first n keys; there is no mask then.
    """
    left, right, values = lowering.promoted(query, key, value)
    if left.ndim < 2:
        raise invalid(f"attention of {left.type}", "queries, keys and values are [.., length, features]")
    factor = 1 / math.sqrt(left.shape[-1]) if scale is None else float(scale)
    scores = lowering.matmul(left, right.mT)
    if is_causal:
        if mask is not None:
            raise invalid("attention has a mask and is_causal", "add the causal order to the mask")
        graph = scores.graph
        taken = tril(graph.full(scores.shape[-2:], True, "bool"))
        mask = lowering.apply("where", taken, *(graph._scalar(one, scores.dtype) for one in (0, -math.inf)))
    operands = (scores,) if mask is None else (scores, lowering.lift(scores.graph, mask, scores.dtype))
    return lowering.matmul(lowering.apply("soft_max", *operands, scale=factor), values)
