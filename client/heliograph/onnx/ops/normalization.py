"""Rules of normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, channels, pad, part
from heliograph.onnx.elements import Array, Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule


@rule("BatchNormalization")
def _batch_normalization(node: Node) -> Item | tuple[Item, ...]:
    x = node.value(0)
    epsilon = node.float("epsilon", 1e-5)
    if not node.int("spatial", 1):
        raise node.refuse("it normalizes each element by itself (spatial=0)")
    if node.int("training_mode", 0):
        return _in_training(node, x, epsilon)
    known = [one for one in node.items[1:5] if isinstance(one, np.ndarray)]
    if len(known) == 4:
        return _combined(x, known, epsilon)
    scale, bias, mean, variance = (channels(node.value(place), x.ndim) for place in range(1, 5))
    return (x - mean) / hg.sqrt(variance + epsilon) * scale + bias


def _combined(x: hg.Value, known: Sequence[Array], epsilon: float) -> hg.Value:
    """Combine constants, so that one product and one sum remain."""
    scale, bias, mean, variance = (one.astype(np.float64) for one in known)
    factor = scale / np.sqrt(variance + epsilon)
    shape, target = along(1, x.ndim), x.dtype.numpy
    shift = (bias - mean * factor).astype(target).reshape(shape)
    return x * factor.astype(target).reshape(shape) + shift


def _in_training(node: Node, x: hg.Value, epsilon: float) -> tuple[Item, ...]:
    scale, bias, mean, variance = (node.value(place) for place in range(1, 5))
    keep = node.float("momentum", 0.9)
    axes = (0, *range(2, x.ndim))
    now, spread = hg.mean(x, axis=axes), hg.var(x, axis=axes)
    found = (x - channels(now, x.ndim)) / hg.sqrt(channels(spread, x.ndim) + epsilon)
    found = found * channels(scale, x.ndim) + channels(bias, x.ndim)
    return found, mean * keep + now * (1 - keep), variance * keep + spread * (1 - keep)


@rule("InstanceNormalization")
def _instance_normalization(node: Node) -> Item:
    x, scale, bias = node.value(0), node.value(1), node.value(2)
    axes = tuple(range(2, x.ndim))
    mean, variance = hg.mean(x, axis=axes, keepdims=True), hg.var(x, axis=axes, keepdims=True)
    found = (x - mean) / hg.sqrt(variance + node.float("epsilon", 1e-5))
    return found * channels(scale, x.ndim) + channels(bias, x.ndim)


@rule("LayerNormalization")
def _layer_normalization(node: Node) -> Item | tuple[Item, ...]:
    given = node.value(0)
    axis = node.axis(node.int("axis", -1), given.ndim)
    epsilon = node.float("epsilon", 1e-5)
    x = cast(given, "f32") if given.dtype.name in ("f16", "bf16") else given
    plain = not node.wants(1) and not node.wants(2)
    if plain and axis == x.ndim - 1 and x.dtype.name == "f32":
        found = cast(hg.layer_norm(x, eps=epsilon), given.dtype) * node.value(1)
        return found + node.value(2) if node.has(2) else found
    axes = tuple(range(axis, x.ndim))
    mean, variance = hg.mean(x, axis=axes, keepdims=True), hg.var(x, axis=axes, keepdims=True)
    inverse = 1 / hg.sqrt(variance + epsilon)
    found = cast((x - mean) * inverse, given.dtype) * node.value(1)
    if node.has(2):
        found = found + node.value(2)
    return found, mean, inverse


@rule("LpNormalization")
def _lp_normalization(node: Node) -> Item:
    x, axis = node.value(0), node.int("axis", -1)
    if node.int("p", 2) == 1:
        size = hg.sum(hg.abs(x), axis=axis, keepdims=True)
    else:
        size = hg.sqrt(hg.sum(x * x, axis=axis, keepdims=True))
    return hg.where(size == 0, 0.0, x / size)


@rule("LRN")
def _local_response(node: Node) -> Item:
    x, size = node.value(0), node.int("size")
    node.parts(size)
    low, high = [0] * x.ndim, [0] * x.ndim
    low[1], high[1] = (size - 1) // 2, size - 1 - (size - 1) // 2
    wide = pad(x * x, low, high)
    total: hg.Value | None = None
    for start in range(size):
        one = part(wide, 1, start, start + x.shape[1])
        total = one if total is None else total + one
    if total is None:
        raise node.broken("its size is 0")
    scaled = total * (node.float("alpha", 1e-4) / size) + node.float("bias", 1.0)
    return x / hg.pow(scaled, node.float("beta", 0.75))
