"""Rules of ops that compute the gradients of convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, insert_zeros, pad, pad_axis, part
from heliograph.lowerings.windows import Window, convolve, convolve_transposed, max_pool, padded
from heliograph.torch.node import Node, in_f32
from heliograph.torch.ops.pools import adaptive_matrix, average_counts, batched, spread, window_of
from heliograph.torch.rules import rule

#: The channels of data below which the gradient of a kernel is one product for all positions.
_FEW_CHANNELS = 16

# Convolutions


@rule("convolution_backward")
def _convolution(
    node: Node,
    gradient: hg.Value,
    given: hg.Value,
    weight: hg.Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> list[hg.Value | None]:
    gradient, x, weight = (in_f32(one) for one in (gradient, given, weight))
    kernel = weight.shape[2:]
    node.parts(math.prod(kernel))
    steps, pads, gaps = (spread(one, len(kernel)) for one in (stride, padding, dilation))
    window = Window(kernel, steps, gaps, pads, pads)
    found: list[hg.Value | None] = [None, None, None]
    if mask[0]:
        found[0] = (
            convolve(gradient, weight, window, groups)
            if transposed
            else _of_data(node, gradient, x, weight, window, groups)
        )
    if mask[1]:
        small, large = (x, gradient) if transposed else (gradient, x)
        found[1] = _of_weights(small, large, weight, window, groups)
    if mask[2]:
        found[2] = hg.sum(gradient, axis=(0, *range(2, gradient.ndim)))
    return found


def _of_data(
    node: Node, gradient: hg.Value, x: hg.Value, weight: hg.Value, window: Window, groups: int
) -> hg.Value:
    if not groups == x.shape[1] == weight.shape[0]:
        node.parts(groups)
    extra = [
        x.shape[2 + axis] - (size - 1) * window.stride[axis] + 2 * window.low[axis] - window.span(axis)
        for axis, size in enumerate(gradient.shape[2:])
    ]
    if groups == 1 == math.prod(window.kernel) < math.prod(window.stride) and not any(window.low):
        return _of_points(gradient, weight, window, extra)
    return convolve_transposed(gradient, weight, window, extra, groups)


def _of_points(gradient: hg.Value, weight: hg.Value, window: Window, extra: Sequence[int]) -> hg.Value:
    """The gradient of data of which windows of one element read every few: a product, and zeros."""
    flat = hg.reshape(gradient, (*gradient.shape[:2], math.prod(gradient.shape[2:])))
    found = hg.matmul(hg.reshape(weight, weight.shape[:2]).mT, flat)
    found = hg.reshape(found, (gradient.shape[0], weight.shape[1], *gradient.shape[2:]))
    for axis, step in enumerate(window.stride):
        found = insert_zeros(found, 2 + axis, step)
    return pad(found, [0] * found.ndim, (0, 0, *extra))


def _of_weights(gradient: hg.Value, x: hg.Value, weight: hg.Value, window: Window, groups: int) -> hg.Value:
    """The gradient of weights [oc, c / groups, ...] for gradients [n, oc, ...], data [n, c, ...]."""
    if groups == 1:
        return _of_plain_weights(gradient, x, weight, window)
    count, sizes = gradient.shape[0] * math.prod(gradient.shape[2:]), gradient.shape[2:]
    outer, inner = weight.shape[0] // groups, x.shape[1] // groups
    wide = padded(x, window)
    split = hg.reshape(gradient, (gradient.shape[0], groups, outer, math.prod(sizes)))
    across = hg.reshape(hg.permute_dims(split, (1, 2, 0, 3)), (groups, outer, count))
    terms = []
    for offset in window.offsets():
        places = wide[(slice(None), slice(None), *window.places(offset, sizes))]
        data = hg.reshape(places, (x.shape[0], groups, inner, math.prod(sizes)))
        rows = hg.reshape(hg.permute_dims(data, (1, 0, 3, 2)), (groups, count, inner))
        terms.append(_products(across, rows))
    found = terms[0] if len(terms) == 1 else hg.stack(terms, axis=-1)
    return hg.reshape(found, weight.shape)


def _of_plain_weights(gradient: hg.Value, x: hg.Value, weight: hg.Value, window: Window) -> hg.Value:
    """The same without groups: products whose operands both have their sums along rows."""
    count, outer, *sizes = gradient.shape
    inner, area = x.shape[1], math.prod(sizes)
    wide = padded(x, window)
    places = [wide[(slice(None), slice(None), *window.places(offset, sizes))] for offset in window.offsets()]
    if inner < _FEW_CHANNELS:
        # One product for all positions: with a few columns each, they would read the gradient anew.
        rows = hg.concat([hg.reshape(one, (count, inner, area)) for one in places], axis=1)
        found = hg.sum(hg.matmul(hg.reshape(gradient, (count, outer, area)), rows.mT), axis=0)
        parts = hg.permute_dims(hg.reshape(found, (outer, len(places), inner)), (0, 2, 1))
        return hg.reshape(parts, weight.shape)
    across = hg.reshape(hg.moveaxis(gradient, 1, 0), (outer, count * area))
    terms = [
        hg.matmul(across, hg.reshape(hg.moveaxis(one, 1, 0), (inner, count * area)).mT) for one in places
    ]
    return hg.reshape(hg.stack(terms, axis=-1), weight.shape)


def _products(a: hg.Value, b: hg.Value) -> hg.Value:
    """a [g, m, k] times b [g, k, n]; of one row and column each as sums, as depthwise kernels have."""
    if a.shape[1] == b.shape[2] == 1:
        return hg.expand_dims(hg.sum(a * b.mT, axis=-1), axis=-1)
    return hg.matmul(a, b)


# Pools


def _spread(x: hg.Value, window: Window, sizes: Sequence[int]) -> hg.Value:
    """Return the sum, at each element of data of these sizes, of the windows that have it."""
    for axis, size in enumerate(sizes):
        wide = insert_zeros(x, 2 + axis, window.stride[axis])
        length = max(
            window.low[axis] + size + window.high[axis], wide.shape[2 + axis] + window.span(axis) - 1
        )
        total: hg.Value | None = None
        for tap in range(window.kernel[axis]):
            one = pad_axis(wide, 2 + axis, tap * window.dilation[axis], length)
            total = one if total is None else total + one
        assert total is not None
        x = part(total, 2 + axis, window.low[axis], window.low[axis] + size)
    return x


@rule("avg_pool2d_backward", "avg_pool3d_backward")
def _average(
    node: Node,
    gradient: hg.Value,
    given: hg.Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    counted: bool,
    divisor: int | None,
) -> hg.Value:
    count = int(node.op[len("avg_pool")])
    wide, x = in_f32(batched(gradient, count)), batched(given, count)
    sizes = x.shape[2:]
    window = window_of(sizes, kernel, stride, padding, ceil=ceil)
    if divisor is not None:
        wide = wide / float(divisor)
    else:
        wide = wide / average_counts(sizes, window, counted).astype(wide.dtype.numpy)
    node.parts(sum(window.kernel))
    return hg.reshape(_spread(wide, window, sizes), given.shape)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _adaptive(node: Node, gradient: hg.Value, given: hg.Value) -> hg.Value:
    wide = in_f32(gradient)
    for axis in range(given.ndim - (2 if "2d" in node.op else 3), given.ndim):
        size, count = given.shape[axis], gradient.shape[axis]
        if count == 1:
            shape = [size if place == axis else one for place, one in enumerate(wide.shape)]
            wide = hg.broadcast_to(wide * (1 / size), shape)
        else:
            matrix = adaptive_matrix(size, count).astype(wide.dtype.numpy)
            wide = hg.moveaxis(hg.matmul(hg.moveaxis(wide, axis, -1), matrix), -1, axis)
    return wide


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _largest(
    node: Node,
    gradient: hg.Value,
    given: hg.Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
    indices: hg.Value,
) -> hg.Value:
    count = 2 if "2d" in node.op else 3
    window = window_of(given.shape[-count:], kernel, stride, padding, dilation, ceil)
    node.parts(math.prod(window.kernel))
    wide, x = in_f32(batched(gradient, count)), in_f32(batched(given, count))
    places = hg.reshape(_places_of_largest(x, window), (wide.size,))
    rows = hg.reshape(wide, (wide.size, 1))
    found = hg.ops.add_rows(node.full((x.size, 1), 0, wide.dtype), rows, places)
    return hg.reshape(found, given.shape)


def _places_of_largest(x: hg.Value, window: Window) -> hg.Value:
    """The flat place of the first largest element of each window: a comparison for each position,
    which costs less than the indices of the forward pass."""
    sizes, outputs = x.shape[2:], window.outputs(x.shape[2:])
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(window.ndim)]
    largest = max_pool(x, window)
    wide = padded(x, window, -math.inf)
    found: hg.Value | None = None
    for offset in reversed(list(window.offsets())):
        steps = zip(offset, window.dilation, strides, strict=True)
        number = float(sum(tap * gap * stride for tap, gap, stride in steps))
        one = wide[(slice(None), slice(None), *window.places(offset, outputs))]
        rest = hg.full(one.shape, number, x.dtype, graph=x.graph) if found is None else found
        # Products and sums of such whole numbers are exact, and cost less than a selection.
        found = hg.ops.step(largest - one) * (rest - number) + number
    assert found is not None
    begin = np.zeros((1, 1, *outputs), np.int64)
    for axis, count in enumerate(outputs):
        line = np.arange(count, dtype=np.int64) * window.stride[axis] - window.low[axis]
        begin = begin + (line * strides[axis]).reshape(along(2 + axis, 2 + window.ndim))
    planes = np.arange(x.shape[0] * x.shape[1], dtype=np.int64).reshape(*x.shape[:2], *(1,) * window.ndim)
    places = hg.astype(found, "i64") + begin + planes * math.prod(sizes)
    # A window of NaN or -inf has no largest element; any place serves.
    return hg.clip(places, 0, x.size - 1)
