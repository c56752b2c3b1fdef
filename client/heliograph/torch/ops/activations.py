"""Rules of activations, and of softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.torch.node import Node, Number, axis_of, in_f32
from heliograph.torch.rules import rule


@rule("relu")
def _relu(node: Node, x: hg.Value) -> hg.Value:
    return hg.relu(x) if x.dtype.is_float else hg.maximum(x, 0)


@rule("gelu")
def _gelu(node: Node, x: hg.Value, approximate: str) -> hg.Value:
    return hg.gelu(in_f32(x), "tanh" if approximate == "tanh" else "none")


def _in_f32(function: Callable[[hg.Value], hg.Value]) -> Callable[..., hg.Value]:
    return lambda node, x: function(in_f32(x))


for _op, _function in {
    "silu": hg.silu,
    "hardswish": hg.ops.hardswish,
    "hardsigmoid": hg.ops.hardsigmoid,
}.items():
    rule(_op)(_in_f32(_function))


@rule("softplus")
def _softplus(node: Node, x: hg.Value, beta: Number, threshold: Number) -> hg.Value:
    scaled = in_f32(x) * float(beta)
    found = hg.softplus(scaled) / float(beta)
    return hg.where(scaled > float(threshold), in_f32(x), found)


@rule("elu")
def _elu(node: Node, x: hg.Value, alpha: Number, scale: Number, input_scale: Number) -> hg.Value:
    wide = in_f32(x)
    if alpha == scale == input_scale == 1:
        return hg.ops.elu(wide)
    below = hg.expm1(wide * float(input_scale)) * float(alpha * scale)
    return hg.where(wide > 0, wide * float(scale), below)


@rule("hardtanh")
def _hardtanh(node: Node, x: hg.Value, low: Number, high: Number) -> hg.Value:
    if x.dtype.is_float:
        return hg.clip(x, float(low), float(high))
    return hg.minimum(hg.maximum(x, int(low)), int(high))


@rule("leaky_relu")
def _leaky_relu(node: Node, x: hg.Value, slope: Number) -> hg.Value:
    return hg.ops.leaky_relu(x, slope=float(slope))


@rule("_softmax")
def _softmax(node: Node, x: hg.Value, axis: int, half_to_float: bool) -> hg.Value:
    if not x.ndim:
        return node.full((), 1, x.dtype)
    return hg.softmax(in_f32(x), axis=axis_of(axis, x.ndim)) if x.size else x


@rule("_log_softmax")
def _log_softmax(node: Node, x: hg.Value, axis: int, half_to_float: bool) -> hg.Value:
    if not x.ndim:
        return node.full((), 0, x.dtype)
    return hg.log_softmax(in_f32(x), axis=axis_of(axis, x.ndim)) if x.size else x


@rule("scaled_dot_product_attention")
def _attention(
    node: Node,
    query: hg.Value,
    key: hg.Value,
    value: hg.Value,
    mask: hg.Value | None,
    dropout: float,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> hg.Value:
    if dropout:
        raise node.refuse("attention with dropout is for training", "call module.eval() first")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (hg.repeat(one, times, axis=one.ndim - 3) for one in (key, value))
    query, key, value = (in_f32(one) for one in (query, key, value))
    added = added_to_scores(node, query, key, mask, is_causal)
    return hg.scaled_dot_product_attention(query, key, value, added, scale=scale)


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash_attention(
    node: Node,
    query: hg.Value,
    key: hg.Value,
    value: hg.Value,
    dropout: float,
    is_causal: bool,
    mask: hg.Value | None,
    scale: float | None,
) -> list[hg.Value | None]:
    found = _attention(node, query, key, value, mask, dropout, is_causal, scale)
    if not node.wants(1):
        return [found, None]
    query, key = in_f32(query), in_f32(key)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = hg.matmul(query * factor, key.mT)
    if (added := added_to_scores(node, query, key, mask, is_causal)) is not None:
        scores = scores + added
    largest = hg.max(scores, axis=-1, keepdims=True)
    total = hg.log(hg.sum(hg.exp(scores - largest), axis=-1)) + hg.squeeze(largest, axis=-1)
    return [found, total]


def added_to_scores(
    node: Node, query: hg.Value, key: hg.Value, mask: hg.Value | None, is_causal: bool
) -> hg.Value | None:
    """The mask as what is added to scores."""
    if is_causal:
        mask = hg.tril(node.full((query.shape[-2], key.shape[-2]), True, "bool"))
    if mask is not None and mask.dtype.kind == "bool":
        mask = hg.where(mask, node.full((), 0, query.dtype), node.full((), -math.inf, query.dtype))
    return None if mask is None else cast(mask, query.dtype)
