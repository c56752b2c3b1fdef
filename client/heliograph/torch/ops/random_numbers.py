"""Rules of random numbers: a run's seed decides them, and torch's generator gives the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.torch.node import Node, Number, in_f32, shape_of
from heliograph.torch.rules import rule


def uniform(node: Node, shape: Sequence[int], dtype: str = "f32") -> hg.Value:
    """Return numbers from 0 to below 1, of 24 bits, or 53 in f64."""
    sizes = tuple(int(one) for one in shape)
    if dtype != "f64":
        return node.random(sizes, "f32")
    high, low = (cast(node.random(sizes, "u32"), "f64") for _ in range(2))
    return (hg.floor(high / 2.0**5) * 2.0**26 + hg.floor(low / 2.0**6)) / 2.0**53


def normal(node: Node, shape: Sequence[int], dtype: str = "f32") -> hg.Value:
    """Return numbers of the normal distribution, by the method of Box and Muller."""
    radius = hg.sqrt(-2.0 * hg.log(1.0 - uniform(node, shape, dtype)))
    return radius * hg.cos(2 * math.pi * uniform(node, shape, dtype))


@rule("rand", "rand_like")
def _rand(node: Node, like: hg.Value | Sequence[int], *_: Any) -> hg.Value:
    return uniform(node, shape_of(like), node.dtype())


@rule("randn", "randn_like")
def _randn(node: Node, like: hg.Value | Sequence[int], *_: Any) -> hg.Value:
    return normal(node, shape_of(like), node.dtype())


@rule("randint.default")
def _randint(node: Node, high: int, shape: Sequence[int], *_: Any) -> hg.Value:
    return _integers(node, 0, high, shape)


@rule("randint.low")
def _randint_from(node: Node, low: int, high: int, shape: Sequence[int], *_: Any) -> hg.Value:
    return _integers(node, low, high, shape)


@rule("randint_like.default")
def _randint_like(node: Node, x: hg.Value, high: int, *_: Any) -> hg.Value:
    return _integers(node, 0, high, x.shape)


@rule("randint_like.low_dtype")
def _randint_like_from(node: Node, x: hg.Value, low: int, high: int, *_: Any) -> hg.Value:
    return _integers(node, low, high, x.shape)


def _integers(node: Node, low: int, high: int, shape: Sequence[int]) -> hg.Value:
    return low + cast(hg.floor(uniform(node, shape, "f64") * float(high - low)), "i64")


@rule("randperm")
def _randperm(node: Node, count: int, *_: Any) -> hg.Value:
    return hg.argsort(node.random((int(count),), "u32"))


@rule("bernoulli.p")
def _bernoulli_of(node: Node, x: hg.Value, chance: float, *_: Any) -> hg.Value:
    return uniform(node, x.shape) < float(chance)


@rule("uniform")
def _uniform(node: Node, x: hg.Value, low: float, high: float, *_: Any) -> hg.Value:
    return uniform(node, x.shape, node.dtype()) * float(high - low) + float(low)


@rule("normal_functional")
def _normal(node: Node, x: hg.Value, mean: float, deviation: float, *_: Any) -> hg.Value:
    return normal(node, x.shape, node.dtype()) * float(deviation) + float(mean)


@rule("multinomial")
def _multinomial(node: Node, weights: hg.Value, count: int, replacement: bool, *_: Any) -> hg.Value:
    """Places by their weights: those of the largest sums of logarithms and noise."""
    chances = hg.log(in_f32(weights))
    shape = (*chances.shape[:-1], count, chances.shape[-1]) if replacement else chances.shape
    node.room(math.prod(shape))
    noise = hg.log(hg.maximum(-hg.log(1.0 - uniform(node, shape)), 1e-30))
    if replacement:
        return hg.argmax(hg.expand_dims(chances, axis=-2) - noise, axis=-1)
    return hg.argsort(chances - noise, descending=True)[..., :count]


@rule("native_dropout")
def _dropout(node: Node, x: hg.Value, chance: Number, train: bool | None) -> list[hg.Value]:
    if train is False or chance == 0:
        return [x, node.full(x.shape, True, "bool")]
    kept = uniform(node, x.shape) >= float(chance)
    factor = 0.0 if chance == 1 else 1 / (1 - float(chance))
    return [hg.where(kept, x * factor, node.full((), 0, x.dtype)), kept]
