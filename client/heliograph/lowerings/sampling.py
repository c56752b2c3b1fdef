"""Sampling of images at places that a run computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, mul

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast


@dataclass(frozen=True, slots=True)
class Border:
    """The surroundings of an image: zeros, its border, or its reflection."""

    mode: str = "zeros"
    #: Whether a reflection is about the centers of the outermost elements or about their edges.
    align_corners: bool = True

    def inside(self, place: hg.Value, size: int) -> hg.Value:
        """The place that counts for a place outside."""
        if self.mode == "border":
            return hg.clip(place, 0.0, size - 1.0)
        if self.mode == "reflection":
            low, high = (0.0, size - 1.0) if self.align_corners else (-0.5, size - 0.5)
            return hg.clip(_reflected(place, low, high), 0.0, size - 1.0)
        return place


def _reflected(place: hg.Value, low: float, high: float) -> hg.Value:
    span = high - low
    if span == 0:
        return place * 0.0
    rest = hg.abs(place - low) % (2 * span)
    return hg.where(rest > span, 2 * span - rest, rest) + low


def sample(
    x: hg.Value, places: Sequence[hg.Value], mode: str, border: Border, images: hg.Value | None = None
) -> hg.Value:
    """Return x [n, c, ...] at the places [m, p] along each dimension: [m, c, p].

    `mode`: nearest, linear or cubic. `images`: which of the n images each of the m takes; without
    them m is n.
    """
    terms = list(weighted(x, places, mode, border, images))
    return hg.permute_dims(reduce(add, terms), (0, 2, 1))


def weighted(
    x: hg.Value, places: Sequence[hg.Value], mode: str, border: Border, images: hg.Value | None = None
) -> Iterator[hg.Value]:
    """Yield the terms of `sample` [m, p, c]: an element near each place times its weight."""
    sizes = x.shape[2:]
    if images is None:
        images = x.graph.constant(np.arange(x.shape[0], dtype=np.int64))
    rows = hg.permute_dims(x, (0, *range(2, x.ndim), 1))
    table = hg.reshape(rows, (x.shape[0] * math.prod(sizes), x.shape[1]))
    source = _Source(table, sizes, hg.expand_dims(cast(images, "i64"), axis=1) * math.prod(sizes), border)
    if mode != "cubic":
        places = [border.inside(one, size) for one, size in zip(places, sizes, strict=True)]
    if mode == "nearest":
        yield source.fetch([hg.round(one) for one in places])
        return
    floors = [hg.floor(one) for one in places]
    rests = [one - floor for one, floor in zip(places, floors, strict=True)]
    taps = [_linear(one) if mode == "linear" else _cubic(one) for one in rests]
    for chosen in itertools.product(*taps):
        weight = reduce(mul, (one for _, one in chosen))
        at = [floor + float(offset) for floor, (offset, _) in zip(floors, chosen, strict=True)]
        yield source.fetch(at) * hg.expand_dims(weight, axis=2)


def _linear(rest: hg.Value) -> list[tuple[int, hg.Value]]:
    return [(0, 1 - rest), (1, rest)]


def _cubic(rest: hg.Value) -> list[tuple[int, hg.Value]]:
    a = -0.75

    def near(x: hg.Value) -> hg.Value:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: hg.Value) -> hg.Value:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [(-1, far(rest + 1)), (0, near(rest)), (1, near(1 - rest)), (2, far(2 - rest))]


@dataclass(frozen=True, slots=True)
class _Source:
    """Images as rows of a table, with the row that each one begins at."""

    table: hg.Value
    sizes: tuple[int, ...]
    starts: hg.Value
    border: Border

    def fetch(self, at: Sequence[hg.Value]) -> hg.Value:
        """Return the elements at whole places, [m, p, c]."""
        flat: hg.Value | None = None
        known: hg.Value | None = None
        for one, size in zip(at, self.sizes, strict=True):
            place = self.border.inside(one, size)
            if self.border.mode == "reflection":
                place = hg.round(place)
            if self.border.mode == "zeros":
                here = (place >= 0) & (place <= size - 1.0)
                known = here if known is None else known & here
            index = cast(hg.clip(place, 0.0, size - 1.0), "i64")
            flat = index if flat is None else flat * size + index
        assert flat is not None
        found = hg.take(self.table, hg.reshape(flat + self.starts, (flat.size,)), axis=0)
        wide = hg.reshape(found, (*flat.shape, self.table.shape[1]))
        return wide if known is None else wide * cast(hg.expand_dims(known, axis=2), wide.dtype)
