"""Rules of pools, and of resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.lowerings.resampling import Resampling, resample
from heliograph.lowerings.sampling import Border, sample
from heliograph.lowerings.windows import Window, max_pool, max_pool_places, sum_pool
from heliograph.torch.elements import Array
from heliograph.torch.node import Node, in_f32
from heliograph.torch.rules import rule


def spread(given: Sequence[int] | int, count: int) -> tuple[int, ...]:
    """Return one number for each dimension."""
    numbers = (given,) if isinstance(given, int) else tuple(int(one) for one in given)
    return numbers * count if len(numbers) == 1 else numbers


def window_of(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Window:
    """Return the window of a pool, padded further for the windows of ceil_mode."""
    count = len(sizes)
    kernel, padding, dilation = (spread(one, count) for one in (kernel, padding, dilation))
    stride = spread(stride, count) if len(stride) else kernel
    window = Window(kernel, stride, dilation, padding, padding)
    if not ceil:
        return window
    high = list(padding)
    for axis, size in enumerate(sizes):
        low, step, span = padding[axis], stride[axis], window.span(axis)
        outputs = -(-(size + 2 * low - span) // step) + 1
        # The last window begins inside of the data or of the padding before it.
        outputs -= (outputs - 1) * step >= size + low
        high[axis] = max(high[axis], (outputs - 1) * step + span - size - low)
    return Window(kernel, stride, dilation, padding, tuple(high))


def batched(x: hg.Value, count: int) -> hg.Value:
    """Return data with the dimensions of batch and channels."""
    return x if x.ndim == count + 2 else hg.expand_dims(x, axis=0)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    node: Node,
    given: hg.Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> list[hg.Value]:
    count = int(node.op[len("max_pool")])
    window = window_of(given.shape[-count:], kernel, stride, padding, dilation, ceil)
    x = batched(given, count)
    lead = given.shape[: given.ndim - count]
    sizes = x.shape[2:]
    if not node.wants(1):
        found = max_pool(x, window)
        shape = (*lead, *found.shape[2:])
        return [hg.reshape(found, shape), node.full(shape, 0, "i64")]
    node.room(math.prod(sizes))
    flat = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
    found, places = max_pool_places(x, window, flat)
    # Places count from the beginning of the plane.
    planes = (np.arange(x.shape[0] * x.shape[1], dtype=np.int64) * flat.size).reshape(
        *x.shape[:2], *(1,) * count
    )
    shape = (*lead, *found.shape[2:])
    return [hg.reshape(found, shape), hg.reshape(places - planes, shape)]


@rule("avg_pool2d", "avg_pool3d")
def _average(
    node: Node,
    given: hg.Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    counted: bool,
    divisor: int | None = None,
) -> hg.Value:
    count = int(node.op[len("avg_pool")])
    x = in_f32(batched(given, count))
    x = x if x.dtype.is_float else cast(x, "f64")
    window = window_of(x.shape[2:], kernel, stride, padding, ceil=ceil)
    total = sum_pool(x, window)
    if divisor is not None:
        found = total / float(divisor)
    else:
        found = total / average_counts(x.shape[2:], window, counted).astype(x.dtype.numpy)
    return hg.reshape(found, (*given.shape[: given.ndim - count], *found.shape[2:]))


def average_counts(
    sizes: Sequence[int], window: Window, counted: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return how many elements each window of an average has; padding counts or not."""
    counts = np.ones((), np.float64)
    for axis, (size, outputs) in enumerate(zip(sizes, window.outputs(sizes), strict=True)):
        # The further padding of ceil_mode never counts.
        low = window.low[axis]
        line = np.pad(np.ones(size), (low, low), constant_values=1.0 if counted else 0.0)
        line = np.pad(line, (0, max(0, window.high[axis] - low)))
        places = np.arange(outputs)[:, None] * window.stride[axis]
        taps = np.arange(window.kernel[axis])[None, :] * window.dilation[axis]
        counts = np.multiply.outer(counts, line[places + taps].sum(axis=1))
    return counts


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive(node: Node, x: hg.Value, sizes: Sequence[int]) -> hg.Value:
    wide = in_f32(x)
    outputs = spread(sizes, len(sizes))
    axes = range(x.ndim - len(outputs), x.ndim)
    if all(size == 1 for size in outputs):
        return hg.mean(wide, axis=tuple(axes), keepdims=True)
    for axis, count in zip(axes, outputs, strict=True):
        matrix = adaptive_matrix(x.shape[axis], count).astype(wide.dtype.numpy)
        wide = hg.moveaxis(hg.matmul(hg.moveaxis(wide, axis, -1), np.ascontiguousarray(matrix.T)), -1, axis)
    return wide


