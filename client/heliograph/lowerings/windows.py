"""Convolutions and pools in any number of dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, crop, insert_zeros, pad, part

#: The most positions of a kernel that is expressed as one slice for each.
MOST_TAPS = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """A window that moves over the dimensions after batch and channels."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    def span(self, axis: int) -> int:
        """The elements from the first to the last that a window reads."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The number of places of the window in data of these sizes."""
        return tuple(
            (size + self.low[axis] + self.high[axis] - self.span(axis)) // self.stride[axis] + 1
            for axis, size in enumerate(sizes)
        )

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The positions in a window, in row-major order."""
        if math.prod(self.kernel) > MOST_TAPS:
            raise hg.UnsupportedError(f"a kernel of {self.kernel} has more than {MOST_TAPS} positions")
        return itertools.product(*map(range, self.kernel))

    def places(self, offset: Sequence[int], outputs: Sequence[int]) -> tuple[slice, ...]:
        """The elements of padded data at one position of all windows."""
        return tuple(
            slice(
                one * self.dilation[axis],
                one * self.dilation[axis] + (outputs[axis] - 1) * self.stride[axis] + 1,
                self.stride[axis],
            )
            for axis, one in enumerate(offset)
        )


def padded(x: hg.Value, window: Window, fill: float = 0) -> hg.Value:
    """Return data with the window's padding."""
    return pad(x, (0, 0, *window.low), (0, 0, *window.high), fill)


def convolve(x: hg.Value, weights: hg.Value, window: Window, groups: int = 1) -> hg.Value:
    """Return the convolution of x [n, c, ...] with weights [oc, c / groups, ...]."""
    if min(window.outputs(x.shape[2:]), default=1) < 1:
        raise hg.InvalidGraphError(f"a window of {window.kernel} is larger than the data, {x.shape}")
    in_plane = window.ndim < 3 and x.dtype.name in ("f32", "f16")
    if _is_product(window, groups) and not in_plane:
        return _product(x, weights)
    if window.ndim == 1:
        wide = Window(
            (1, *window.kernel),
            (1, *window.stride),
            (1, *window.dilation),
            (0, *window.low),
            (0, *window.high),
        )
        found = convolve(hg.expand_dims(x, axis=2), hg.expand_dims(weights, axis=2), wide, groups)
        return hg.squeeze(found, axis=2)
    if in_plane:
        return _plane(x, weights, window, groups)
    if window.ndim == 3 and x.dtype.name in ("f32", "f16"):
        return _by_depth(x, weights, window, groups)
    return _by_taps(x, weights, window, groups)


def _is_product(window: Window, groups: int) -> bool:
    sizes = (*window.kernel, *window.stride)
    return groups == 1 and all(one == 1 for one in sizes) and not any((*window.low, *window.high))


def _product(x: hg.Value, weights: hg.Value) -> hg.Value:
    """A convolution of single elements is a matrix product."""
    flat = hg.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
    found = hg.matmul(hg.reshape(weights, weights.shape[:2]), flat)
    return hg.reshape(found, (x.shape[0], weights.shape[0], *x.shape[2:]))


def _plane(x: hg.Value, weights: hg.Value, window: Window, groups: int) -> hg.Value:
    padding = window.low
    if window.low != window.high:
        x, padding = padded(x, window), (0, 0)
    options = {"stride": window.stride, "padding": padding, "dilation": window.dilation}
    if groups == x.shape[1] == weights.shape[0] > 1:
        found = hg.ops.conv_2d_dw(weights, x, **options)
    else:
        found = hg.ops.conv_2d(weights, x, groups=groups, **options)
    return cast(found, x.dtype)


def _by_depth(x: hg.Value, weights: hg.Value, window: Window, groups: int) -> hg.Value:
    """One convolution in planes for each position of the kernel along the first dimension."""
    depth, step, spread = window.outputs(x.shape[2:])[0], window.stride[0], window.dilation[0]
    wide = pad(x, (0, 0, window.low[0], 0, 0), (0, 0, window.high[0], 0, 0))
    plane = Window(*(numbers[1:] for numbers in astuple(window)))
    total: hg.Value | None = None
    for tap in range(window.kernel[0]):
        first = tap * spread
        places = hg.permute_dims(part(wide, 2, first, first + (depth - 1) * step + 1, step), (0, 2, 1, 3, 4))
        images = hg.reshape(places, (x.shape[0] * depth, x.shape[1], *x.shape[3:]))
        term = convolve(images, hg.ops.cont(weights[:, :, tap]), plane, groups)
        total = term if total is None else total + term
    assert total is not None
    found = hg.reshape(total, (x.shape[0], depth, *total.shape[1:]))
    return hg.permute_dims(found, (0, 2, 1, 3, 4))


