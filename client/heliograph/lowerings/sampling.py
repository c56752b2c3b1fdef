"""Sampling of images at places that a run computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

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


def sample(x: hg.Value, places: Sequence[hg.Value], mode: str, border: Border) -> hg.Value:
    """Return x [n, c, ...] at the places [n, p] along each dimension: [n, c, p].

    `mode`: nearest, linear or cubic.
    """
    sizes = x.shape[2:]
    table = hg.reshape(
        hg.permute_dims(x, (0, *range(2, x.ndim), 1)), (x.shape[0] * math.prod(sizes), x.shape[1])
    )
    if mode != "cubic":
        places = [border.inside(one, size) for one, size in zip(places, sizes, strict=True)]
    if mode == "nearest":
        found = _fetch(table, x, [hg.round(one) for one in places], border)
        return hg.permute_dims(found, (0, 2, 1))
    floors = [hg.floor(one) for one in places]
    rests = [one - floor for one, floor in zip(places, floors, strict=True)]
    taps = [_linear(one) if mode == "linear" else _cubic(one) for one in rests]
    total: hg.Value | None = None
    for chosen in itertools.product(*taps):
        weight = reduce(mul, (one for _, one in chosen))
        at = [floor + float(offset) for floor, (offset, _) in zip(floors, chosen, strict=True)]
        term = _fetch(table, x, at, border) * hg.expand_dims(weight, axis=2)
        total = term if total is None else total + term
    assert total is not None
    return hg.permute_dims(total, (0, 2, 1))


def _linear(rest: hg.Value) -> list[tuple[int, hg.Value]]:
    return [(0, 1 - rest), (1, rest)]


def _cubic(rest: hg.Value) -> list[tuple[int, hg.Value]]:
    a = -0.75

    def near(x: hg.Value) -> hg.Value:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: hg.Value) -> hg.Value:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [(-1, far(rest + 1)), (0, near(rest)), (1, near(1 - rest)), (2, far(2 - rest))]


def _fetch(table: hg.Value, x: hg.Value, at: Sequence[hg.Value], border: Border) -> hg.Value:
    """Return the elements at whole places, [n, p, c]."""
    sizes = x.shape[2:]
    flat: hg.Value | None = None
    known: hg.Value | None = None
    for one, size in zip(at, sizes, strict=True):
        place = (
            hg.round(border.inside(one, size)) if border.mode == "reflection" else border.inside(one, size)
        )
        if border.mode == "zeros":
            here = (place >= 0) & (place <= size - 1.0)
            known = here if known is None else known & here
        index = cast(hg.clip(place, 0.0, size - 1.0), "i64")
        flat = index if flat is None else flat * size + index
    assert flat is not None
    count, many = flat.shape
    flat = flat + (np.arange(count, dtype=np.int64) * math.prod(sizes)).reshape(-1, 1)
    found = hg.reshape(hg.take(table, hg.reshape(flat, (flat.size,)), axis=0), (count, many, x.shape[1]))
    return found if known is None else found * cast(hg.expand_dims(known, axis=2), found.dtype)
