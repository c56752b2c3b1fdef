"""Rules of normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, channels
from heliograph.torch.node import Node, in_f32
from heliograph.torch.rules import rule


@rule("native_layer_norm")
def _layer_norm(
    node: Node,
    given: hg.Value,
    shape: Sequence[int],
    weight: hg.Value | None,
    bias: hg.Value | None,
    epsilon: float,
) -> list[hg.Value]:
    x = in_f32(given)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean, inverse = _moments(x, axes, epsilon)
    found = hg.layer_norm(x, eps=epsilon) if len(axes) == 1 else (x - mean) * inverse
    return [_scaled(found, weight, bias), mean, inverse]


def _moments(x: hg.Value, axes: Sequence[int], epsilon: float) -> tuple[hg.Value, hg.Value]:
    """The mean, and the inverse of the deviation."""
    mean = hg.mean(x, axis=axes, keepdims=True)
    return mean, 1 / hg.sqrt(hg.var(x, axis=axes, keepdims=True) + epsilon)


def _scaled(x: hg.Value, weight: hg.Value | None, bias: hg.Value | None) -> hg.Value:
    if weight is not None:
        x = x * cast(weight, x.dtype)
    return x if bias is None else x + cast(bias, x.dtype)


@rule("native_group_norm")
def _group_norm(
    node: Node,
    given: hg.Value,
    weight: hg.Value | None,
    bias: hg.Value | None,
    batch: int,
    depth: int,
    area: int,
    groups: int,
    epsilon: float,
) -> list[hg.Value]:
    x = in_f32(given)
    rows = hg.reshape(x, (int(batch), groups, int(depth) // groups * int(area)))
    mean, inverse = _moments(rows, (2,), epsilon)
    found = hg.reshape((rows - mean) * inverse, x.shape)
    scale, shift = (None if one is None else channels(one, x.ndim) for one in (weight, bias))
    return [_scaled(found, scale, shift), *(hg.squeeze(one, axis=2) for one in (mean, inverse))]


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(
    node: Node,
    x: hg.Value,
    weight: hg.Value | None,
    bias: hg.Value | None,
    mean: hg.Value,
    variance: hg.Value,
    momentum: float,
    epsilon: float,
) -> list[hg.Value]:
    empty = node.full((0,), 0, x.dtype)
    parts = [weight, bias, mean, variance]
    known = [None if one is None else node.known(one) for one in parts]
    if all(one is not None for one, part in zip(known, parts, strict=True) if part is not None):
        factor, shift = _combined(node, x, known, epsilon)
        return [x * factor + shift, empty, empty]
    wide = in_f32(x)
    scale = hg.rsqrt(cast(variance, wide.dtype) + epsilon)
    found = (wide - channels(cast(mean, wide.dtype), x.ndim)) * channels(scale, x.ndim)
    return [_by_channel(found, weight, bias), empty, empty]


def _combined(
    node: Node, x: hg.Value, known: Sequence[torch.Tensor | None], epsilon: float
) -> tuple[Any, Any]:
    """Combine constants, so that one product and one sum remain."""
    weight, bias, mean, variance = (None if one is None else one.detach().double() for one in known)
    assert mean is not None and variance is not None
    factor = 1 / torch.sqrt(variance + epsilon)
    factor = factor if weight is None else factor * weight
    shift = -mean * factor if bias is None else bias - mean * factor
    shape = [size if size != -1 else factor.numel() for size in along(1, x.ndim)]
    dtype = "f64" if x.dtype.name == "f64" else "f32"
    first, second = (
        node.graph.constant(one.reshape(shape).to(torch.float64 if dtype == "f64" else torch.float32))
        for one in (factor, shift)
    )
    return first, second


def _by_channel(x: hg.Value, weight: hg.Value | None, bias: hg.Value | None) -> hg.Value:
    scale, shift = (None if one is None else channels(one, x.ndim) for one in (weight, bias))
    return _scaled(x, scale, shift)


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _batch_norm_of_any(
    node: Node,
    given: hg.Value,
    weight: hg.Value | None,
    bias: hg.Value | None,
    mean: hg.Value,
    variance: hg.Value,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[hg.Value]:
    if not training:
        found = _batch_norm(node, given, weight, bias, mean, variance, momentum, epsilon)
        return [*found, mean, variance]
    x = in_f32(given)
    now = mean_by_channel(x)
    centred = x - channels(now, x.ndim)
    spread = mean_by_channel(centred * centred)
    inverse = 1 / hg.sqrt(spread + epsilon)
    scale = inverse if weight is None else inverse * cast(weight, x.dtype)
    result = centred * channels(scale, x.ndim)
    if bias is not None:
        result = result + channels(cast(bias, x.dtype), x.ndim)
    count = given.size // given.shape[1]
    unbiased = spread * (count / max(1, count - 1))
    return [
        result,
        now,
        inverse,
        cast(mean, now.dtype) * (1 - momentum) + now * momentum,
        cast(variance, now.dtype) * (1 - momentum) + unbiased * momentum,
    ]


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    node: Node,
    given: hg.Value,
    weight: hg.Value | None,
    bias: hg.Value | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[hg.Value]:
    x = in_f32(given)
    axes = (0, *range(2, x.ndim))
    mean, variance = hg.mean(x, axis=axes), hg.var(x, axis=axes)
    inverse = 1 / hg.sqrt(variance + epsilon)
    found = (x - channels(mean, x.ndim)) * channels(inverse, x.ndim)
    return [_by_channel(found, weight, bias), mean, inverse]


def sum_by_channel(x: hg.Value) -> hg.Value:
    """Return the sum of each channel of [n, c, ...], along rows first."""
    return hg.sum(hg.sum(hg.reshape(x, (*x.shape[:2], -1)), axis=-1), axis=0)


def mean_by_channel(x: hg.Value) -> hg.Value:
    """Return the mean of each channel of [n, c, ...]."""
    return sum_by_channel(x) * (x.shape[1] / max(1, x.size))