def adaptive_matrix(size: int, count: int) -> Array:
    """Return the weight of each element in each average, [count, size]."""
    found = np.zeros((count, size))
    for place in range(count):
        start, stop = place * size // count, -(-(place + 1) * size // count)
        found[place, start:stop] = 1 / (stop - start)
    return found


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(node: Node, x: hg.Value, sizes: Sequence[int]) -> list[hg.Value | None]:
    if node.wants(1):
        raise node.refuse("the places of an adaptive maximum", "use a max pool with return_indices=True")
    for axis, count in enumerate(sizes, x.ndim - len(sizes)):
        size = x.shape[axis]
        starts = np.arange(count) * size // count
        stops = -(-(np.arange(count) + 1) * size // count)
        widest = int((stops - starts).max())
        node.room(count * widest)
        # A window that is shorter than others has its last element several times.
        places = np.minimum(starts[:, None] + np.arange(widest)[None, :], stops[:, None] - 1)
        x = hg.max(hg.take(x, places, axis=axis), axis=axis + 1)
    return [x, None]


@rule("upsample_bilinear2d.vec")
def _bilinear(
    node: Node,
    x: hg.Value,
    sizes: Sequence[int] | None,
    align_corners: bool,
    factors: Sequence[float] | None,
) -> hg.Value:
    return _interpolated(node, x, sizes, align_corners, *(factors or (None, None)))


@rule("upsample_nearest2d.vec")
def _nearest(
    node: Node, x: hg.Value, sizes: Sequence[int] | None, factors: Sequence[float] | None
) -> hg.Value:
    return _resized(x, sizes, factors or (None, None), Resampling("nearest", "asymmetric", "floor"))


@rule(
    "upsample_bilinear2d.default",
    "upsample_bicubic2d.default",
    "_upsample_bilinear2d_aa.default",
    "_upsample_bicubic2d_aa.default",
)
def _interpolated(
    node: Node, x: hg.Value, sizes: Sequence[int] | None, align_corners: bool, *factors: float | None
) -> hg.Value:
    mode, is_smooth = "cubic" if "cubic" in node.op else "linear", node.op.endswith("_aa")
    if is_smooth and align_corners:
        raise node.refuse("aligned corners with antialiasing", "use align_corners=False")
    if not x.dtype.is_float:
        raise node.refuse("integers between those that there are", "convert the image to floats first")
    how = Resampling(mode, "align_corners" if align_corners else "half_pixel")
    if is_smooth:
        how = Resampling(mode, cubic=-0.5, exclude_outside=True, antialias=True)
    return _resized(in_f32(x), sizes, factors, how)


def _resized(
    x: hg.Value, sizes: Sequence[int] | None, factors: Sequence[float | None], how: Resampling
) -> hg.Value:
    for place, (axis, factor) in enumerate(zip(range(2, x.ndim), factors, strict=True)):
        size = x.shape[axis]
        count = math.floor(size * (factor or 1)) if sizes is None else int(sizes[place])
        # With aligned corners only the sizes count.
        scale = count / size if factor is None or how.coordinates == "align_corners" else factor
        if count != size or scale != 1:
            x = resample(x, axis, how, scale, count)
    return x


_MODES = ("linear", "nearest", "cubic")
_BORDERS = ("zeros", "border", "reflection")


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(
    node: Node, given: hg.Value, grid: hg.Value, mode: int, border: int, align_corners: bool
) -> hg.Value:
    x, grid = in_f32(given), in_f32(grid)
    places = []
    for axis, size in enumerate(x.shape[2:]):
        # The last coordinate of the grid is that of the first dimension.
        line = hg.reshape(grid[..., x.ndim - 3 - axis], (grid.shape[0], math.prod(grid.shape[1:-1])))
        span = (size - 1) / 2 if align_corners else size / 2
        places.append((line + 1.0) * span + (0.0 if align_corners else -0.5))
    found = sample(x, places, _MODES[mode], Border(_BORDERS[border], align_corners))
    return hg.reshape(found, (x.shape[0], x.shape[1], *grid.shape[1:-1]))
