"""Random numbers that a seed and a counter name; both are i64 values of one element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import heliograph as hg
from heliograph.lowerings.arrays import cast


def uniform(seed: hg.Value, counter: hg.Value, shape: Sequence[int]) -> hg.Value:
    """Return f32 numbers from 0 to below 1."""
    return hg.ops.philox(seed, counter, shape=tuple(shape), dtype="f32")


def normal(seed: hg.Value, counter: hg.Value, shape: Sequence[int]) -> hg.Value:
    """Return f32 numbers with mean 0 and deviation 1, by Box and Muller."""
    both = uniform(seed, counter, (2, *shape))
    return hg.sqrt(-2.0 * hg.log1p(-both[0])) * hg.cos((2 * math.pi) * both[1])


def categories(logarithms: hg.Value, chances: hg.Value) -> hg.Value:
    """Return for each of the chances [b, n], from 0 to below 1, the class (i64) that it falls into
    by the logarithms of the classes' weights [b, c]."""
    weights = hg.softmax(cast(logarithms, "f32"), axis=1)
    bounds = hg.expand_dims(hg.cumulative_sum(weights, axis=1)[:, :-1], axis=1)
    return hg.sum(cast(hg.expand_dims(chances, axis=2) >= bounds, "i64"), axis=2)
