"""Rules of norms, softmax, attention, rotary positions and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from heliograph.autodiff.step import Rule, Step, composed, each, fitted, widened
from heliograph.functions.elementwise import where
from heliograph.graph.lowering import apply, cast, permute, reshape
from heliograph.graph.value import Value
from heliograph_proto.types import F32


def _mean(x: Value) -> Value:
    return apply("reduce_mean", x, axes=(-1,), keepdims=True)


def _sum(x: Value) -> Value:
    return apply("reduce_sum", x, axes=(-1,), keepdims=True)


def _norm(step: Step, g: Value) -> Value:
    x, g, y = widened(step[0]), widened(g), widened(step.result)
    centred = x - _mean(x)
    scale = apply("rsqrt", _mean(centred * centred) + step.attributes["eps"])
    return (g - _mean(g) - y * _mean(g * y)) * scale


def _l2_norm(step: Step, g: Value) -> Value:
    x, g, y, eps = widened(step[0]), widened(g), widened(step.result), step.attributes["eps"]
    length = apply("sqrt", _sum(x * x))
    is_long = length > eps
    tangent = where(is_long, g - y * _sum(g * y), g)
    return tangent / where(is_long, length, eps)


def _group_norm(attributes: Mapping[str, Any], x: Value) -> Value:
    """As in ggml: groups of ceil(channels / groups) channels, the last of the rest."""
    *lead, channels, height, width = x.shape
    step = max(1, -(-channels // attributes["groups"]))
    whole = channels // step * step
    parts = []
    for first, stop, size in ((0, whole, step), (whole, channels, channels - whole)):
        if stop > first:
            part = x[..., first:stop, :, :]
            rows = reshape(part, (*lead, (stop - first) // size, size * height * width))
            parts.append(reshape(apply("norm", rows, eps=attributes["eps"]), part.shape))
    return parts[0] if len(parts) == 1 else apply("concat", *parts, axis=x.ndim - 3)


# Softmax and attention


def _slopes(attributes: Mapping[str, Any], like: Value) -> Value | float:
    """ALiBi's slopes of the heads, axis -3, or 1."""
    max_bias = attributes["max_bias"]
    if not max_bias:
        return 1.0
    heads = like.shape[-3] if like.ndim > 2 else 1
    power = 2 ** int(math.log2(max(1, heads)))
    head = np.arange(heads)
    exponents = np.where(head < power, head + 1.0, (2.0 * (head - power) + 1.0) / 2.0)
    slopes = np.exp2(exponents * (-max_bias / power)).reshape((-1, 1, 1) if like.ndim > 2 else ())
    return like.graph.constant(slopes, like.dtype)


def _soft_max_mask(step: Step, g: Value) -> Value:
    scores = apply("soft_max_back", g, step.result, scale=1.0)
    return fitted(scores * _slopes(step.attributes, scores), step[1])


def _soft_max_sinks(step: Step, g: Value) -> Value:
    y = step.result
    each_row = -_sum(g * y) * (1.0 - _sum(y))
    if y.ndim < 3:
        return reshape(apply("reduce_sum", each_row, axes=(), keepdims=False), (1,))
    axes = tuple(axis for axis in range(y.ndim) if axis != y.ndim - 3)
    return apply("reduce_sum", each_row, axes=axes, keepdims=False)


def _attention(attributes: Mapping[str, Any], q: Value, k: Value, v: Value, *bias: Value) -> Value:
    """Scores, softmax and weighted sums, each a node."""
    scores, cap = apply("mul_mat", k, q), attributes["logit_softcap"]
    scale = attributes["scale"]
    scores = apply("tanh", scores * (scale / cap)) * cap if cap else scores * scale
    others, live = [], None
    if bias:
        mask = cast(bias[0], scores.dtype)
        if math.prod(mask.shape[:-2]) > 1:
            mask = apply("repeat", mask, shape=scores.shape)
        if len(bias) < 2:
            # A fully masked row is 0, where softmax has NaN.
            live = apply("reduce_max", mask, axes=(-1,), keepdims=True) > -math.inf
            mask = where(live, mask, 0.0)
        others = [mask, *bias[1:]]
    weights = apply("soft_max", scores, *others, max_bias=attributes["max_bias"])
    if live is not None:
        weights = where(live, weights, 0.0)
    return permute(apply("mul_mat", v.mT, weights), (0, 2, 1, 3))


