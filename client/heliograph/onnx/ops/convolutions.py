"""Rules of convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, channels, pad
from heliograph.lowerings.columns import columns_to_image
from heliograph.lowerings.scatters import scatter_rows
from heliograph.lowerings.windows import (
    Window,
    convolve,
    convolve_transposed,
    is_plain_pool,
    max_pool,
    max_pool_places,
    mean_pool,
    sum_pool,
)
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule


def _positive(node: Node, name: str, count: int) -> list[int]:
    found = node.ints(name) or [1] * count
    if len(found) != count or min(found, default=1) < 1:
        raise node.broken(f"attribute {name!r} is {found} for {count} dimensions")
    return found


def _pads(node: Node, count: int) -> list[int]:
    found = node.ints("pads") or [0] * 2 * count
    if len(found) != 2 * count or min(found, default=0) < 0:
        raise node.broken(f"attribute 'pads' is {found} for {count} dimensions")
    return found


def window_of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """Return the window of a node over data of these sizes."""
    count = len(kernel)
    declared = node.ints("kernel_shape") or list(kernel)
    if not kernel or len(sizes) != count or min(kernel) < 1 or declared != list(kernel):
        raise node.broken(f"a kernel of {tuple(kernel)} over data of {tuple(sizes)}")
    stride, dilation = _positive(node, "strides", count), _positive(node, "dilations", count)
    kind = node.string("auto_pad", "NOTSET")
    pads = _pads(node, count) if kind == "NOTSET" else [0] * 2 * count
    low, high = pads[:count], pads[count:]
    if kind in ("SAME_UPPER", "SAME_LOWER"):
        low, high = [], []
        for axis, size in enumerate(sizes):
            span = dilation[axis] * (kernel[axis] - 1) + 1
            whole = max(0, (-(-size // stride[axis]) - 1) * stride[axis] + span - size)
            less, more = whole // 2, whole - whole // 2
            low.append(less if kind == "SAME_UPPER" else more)
            high.append(more if kind == "SAME_UPPER" else less)
    return Window(tuple(kernel), tuple(stride), tuple(dilation), tuple(low), tuple(high))


def groups_of(node: Node, x: hg.Value, weights: hg.Value) -> int:
    """Return the groups of a convolution, checked."""
    groups = node.int("group", 1)
    if groups < 1 or x.shape[1] != weights.shape[1] * groups or weights.shape[0] % groups:
        raise node.broken(f"{groups} groups of {x.shape[1]} channels with weights of {weights.shape}")
    if not groups == x.shape[1] == weights.shape[0]:
        node.parts(groups)
    return groups


@rule("Conv")
def _conv(node: Node) -> Item:
    x, weights = node.value(0), node.value(1)
    window = window_of(node, x.shape[2:], weights.shape[2:])
    found = convolve(x, weights, window, groups_of(node, x, weights))
    return found + channels(node.value(2), x.ndim) if node.has(2) else found


@rule("ConvInteger")
def _conv_integer(node: Node) -> Item:
    x, weights = cast(node.value(0), "f32"), cast(node.value(1), "f32")
    if node.has(2):
        x = x - cast(hg.reshape(node.value(2), ()), "f32")
    if node.has(3):
        weights = weights - by_output(cast(node.value(3), "f32"), weights.ndim)
    window = window_of(node, x.shape[2:], weights.shape[2:])
    return cast(convolve(x, weights, window, groups_of(node, x, weights)), "i32")


def by_output(v: hg.Value, ndim: int) -> hg.Value:
    """Return a scalar, or a vector along the first axis of weights."""
    return hg.reshape(v, (-1, *(1,) * (ndim - 1))) if v.ndim else v


@rule("ConvTranspose")
def _conv_transpose(node: Node) -> Item:
    x, weights = node.value(0), node.value(1)
    count, kernel = x.ndim - 2, weights.shape[2:]
    stride, dilation = _positive(node, "strides", count), _positive(node, "dilations", count)
    extra = node.ints("output_padding") or [0] * count
    kind, wanted = node.string("auto_pad", "NOTSET"), node.ints("output_shape")
    pads = _pads(node, count)
    low, high = pads[:count], pads[count:]
    if wanted is not None or kind.startswith("SAME"):
        low, high = [], []
        for axis in range(count):
            size = x.shape[2 + axis]
            target = wanted[len(wanted) - count + axis] if wanted is not None else size * stride[axis]
            full = stride[axis] * (size - 1) + extra[axis] + (kernel[axis] - 1) * dilation[axis] + 1
            whole = max(0, full - target)
            less = whole - whole // 2 if kind == "SAME_LOWER" else whole // 2
            low.append(less)
            high.append(whole - less)
            extra[axis] += max(0, target - full)
    groups = node.int("group", 1)
    if groups < 1 or x.shape[1] != weights.shape[0] or x.shape[1] % groups:
        raise node.broken(f"{groups} groups of {x.shape[1]} channels with weights of {weights.shape}")
    window = Window(kernel, tuple(stride), tuple(dilation), tuple(low), tuple(high))
    found = convolve_transposed(x, weights, window, extra, groups)
    return found + channels(node.value(2), x.ndim) if node.has(2) else found


def _pool(node: Node, x: hg.Value) -> Window:
    """Return the window of a pool, padded further for the windows of ceil_mode."""
    kernel = node.ints("kernel_shape")
    if kernel is None:
        raise node.broken("attribute 'kernel_shape' is missing")
    window = window_of(node, x.shape[2:], kernel)
    if not node.int("ceil_mode", 0):
        return window
    high = list(window.high)
    for axis, size in enumerate(x.shape[2:]):
        low, stride, span = window.low[axis], window.stride[axis], window.span(axis)
        count = -(-(size + low + high[axis] - span) // stride) + 1
        # The last window begins inside of the data or of the padding before it.
        count -= (count - 1) * stride >= size + low
        high[axis] = max(high[axis], (count - 1) * stride + span - size - low)
    return Window(window.kernel, window.stride, window.dilation, window.low, tuple(high))


@rule("MaxPool")
def _max_pooling(node: Node) -> Item | tuple[Item, ...]:
    x = node.value(0)
    window = _pool(node, x)
    if not node.wants(1):
        return max_pool(x, window)
    sizes = x.shape[2:]
    node.room(*sizes)
    order = "F" if node.int("storage_order", 0) else "C"
    flat = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes, order=order)  # type: ignore[call-overload]
    return max_pool_places(x, window, flat)


@rule("AveragePool")
def _average_pool(node: Node) -> Item:
    x = node.value(0)
    window, plain = _pool(node, x), window_of(node, x.shape[2:], node.ints("kernel_shape") or [])
    node.room(*(size + one for size, one in zip(x.shape[2:], window.kernel, strict=True)))
    counted = bool(node.int("count_include_pad", 0))
    if (counted or not any(window.low)) and window == plain and is_plain_pool(x, window):
        return mean_pool(x, window)
    total = sum_pool(x, window)
    counts = np.ones((), np.float64)
    for axis, size in enumerate(x.shape[2:]):
        low, high = plain.low[axis], plain.high[axis]
        line = np.pad(np.ones(size), (low, high), constant_values=1.0 if counted else 0.0)
        line = np.pad(line, (0, window.high[axis] - high))
        outputs = window.outputs(x.shape[2:])[axis]
        places = np.arange(outputs)[:, None] * window.stride[axis]
        steps = np.arange(window.kernel[axis])[None, :] * window.dilation[axis]
        counts = np.multiply.outer(counts, line[places + steps].sum(axis=1))
    return total / counts.astype(x.dtype.numpy)


@rule("LpPool")
def _lp_pool(node: Node) -> Item:
    x, p = node.value(0), float(node.int("p", 2))
    return hg.pow(sum_pool(hg.pow(hg.abs(x), p), _pool(node, x)), 1 / p)


@rule("GlobalAveragePool")
def _global_average_pool(node: Node) -> Item:
    x = node.value(0)
    return hg.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@rule("GlobalMaxPool")
def _global_max_pool(node: Node) -> Item:
    x = node.value(0)
    return hg.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@rule("GlobalLpPool")
def _global_lp_pool(node: Node) -> Item:
    x, p = node.value(0), float(node.int("p", 2))
    total = hg.sum(hg.pow(hg.abs(x), p), axis=tuple(range(2, x.ndim)), keepdims=True)
    return hg.pow(total, 1 / p)


@rule("MaxUnpool")
def _max_unpool(node: Node) -> Item:
    x, places = node.value(0), node.value(1)
    kernel = node.ints("kernel_shape") or []
    count = len(kernel)
    stride, pads = _positive(node, "strides", count), _pads(node, count)
    base = list(x.shape[:2]) + [
        (x.shape[2 + axis] - 1) * stride[axis] + kernel[axis] - pads[axis] - pads[count + axis]
        for axis in range(count)
    ]
    zeros = hg.zeros((math.prod(base), 1), x.dtype, graph=node.graph)
    rows = hg.reshape(x, (x.size, 1))
    found = hg.reshape(scatter_rows(zeros, rows, hg.reshape(places, (places.size,))), base)
    if not node.has(2):
        return found
    more = [wanted - size for wanted, size in zip(node.integers(2), base, strict=True)]
    return pad(found, [0] * len(base), more)


@rule("Col2Im")
def _columns_to_image(node: Node) -> Item:
    """Add up blocks where they overlap."""
    x, image, block = node.value(0), node.integers(1), node.integers(2)
    count = len(image)
    dilation, stride = _positive(node, "dilations", count), _positive(node, "strides", count)
    pads = _pads(node, count)
    if min((*block, *image), default=0) < 1:
        raise node.broken(f"blocks of {block} in an image of {image}")
    node.parts(math.prod(block))
    low, high = tuple(pads[:count]), tuple(pads[count:])
    return columns_to_image(x, tuple(image), Window(tuple(block), tuple(stride), tuple(dilation), low, high))
