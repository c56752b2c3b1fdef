"""Rules of indexers and hyper-connections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph.autodiff.step import Rule, composed
from heliograph.graph.lowering import apply, cast, matmul, permute, reshape
from heliograph.graph.value import Value


def _indexer(attributes: Mapping[str, Any], q: Value, k: Value, weights: Value, mask: Value) -> Value:
    streams, tokens, heads, width = q.shape
    keys = reshape(k, (streams, 1, k.shape[1], width))
    scores = apply("relu", matmul(permute(q, (0, 2, 1, 3)), keys.mT))
    by_head = reshape(permute(weights, (0, 3, 2, 1)), (streams, heads, tokens, 1))
    total = apply("reduce_sum", scores * by_head, axes=(1,), keepdims=True)
    wide = cast(mask, total.dtype)
    return total + (wide if wide.shape[0] == 1 else apply("repeat", wide, shape=total.shape))


def _comb(attributes: Mapping[str, Any], mixes: Value, scale: Value, base: Value) -> Value:
    count, eps = math.isqrt(mixes.shape[1] + 1) - 1, float(attributes["eps"])
    x = (mixes * scale[2] + base)[:, 2 * count :]
    found = apply("soft_max", reshape(x, (mixes.shape[0], count, count))) + eps
    for turn in range(2 * int(attributes["iterations"]) - 1):
        axis = 2 if turn % 2 else 1
        found = found / (apply("reduce_sum", found, axes=(axis,), keepdims=True) + eps)
    return found


def _pre(attributes: Mapping[str, Any], x: Value, weights: Value) -> Value:
    each = apply("sigmoid", weights) if attributes["gated"] else reshape(weights, (*weights.shape, 1))
    total = apply("reduce_sum", x * each, axes=(1,), keepdims=False)
    return apply("scale", total, scale=attributes["scale"])


def _post(attributes: Mapping[str, Any], x: Value, residual: Value, post: Value, *comb: Value) -> Value:
    tokens, width = x.shape
    result = reshape(x, (tokens, 1, width)) * reshape(post, (*post.shape, 1))
    return result + (matmul(comb[0].mT, residual) if comb else residual)


RULES: Mapping[str, Rule] = {
    "lightning_indexer": composed(_indexer),
    "dsv4_hc_comb": composed(_comb),
    "dsv4_hc_pre": composed(_pre),
    "dsv4_hc_post": composed(_post),
}