def _paged_attention(
    attributes: Mapping[str, Any], q: Value, k: Value, v: Value, mask: Value, pages: Value, *sinks: Value
) -> Value:
    """Gathered pages, and their attention."""
    gathered = []
    for paged in (k, v):
        count, heads, page, width = paged.shape
        rows = reshape(paged, (count, heads * page * width))
        found = apply("get_rows", rows, reshape(pages, (pages.size,)))
        apart = permute(reshape(found, (*pages.shape, heads, page, width)), (0, 2, 1, 3, 4))
        gathered.append(reshape(apart, (pages.shape[0], heads, pages.shape[1] * page, width)))
    return _attention(attributes, q, *gathered, mask, *sinks)


# Gradients of gradients


def _rms_norm_back(attributes: Mapping[str, Any], g: Value, x: Value) -> Value:
    scale = apply("rsqrt", _mean(x * x) + attributes["eps"])
    return g * scale - x * _mean(g * x) * scale * scale * scale


def _soft_max_back(attributes: Mapping[str, Any], g: Value, y: Value) -> Value:
    return apply("scale", (g - _sum(g * y)) * y, scale=attributes["scale"])


def _silu_back(attributes: Mapping[str, Any], g: Value, x: Value) -> Value:
    s = apply("sigmoid", x)
    return g * s * (x * (1.0 - s) + 1.0)


# Positions and losses


def _rotated(op: str) -> Rule:
    def part(step: Step, g: Value) -> Value:
        return g.graph.apply(op, (g, *step.operands[1:]), step.attributes)

    return each(part)


def _timestep_embedding(attributes: Mapping[str, Any], timesteps: Value) -> Value:
    half = attributes["dim"] // 2
    falling = np.exp(-math.log(attributes["max_period"]) * np.arange(half) / max(1, half))
    angles = reshape(timesteps, (timesteps.size, 1)) * timesteps.graph.constant(falling, timesteps.dtype)
    parts = [apply("cos", angles), apply("sin", angles)]
    if attributes["dim"] % 2:
        parts.append(timesteps.graph.full((timesteps.size, 1), 0.0, timesteps.dtype))
    return cast(apply("concat", *parts, axis=1), F32)


def _log_softmax(x: Value) -> Value:
    centred = x - apply("reduce_max", x, axes=(-1,), keepdims=True)
    return centred - apply("log", _sum(apply("exp", centred)))


def _logits(step: Step, g: Value) -> Value:
    """Exact also for labels that do not add up to 1, unlike cross_entropy_loss_back."""
    logits, labels = widened(step[0]), widened(step[1])
    rows = float(logits.size // logits.shape[-1])
    return (apply("soft_max", logits) * _sum(labels) - labels) * (g / rows)


def _labels(step: Step, g: Value) -> Value:
    logits = widened(step[0])
    return -(_log_softmax(logits) * (g / float(logits.size // logits.shape[-1])))


def _loss_back(attributes: Mapping[str, Any], g: Value, logits: Value, labels: Value) -> Value:
    rows = float(logits.size // logits.shape[-1])
    return (apply("soft_max", logits) - labels) * (reshape(g, ()) / rows)


RULES: Mapping[str, Rule] = {
    "norm": each(_norm),
    "rms_norm": each(lambda step, g: apply("rms_norm_back", g, step[0], eps=step.attributes["eps"])),
    "l2_norm": each(_l2_norm),
    "group_norm": composed(_group_norm),
    "soft_max": each(
        lambda step, g: apply("soft_max_back", g, step.result, scale=step.attributes["scale"]),
        _soft_max_mask,
        _soft_max_sinks,
    ),
    "flash_attn_ext": composed(_attention),
    "flash_attn_paged": composed(_paged_attention),
    "rms_norm_back": composed(_rms_norm_back),
    "soft_max_back": composed(_soft_max_back),
    "silu_back": composed(_silu_back),
    "rope": _rotated("rope_back"),
    "rope_back": _rotated("rope"),
    "timestep_embedding": composed(_timestep_embedding),
    "cross_entropy_loss": each(_logits, _labels),
    "cross_entropy_loss_back": composed(_loss_back),
}
