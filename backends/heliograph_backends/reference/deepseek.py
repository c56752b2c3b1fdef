"""Formulas: DeepSeek's lightning indexer, and the mixes of its hyper-connections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, accumulated, constant, cycled
from heliograph_backends.reference.basic import sigmoid


def lightning_indexer(
    xp: Any, attributes: Attributes, q: Array, k: Array, weights: Array, mask: Array
) -> Array:
    """Sum over the heads one by one, so that no more scores are held than there are results."""
    q, k, weights = accumulated(xp, q, k, weights)
    keys = k[:, :, 0].swapaxes(-1, -2)
    result = xp.zeros((q.shape[0], q.shape[1], k.shape[1]), q.dtype)
    for head in range(q.shape[2]):
        scores = xp.matmul(q[:, :, head], keys)
        result += xp.maximum(scores, constant(scores, 0)) * weights[:, 0, :, head, None]
    # The masks repeat over the streams.
    return result[:, None] + cycled(xp, mask.astype(q.dtype), (q.shape[0], 1, *result.shape[1:]))


def dsv4_hc_comb(xp: Any, attributes: Attributes, mixes: Array, scale: Array, base: Array) -> Array:
    """Manifold-constrained hyper-connections (DeepSeek, 2025): Sinkhorn iterations on a softmax."""
    mixes, scale, base = accumulated(xp, mixes, scale, base)
    # Rows have (2 + count) count elements.
    count = math.isqrt(mixes.shape[1] + 1) - 1
    eps = constant(mixes, attributes["eps"])
    x = (mixes * scale[2] + base)[:, 2 * count :].reshape(-1, count, count)
    powers = xp.exp(x - x.max(-1, keepdims=True))
    found = powers / powers.sum(-1, keepdims=True) + eps
    for turn in range(2 * attributes["iterations"] - 1):
        found = found / (found.sum(-1 if turn % 2 else -2, keepdims=True) + eps)
    return found


def dsv4_hc_pre(xp: Any, attributes: Attributes, x: Array, weights: Array) -> Array:
    x, weights = accumulated(xp, x, weights)
    each = sigmoid(xp, attributes, weights) if attributes["gated"] else weights[..., None]
    return constant(x, attributes["scale"]) * (x * each).sum(1)


def dsv4_hc_post(
    xp: Any, attributes: Attributes, x: Array, residual: Array, post: Array, *comb: Array
) -> Array:
    """Add the output to the mixed residual streams; without comb they are not mixed."""
    x, residual, post, *mixes = accumulated(xp, x, residual, post, *comb)
    result = x[:, None] * post[..., None]
    if not mixes:
        return result + residual
    for stream in range(residual.shape[1]):
        result += residual[:, stream, None] * mixes[0][:, stream, :, None]
    return result


FORMULAS: Mapping[str, Formula] = {
    "lightning_indexer": lightning_indexer,
    "dsv4_hc_comb": dsv4_hc_comb,
    "dsv4_hc_pre": dsv4_hc_pre,
    "dsv4_hc_post": dsv4_hc_post,
}
