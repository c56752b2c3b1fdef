"""Rules of ops that compute gradients, which AOTAutograd and torch.autograd put into graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast, channels, insert_zeros, pad_axis
from heliograph.torch.node import Node, Number, in_f32
from heliograph.torch.ops.activations import added_to_scores
from heliograph.torch.ops.normalization import sum_by_channel
from heliograph.torch.rules import rule

# Activations and norms


@rule("_softmax_backward_data")
def _softmax(node: Node, gradient: hg.Value, y: hg.Value, axis: int, dtype: Any) -> hg.Value:
    gradient, y = in_f32(gradient), in_f32(y)
    if not y.ndim or not y.size:
        return gradient * 0.0
    if axis % y.ndim == y.ndim - 1 and y.dtype.name == "f32":
        return hg.ops.soft_max_back(gradient, y)
    product = gradient * y
    return product - y * hg.sum(product, axis=axis, keepdims=True)


@rule("_log_softmax_backward_data")
def _log_softmax(node: Node, gradient: hg.Value, y: hg.Value, axis: int, dtype: Any) -> hg.Value:
    gradient, y = in_f32(gradient), in_f32(y)
    if not y.ndim or not y.size:
        return gradient * 0.0
    return gradient - hg.exp(y) * hg.sum(gradient, axis=axis, keepdims=True)


@rule("threshold_backward")
def _threshold(node: Node, gradient: hg.Value, given: hg.Value, threshold: Number) -> hg.Value:
    gradient, x = in_f32(gradient), in_f32(given)
    if threshold == 0:
        return hg.ops.relu_back(gradient, x)
    return hg.where(x <= float(threshold), 0.0, gradient)


@rule("gelu_backward")
def _gelu(node: Node, gradient: hg.Value, given: hg.Value, approximate: str) -> hg.Value:
    gradient, x = in_f32(gradient), in_f32(given)
    if approximate == "tanh":
        factor, cubic = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        tangent = hg.tanh(x * (square * (cubic * factor) + factor))
        inner = square * (3 * cubic * factor) + factor
        return gradient * (0.5 * (1.0 + tangent) + 0.5 * x * (1.0 - tangent * tangent) * inner)
    below = hg.erf(x * math.sqrt(0.5)) * 0.5 + 0.5
    density = hg.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return gradient * (below + x * density)


@rule("native_layer_norm_backward")
def _layer_norm(
    node: Node,
    gradient: hg.Value,
    given: hg.Value,
    shape: Sequence[int],
    mean: hg.Value,
    inverse: hg.Value,
    weight: hg.Value | None,
    bias: hg.Value | None,
    mask: Sequence[bool],
) -> list[hg.Value | None]:
    gradient, x = in_f32(gradient), in_f32(given)
    first = x.ndim - len(shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    normal = (x - cast(mean, x.dtype)) * cast(inverse, x.dtype)
    found: list[hg.Value | None] = [None, None, None]
    if mask[0]:
        scaled = gradient if weight is None else gradient * cast(weight, x.dtype)
        share = hg.mean(scaled, axis=inner, keepdims=True)
        along_normal = hg.mean(scaled * normal, axis=inner, keepdims=True)
        found[0] = (scaled - share - normal * along_normal) * cast(inverse, x.dtype)
    if mask[1]:
        found[1] = hg.sum(gradient * normal, axis=outer) if outer else gradient * normal
    if mask[2]:
        found[2] = hg.sum(gradient, axis=outer) if outer else gradient
    return found


@rule("native_batch_norm_backward")
def _batch_norm(
    node: Node,
    gradient: hg.Value,
    given: hg.Value,
    weight: hg.Value | None,
    running_mean: hg.Value | None,
    running_variance: hg.Value | None,
    saved_mean: hg.Value | None,
    saved_inverse: hg.Value | None,
    train: bool,
    epsilon: float,
    mask: Sequence[bool],
) -> list[hg.Value | None]:
    gradient, x = in_f32(gradient), in_f32(given)
    if train:
        mean, inverse = saved_mean, saved_inverse
    else:
        assert running_variance is not None
        mean, inverse = running_mean, 1 / hg.sqrt(in_f32(running_variance) + epsilon)
    assert mean is not None and inverse is not None
    mean, inverse = cast(mean, x.dtype), cast(inverse, x.dtype)
    centred = x - channels(mean, x.ndim)
    of_bias, of_weight = sum_by_channel(gradient), sum_by_channel(gradient * centred) * inverse
    found: list[hg.Value | None] = [None, of_weight if mask[1] else None, of_bias if mask[2] else None]
    if mask[0]:
        scale = inverse if weight is None else inverse * cast(weight, x.dtype)
        if train:
            share = x.shape[1] / max(1, x.size)
            first, second = of_bias * share, of_weight * (inverse * share)
            gradient = gradient - channels(first, x.ndim) - centred * channels(second, x.ndim)
        found[0] = gradient * channels(scale, x.ndim)
    return found


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention(
    node: Node,
    gradient: hg.Value,
    query: hg.Value,
    key: hg.Value,
    value: hg.Value,
    found: hg.Value,
    logarithms: hg.Value,
    dropout: float,
    is_causal: bool,
    mask: hg.Value | None,
    scale: float | None,
) -> list[hg.Value]:
    gradient, query, key, value, found = (in_f32(one) for one in (gradient, query, key, value, found))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = hg.matmul(query * factor, key.mT)
    if (added := added_to_scores(node, query, key, mask, is_causal)) is not None:
        scores = scores + added
    shares = hg.exp(scores - hg.expand_dims(cast(logarithms, scores.dtype), axis=-1))
    of_value = hg.matmul(shares.mT, gradient)
    level = hg.sum(gradient * found, axis=-1, keepdims=True)
    of_scores = shares * (hg.matmul(gradient, value.mT) - level) * factor
    return [hg.matmul(of_scores, key), hg.matmul(of_scores.mT, query), of_value]


# Rows and parts


@rule("embedding_dense_backward")
def _embedding(
    node: Node, gradient: hg.Value, indices: hg.Value, rows: int, padding: int, by_frequency: bool
) -> hg.Value:
    if by_frequency:
        raise node.refuse("gradients divided by frequencies are missing here", "scale_grad_by_freq=False")
    width = gradient.shape[-1]
    flat = in_f32(hg.reshape(gradient, (indices.size, width)))
    places = hg.reshape(indices, (indices.size,))
    if padding >= 0:
        flat = flat * cast(hg.expand_dims(hg.not_equal(places, padding), axis=1), flat.dtype)
    if flat.dtype.name == "f32":
        return hg.ops.get_rows_back(flat, places, rows=int(rows))
    return hg.ops.add_rows(node.full((int(rows), width), 0, flat.dtype), flat, places)


@rule("slice_backward")
def _slice(
    node: Node, gradient: hg.Value, sizes: Sequence[int], axis: int, start: int, end: int, step: int
) -> hg.Value:
    axis %= len(sizes)
    size = int(sizes[axis])
    first = min(max(start + size if start < 0 else start, 0), size)
    return pad_axis(insert_zeros(gradient, axis, step), axis, first, size)


@rule("select_backward")
def _select(node: Node, gradient: hg.Value, sizes: Sequence[int], axis: int, index: int) -> hg.Value:
    axis %= len(sizes)
    size = int(sizes[axis])
    return pad_axis(hg.expand_dims(gradient, axis=axis), axis, index % size, size)
