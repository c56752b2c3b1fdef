"""Resizing along single axes, as a matrix of weights that is made on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast

Array = np.ndarray[Any, Any]
#: The most elements of a matrix of weights.
MOST_WEIGHTS = 2**26


@dataclass(frozen=True, slots=True)
class Resampling:
    """A way to make elements of another size along an axis.

    `coordinates`: which place of the source an element of the result lies at: half_pixel,
    half_pixel_symmetric, pytorch_half_pixel, align_corners, asymmetric, tf_crop_and_resize or
    tf_half_pixel_for_nn. `mode`: nearest, linear or cubic. `rounding`: round_prefer_floor,
    round_prefer_ceil, floor or ceil, of nearest. `region`: the part of the source, from 0 to 1.
    """

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    region: tuple[float, float] = (0.0, 1.0)

    def places(self, size: int, scale: float, count: int) -> Array:
        """The places in the source, of `size` elements, of so many elements of the result."""
        numbers = np.arange(count, dtype=np.float64)
        wide = scale * size
        if self.coordinates == "asymmetric":
            return numbers / scale
        if self.coordinates == "align_corners":
            return np.zeros(count) if wide == 1 else numbers * (size - 1) / (wide - 1)
        if self.coordinates == "tf_crop_and_resize":
            low, high = self.region
            span = (high - low) * (size - 1)
            steps = np.full(count, span / 2) if wide == 1 else numbers * span / (wide - 1)
            return steps + low * (size - 1)
        if self.coordinates == "tf_half_pixel_for_nn":
            return (numbers + 0.5) / scale
        if self.coordinates == "pytorch_half_pixel" and wide == 1:
            return np.full(count, -0.5)
        shift = size / 2 * (1 - count / wide) if self.coordinates == "half_pixel_symmetric" else 0.0
        return shift + (numbers + 0.5) / scale - 0.5

    def nearest(self, size: int, scale: float, count: int) -> Array:
        """The source's element for each element of the result."""
        places = self.places(size, scale, count)
        if self.rounding == "floor":
            found = np.floor(places)
        elif self.rounding == "ceil":
            found = np.ceil(places)
        elif self.rounding == "round_prefer_ceil":
            found = np.floor(places + 0.5)
        else:
            found = np.ceil(places - 0.5)
        return np.clip(found, 0, size - 1).astype(np.int64)

    def matrix(self, size: int, scale: float, count: int) -> Array:
        """The weight of each element of the source in each element of the result, [count, size]."""
        if size * count > MOST_WEIGHTS:
            raise hg.UnsupportedError(f"resizing {size} elements to {count} needs too large a matrix")
        places = self.places(size, scale, count)
        base = np.floor(places)
        # An element that lies on one of the source's counts as the right end of an interval.
        exact = places == base
        base = np.where(exact, base - 1, base)
        ratio = np.where(exact, 1.0, places - base)
        shrink = min(scale, 1.0) if self.antialias else 1.0
        reach = 1 if self.mode == "linear" else 2
        first = int(np.floor(-reach / shrink)) + 1
        taps = np.arange(first, 2 - first)
        weights = self._kernel((taps[None, :] - ratio[:, None]) * shrink)
        if self.antialias:
            weights = weights / weights.sum(axis=1, keepdims=True)
        indices = base[:, None].astype(np.int64) + taps[None, :]
        if self.exclude_outside:
            weights = np.where((indices < 0) | (indices >= size), 0.0, weights)
            weights = weights / weights.sum(axis=1, keepdims=True)
        found = np.zeros((count, size))
        rows = np.broadcast_to(np.arange(count)[:, None], indices.shape)
        np.add.at(found, (rows, np.clip(indices, 0, size - 1)), weights)
        return found

    def _kernel(self, distance: Array) -> Array:
        x = np.abs(distance)
        if self.mode == "linear":
            tent: Array = np.clip(1 - x, 0, 1)
            return tent
        a = self.cubic
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        found: Array = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
        return found


def resample(x: hg.Value, axis: int, how: Resampling, scale: float, count: int) -> hg.Value:
    """Return x with so many elements along an axis."""
    size = x.shape[axis]
    if how.mode == "nearest":
        return hg.take(x, how.nearest(size, scale, count), axis=axis)
    weights = how.matrix(size, scale, count).astype(x.dtype.numpy)
    last = hg.moveaxis(x, axis, -1)
    return hg.moveaxis(hg.matmul(last, np.ascontiguousarray(weights.T)), -1, axis)


def outside(how: Resampling, size: int, scale: float, count: int) -> Array:
    """Return which elements of the result lie outside of the source."""
    places = how.places(size, scale, count)
    found: Array = (places < 0) | (places > size - 1)
    return found


def blank(x: hg.Value, axis: int, gone: Array, fill: float) -> hg.Value:
    """Return x with one value where a vector along an axis is true."""
    mask = x.graph.constant(gone.reshape(along(axis, x.ndim)))
    return hg.where(mask, cast(hg.full((), fill, "f32", graph=x.graph), x.dtype), x)