def _by_taps(x: hg.Value, weights: hg.Value, window: Window, groups: int) -> hg.Value:
    """One matrix product for each position of the kernel."""
    outputs = window.outputs(x.shape[2:])
    wide = padded(x, window)
    inner, outer = x.shape[1] // groups, weights.shape[0] // groups
    data = hg.reshape(wide, (x.shape[0], groups, inner, *wide.shape[2:]))
    kernel = hg.reshape(weights, (groups, outer, inner, *window.kernel))
    total: hg.Value | None = None
    for offset in window.offsets():
        places = data[(slice(None), slice(None), slice(None), *window.places(offset, outputs))]
        flat = hg.reshape(places, (x.shape[0], groups, inner, math.prod(outputs)))
        term = hg.matmul(kernel[(slice(None), slice(None), slice(None), *offset)], flat)
        total = term if total is None else total + term
    assert total is not None
    return hg.reshape(total, (x.shape[0], weights.shape[0], *outputs))


def convolve_transposed(
    x: hg.Value, weights: hg.Value, window: Window, extra: Sequence[int], groups: int = 1
) -> hg.Value:
    """Return the transposed convolution of x [n, c, ...] with weights [c, oc / groups, ...].

    `extra`: elements that are added at the end of each dimension.
    """
    ndim, inner = window.ndim, x.shape[1]
    if groups == 1 and math.prod(window.dilation) == 1 < math.prod(window.stride):
        return _by_phases(x, weights, window, extra)
    for axis in range(ndim):
        x = insert_zeros(x, 2 + axis, window.stride[axis])
    outer = weights.shape[1]
    turned = hg.flip(weights, axis=tuple(range(2, 2 + ndim)))
    grouped = hg.reshape(turned, (groups, inner // groups, outer, *window.kernel))
    swapped = hg.permute_dims(grouped, (0, 2, 1, *range(3, 3 + ndim)))
    # Convolutions of turned kernels, which are views, would be slow.
    kernel = hg.ops.cont(hg.reshape(swapped, (groups * outer, inner // groups, *window.kernel)))
    low = [window.span(axis) - 1 - window.low[axis] for axis in range(ndim)]
    high = [window.span(axis) - 1 - window.high[axis] + extra[axis] for axis in range(ndim)]
    x = crop(x, [0, 0, *(max(0, -one) for one in low)], [0, 0, *(max(0, -one) for one in high)])
    ones = (1,) * ndim
    around = Window(
        window.kernel,
        ones,
        window.dilation,
        tuple(max(0, one) for one in low),
        tuple(max(0, one) for one in high),
    )
    return convolve(x, kernel, around, groups)


def _by_phases(x: hg.Value, weights: hg.Value, window: Window, extra: Sequence[int]) -> hg.Value:
    """One convolution whose channels are the places of the result between two strides.

    Place i * stride + r is the sum over m of x[i - m] * weights[m * stride + r].
    """
    ndim, outer = window.ndim, weights.shape[1]
    counts = [-(-size // step) for size, step in zip(window.kernel, window.stride, strict=True)]
    missing = (n * step - size for n, step, size in zip(counts, window.stride, window.kernel, strict=True))
    wide = pad(weights, [0] * (2 + ndim), (0, 0, *missing))
    pairs = [size for pair in zip(counts, window.stride, strict=True) for size in pair]
    cut = hg.flip(hg.reshape(wide, (*weights.shape[:2], *pairs)), axis=tuple(range(2, 2 + 2 * ndim, 2)))
    order = (1, *range(3, 3 + 2 * ndim, 2), 0, *range(2, 2 + 2 * ndim, 2))
    channels = outer * math.prod(window.stride)
    kernel = hg.reshape(hg.permute_dims(cut, order), (channels, x.shape[1], *counts))
    edges, ones = tuple(count - 1 for count in counts), (1,) * ndim
    found = convolve(x, kernel, Window(tuple(counts), ones, ones, edges, edges))
    sizes = found.shape[2:]
    apart = hg.reshape(found, (x.shape[0], outer, *window.stride, *sizes))
    places = [axis for one in range(ndim) for axis in (2 + ndim + one, 2 + one)]
    whole = [size * step for size, step in zip(sizes, window.stride, strict=True)]
    result = hg.reshape(hg.permute_dims(apart, (0, 1, *places)), (x.shape[0], outer, *whole))
    behind = []
    for axis in range(ndim):
        full = (x.shape[2 + axis] - 1) * window.stride[axis] + window.kernel[axis]
        behind.append(whole[axis] - full + window.high[axis] - extra[axis])
    result = pad(result, [0] * (2 + ndim), (0, 0, *(max(0, -one) for one in behind)))
    return crop(result, (0, 0, *window.low), (0, 0, *(max(0, one) for one in behind)))


def is_plain_pool(x: hg.Value, window: Window) -> bool:
    """True if an op has pools of such windows: in a plane, with equal padding on both sides of at
    most half a window."""
    plain = window.low == window.high and window.dilation == (1, 1) and x.dtype.name in ("f32", "f16")
    return plain and all(2 * one <= size for one, size in zip(window.low, window.kernel, strict=True))


def max_pool(x: hg.Value, window: Window) -> hg.Value:
    """Return the largest element of each window; padding does not count."""
    if is_plain_pool(x, window):
        found = hg.ops.pool_2d(x, kernel=window.kernel, stride=window.stride, padding=window.low)
        return cast(found, x.dtype)
    return _by_axes(padded(x, window, lowest(x.dtype)), window, window.outputs(x.shape[2:]), hg.maximum)


def mean_pool(x: hg.Value, window: Window) -> hg.Value:
    """Return the mean of each window for which `is_plain_pool` holds; padding counts as 0."""
    sizes = {"kernel": window.kernel, "stride": window.stride, "padding": window.low}
    return cast(hg.ops.pool_2d(x, average=True, **sizes), x.dtype)


def _by_axes(
    x: hg.Value,
    window: Window,
    outputs: Sequence[int],
    combine: Callable[[hg.Value, hg.Value], hg.Value],
) -> hg.Value:
    """Combine the elements of each window of padded data, along one axis after the other."""
    if sum(window.kernel) > MOST_TAPS:
        raise hg.UnsupportedError(f"a kernel of {window.kernel} has more than {MOST_TAPS} positions")
    for axis, size in enumerate(window.kernel):
        found: hg.Value | None = None
        for tap in range(size):
            start = tap * window.dilation[axis]
            stop = start + (outputs[axis] - 1) * window.stride[axis] + 1
            one = part(x, 2 + axis, start, stop, window.stride[axis])
            found = one if found is None else combine(found, one)
        assert found is not None
        x = found
    return x


def max_pool_places(
    x: hg.Value, window: Window, flat: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> tuple[hg.Value, hg.Value]:
    """Return the largest element of each window, and its place as `flat` counts the plane's."""
    outputs = window.outputs(x.shape[2:])
    wide = padded(x, window, lowest(x.dtype))
    numbers = np.pad(flat, list(zip(window.low, window.high, strict=True)))
    largest: hg.Value | None = None
    places: hg.Value | None = None
    for offset in window.offsets():
        key = window.places(offset, outputs)
        one = wide[(slice(None), slice(None), *key)]
        here = hg.broadcast_to(x.graph.constant(np.ascontiguousarray(numbers[key])), one.shape)
        if largest is None or places is None:
            largest, places = one, here
        else:
            places = hg.where(one > largest, here, places)
            largest = hg.maximum(largest, one)
    assert largest is not None and places is not None
    planes = np.arange(x.shape[0] * x.shape[1], dtype=np.int64) * flat.size
    return largest, places + planes.reshape(*x.shape[:2], *(1,) * window.ndim)


def sum_pool(x: hg.Value, window: Window) -> hg.Value:
    """Return the sum of each window."""
    return _by_axes(padded(x, window), window, window.outputs(x.shape[2:]), hg.add)


def lowest(dtype: hg.DType) -> float | int:
    """Return the least number of a data type."""
    return -math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)
