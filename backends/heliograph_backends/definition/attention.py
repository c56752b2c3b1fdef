"""Formulas: softmax with ALiBi and sinks, and group norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph_backends.definition.base import Array, Attributes, Formula, constant, in_wide
from heliograph_backends.definition.basic import norm


def alibi_slopes(xp: Any, heads: int, max_bias: float) -> Array:
    """ALiBi's slope of each head, [heads] (Press et al., 2021): powers of 2**(-max_bias / heads).

    Where heads is no power of two, the heads beyond it have the odd powers of the square root, as in ggml.
    """
    power = 2 ** int(math.log2(max(1, heads)))
    head = xp.arange(heads)
    exponents = xp.where(head < power, head + 1.0, (2.0 * (head - power) + 1.0) / 2.0)
    return xp.exp2(exponents * (-max_bias / power))


def by_head(values: Array, ndim: int) -> Array:
    """One value for each head, shaped so that it repeats over matrices [.., heads, rows, columns]."""
    return values.reshape(-1, 1, 1) if ndim > 2 else values.reshape(())


def soft_max(
    xp: Any, attributes: Attributes, x: Array, mask: Array | None = None, sinks: Array | None = None
) -> Array:
    """A sink is one more score of each row of its head, without a column in the result."""
    x = x * constant(x, attributes["scale"])
    if mask is not None:
        x = x + scaled_mask(xp, attributes, mask, x)
    top = x.max(-1, keepdims=True)
    if sinks is None:
        powers = xp.exp(x - top)
        return powers / powers.sum(-1, keepdims=True)
    sink = by_head(sinks, x.ndim).astype(x.dtype)
    top = xp.maximum(top, sink)
    powers = xp.exp(x - top)
    return powers / (powers.sum(-1, keepdims=True) + xp.exp(sink - top))


def scaled_mask(xp: Any, attributes: Attributes, mask: Array, scores: Array) -> Array:
    """The mask times each head's slope, in the data type of the scores."""
    mask = mask.astype(scores.dtype, copy=False)
    if not attributes["max_bias"]:
        return mask
    heads = scores.shape[-3] if scores.ndim > 2 else 1
    slopes = alibi_slopes(xp, heads, attributes["max_bias"]).astype(scores.dtype)
    return by_head(slopes, scores.ndim) * mask


def group_norm(xp: Any, attributes: Attributes, x: Array) -> Array:
    """As in ggml, groups have ceil(channels / groups) channels, and the last one what is left."""
    channels = x.shape[-3]
    step = max(1, -(-channels // attributes["groups"]))
    whole = channels // step * step
    parts = [x[..., :whole, :, :], x[..., whole:, :, :]]
    found = [_norm_of(xp, attributes, part, step) for part in parts if part.shape[-3]]
    return xp.concatenate(found, axis=-3) if found else x


def _norm_of(xp: Any, attributes: Attributes, x: Array, step: int) -> Array:
    """Each `step` channels of x [.., channels, h, w] normalised together."""
    *lead, channels, height, width = x.shape
    count = max(1, channels // step)
    rows = x.reshape(*lead, count, channels // count * height * width)
    return norm(xp, attributes, rows).reshape(x.shape)


FORMULAS: Mapping[str, Formula] = {"soft_max": in_wide(soft_max), "group_norm": in_wide(group_norm)}
