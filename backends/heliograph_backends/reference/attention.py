"""Formulas: softmax with ALiBi and sinks, attention, and group norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import (
    Array,
    Attributes,
    Formula,
    accumulated,
    check_indices,
    constant,
    cycled,
    in_wide,
)
from heliograph_backends.reference.basic import norm
from heliograph_backends.reference.products import repeated_matmul

#: The most scores held at once, unless one row of all heads has more.
BLOCK_SCORES = 2**23


def alibi_slopes(xp: Any, heads: int, max_bias: float) -> Array:
    """Return ALiBi's slope of each head, [heads] (Press et al., 2021): powers of 2**(-max_bias /
    heads).

    If the number of heads is not a power of two, the heads beyond the largest one have the odd
    powers of the square root, as in ggml.
    """
    power = 2 ** int(math.log2(max(1, heads)))
    head = xp.arange(heads)
    exponents = xp.where(head < power, head + 1.0, (2.0 * (head - power) + 1.0) / 2.0)
    return xp.exp2(exponents * (-max_bias / power))


def by_head(values: Array, ndim: int) -> Array:
    """Reshape one value per head to broadcast over matrices [.., heads, rows, columns]."""
    return values.reshape(-1, 1, 1) if ndim > 2 else values.reshape(())


def soft_max(
    xp: Any, attributes: Attributes, x: Array, mask: Array | None = None, sinks: Array | None = None
) -> Array:
    """Softmax of rows; a sink is one more score in each row of its head, without a column in the
    result."""
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
    """Return the mask times each head's slope, in the data type of the scores."""
    mask = mask.astype(scores.dtype, copy=False)
    if not attributes["max_bias"]:
        return mask
    heads = scores.shape[-3] if scores.ndim > 2 else 1
    slopes = alibi_slopes(xp, heads, attributes["max_bias"]).astype(scores.dtype)
    return by_head(slopes, scores.ndim) * mask


def flash_attn_ext(
    xp: Any,
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention in parts of some rows of q, whose number depends only on shapes: [batch, rows,
    heads, dv]."""
    batch, heads, rows, _ = q.shape
    (k, v) = accumulated(xp, k, v)
    result = xp.empty((batch, rows, heads, v.shape[-1]), k.dtype)
    step = max(1, BLOCK_SCORES // max(1, batch * heads * k.shape[-2]))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        (some,) = accumulated(xp, q[:, :, part])
        some_mask = None if mask is None else mask[..., part, :]
        found = _attend(xp, attributes, some, k, v, some_mask, sinks)
        result[:, part] = found.transpose(0, 2, 1, 3)
    return result


def flash_attn_paged(
    xp: Any,
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    pages: Array,
    sinks: Array | None = None,
) -> Array:
    """Attention over the gathered pages of each row: [batch, rows, heads, dv]."""
    check_indices("flash_attn_paged", pages, k.shape[0], "pages")
    k, v = (_in_order(each, pages) for each in (k, v))
    return flash_attn_ext(xp, attributes, q, k, v, mask, sinks)


def _in_order(paged: Array, pages: Array) -> Array:
    """Gather the pages of each row: [batch, heads, positions, width]."""
    _, heads, page, width = paged.shape
    batch, used = pages.shape
    return paged[pages].swapaxes(1, 2).reshape(batch, heads, used * page, width)


def _attend(
    xp: Any,
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    sinks: Array | None,
) -> Array:
    """Attention of whole rows of scores; a fully masked row without a sink is 0."""
    scores = _scores(xp, attributes, q, k)
    if mask is not None:
        # An infinite mask hides a key, whatever the score and the slope are.
        scores = scores + scaled_mask(xp, attributes, cycled(xp, mask, scores.shape), scores)
    # Without keys there is no largest score.
    top = scores.max(-1, keepdims=True) if k.shape[-2] else xp.full((*q.shape[:-1], 1), -math.inf, q.dtype)
    if sinks is not None:
        top = xp.maximum(top, by_head(sinks, 4).astype(scores.dtype))
    shift = xp.where(xp.isneginf(top), constant(scores, 0), top)
    powers = xp.exp(scores - shift)
    total = powers.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(by_head(sinks, 4).astype(scores.dtype) - shift)
    weights = powers / xp.where(total == 0, constant(total, 1), total)
    # Several heads of q share one of k and v, so v^T stands on the left of the product.
    return repeated_matmul(xp, v.swapaxes(-1, -2), weights.swapaxes(-1, -2)).swapaxes(-1, -2)


def _scores(xp: Any, attributes: Attributes, q: Array, k: Array) -> Array:
    cap = attributes["logit_softcap"]
    scores = repeated_matmul(xp, k, q.swapaxes(-1, -2)).swapaxes(-1, -2)
    if not cap:
        return scores * constant(scores, attributes["scale"])
    return constant(scores, cap) * xp.tanh(scores * constant(scores, attributes["scale"] / cap))


def group_norm(xp: Any, attributes: Attributes, x: Array) -> Array:
    """Group norm; as in ggml, groups have ceil(channels / groups) channels and the last has the
    rest."""
    channels = x.shape[-3]
    step = max(1, -(-channels // attributes["groups"]))
    whole = channels // step * step
    parts = [x[..., :whole, :, :], x[..., whole:, :, :]]
    found = [_norm_of(xp, attributes, part, step) for part in parts if part.shape[-3]]
    return xp.concatenate(found, axis=-3) if found else x


def _norm_of(xp: Any, attributes: Attributes, x: Array, step: int) -> Array:
    """Normalise every `step` channels of x [.., channels, h, w] together."""
    *lead, channels, height, width = x.shape
    count = max(1, channels // step)
    rows = x.reshape(*lead, count, channels // count * height * width)
    return norm(xp, attributes, rows).reshape(x.shape)


FORMULAS: Mapping[str, Formula] = {
    "soft_max": in_wide(soft_max),
    "flash_attn_ext": flash_attn_ext,
    "flash_attn_paged": flash_attn_paged,
    "group_norm": in_wide(group_norm),
}
