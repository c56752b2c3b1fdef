"""Rules of ops that make random numbers. They are others in each run of a plan."""

from __future__ import annotations

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule


def _state(node: Node) -> tuple[hg.Value, hg.Value]:
    """Return the seed and the counter of a node; nodes of one `seed` make the same numbers."""
    seed = node.attribute("seed")
    if seed is None:
        return node.level.random(None)
    # Most ops have a float as seed, of which all bits count; Dropout has an integer.
    return node.level.random(seed if isinstance(seed, int) else int(np.float32(seed).view(np.int32)))


@rule("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def _random(node: Node) -> Item:
    if node.op.endswith("Like"):
        shape, dtype = node.value(0).shape, node.value(0).dtype.name
    else:
        shape, dtype = tuple(node.ints("shape") or ()), "f32"
    if node.given("dtype"):
        dtype = node.dtype(node.int("dtype"))
    if node.op.startswith("RandomNormal"):
        mean, std = node.float("mean", 0.0), node.float("scale", 1.0)
        found = hg.random.normal(shape, *_state(node), mean=mean, std=std)
    else:
        low, high = node.float("low", 0.0), node.float("high", 1.0)
        found = hg.random.uniform(shape, *_state(node), low=low, high=high)
    return cast(found, dtype)


@rule("Multinomial")
def _multinomial(node: Node) -> Item:
    """Count the classes whose chances add up to at most a random number."""
    x = node.value(0)
    chances = hg.random.uniform((x.shape[0], node.int("sample_size", 1), 1), *_state(node))
    weights = hg.softmax(cast(x, "f32"), axis=1)
    bounds = hg.expand_dims(hg.cumulative_sum(weights, axis=1)[:, :-1], axis=1)
    dtype = node.dtype(node.int("dtype")) if node.given("dtype") else "i32"
    return cast(hg.sum(cast(chances >= bounds, "i64"), axis=2), dtype)


@rule("Dropout")
def _dropout(node: Node) -> tuple[hg.Value, ...] | hg.Value:
    """Leave elements out in training; else the identity, and a mask of true."""
    x = node.value(0)
    trains = node.item(2) if node.opset >= 12 and node.has(2) else np.array(False)
    if isinstance(trains, np.ndarray) and not trains.any():
        return (x, hg.full(x.shape, True, "bool", graph=node.graph)) if node.wants(1) else x
    ratio = cast(node.value(1), "f32") if node.has(1) else node.graph.constant(np.float32(0.5))
    kept = hg.random.uniform(x.shape, *_state(node)) >= ratio
    found = hg.where(kept, x / cast(1.0 - ratio, x.dtype), hg.zeros_like(x))
    if isinstance(trains, np.ndarray):
        return found, kept
    switch = hg.reshape(node.value(2), ())
    return hg.where(switch, found, x), kept | ~switch
