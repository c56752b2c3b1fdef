"""What neural networks are made of: softmax, norms, attention. Of floats."""

from __future__ import annotations

import math

from heliograph import _lowering as lowering
from heliograph._lowering import Operand
from heliograph.value import Value


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
    scale: float | None = None,
) -> Value:
    """softmax(query @ key^T * scale + mask) @ value, over the last two dimensions [length, features].

    The scale is 1 / sqrt(features) unless given; the mask is added and broadcasts to the scores.
    """
    left, right, values = lowering.promoted(query, key, value)
    factor = 1 / math.sqrt(left.shape[-1]) if scale is None else float(scale)
    scores = lowering.matmul(left, right.mT)
    operands = (scores,) if mask is None else (scores, lowering.lift(scores.graph, mask, scores.dtype))
    return lowering.matmul(lowering.apply("soft_max", *operands, scale=factor), values)
