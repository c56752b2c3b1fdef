"""Rules of convolutions, pools and resizing: windows as rows, and rows back to data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heliograph.autodiff.step import Rule, Step, composed, each, picked
from heliograph.functions.elementwise import where
from heliograph.graph.lowering import apply, cast, matmul, permute, reshape
from heliograph.graph.value import Value
from heliograph_proto.types import I32

_STEPS = ("stride", "padding", "dilation")


def _steps(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: attributes[name] for name in _STEPS if name in attributes}


def _full(attributes: Mapping[str, Any], count: int) -> list[tuple[int, ...]]:
    """Stride, padding and dilation with one number for each dimension."""
    defaults = zip(_STEPS, (1, 0, 1), strict=True)
    return [tuple(attributes.get(name, ())) or (default,) * count for name, default in defaults]


# Two dimensions, and one


def _im2col(step: Step, g: Value) -> Value:
    kernel, data = step.operands
    kernel = kernel if kernel.dtype.kind != "quantized" else _shaped(data, kernel.shape)
    return apply("im2col_back", g, cast(kernel, g.dtype), shape=data.shape, **_steps(step.attributes))


def _im2col_back(step: Step, g: Value) -> Value:
    return apply("im2col", step[1], g, dtype=g.dtype, **_steps(step.attributes))


def _shaped(like: Value, shape: Sequence[int]) -> Value:
    """Zeros whose shape alone matters."""
    return like.graph.full(shape, 0.0, like.dtype)


def _conv_2d(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    rows = apply("im2col", kernel, data, dtype=data.dtype, **_steps(attributes))
    matrix = reshape(kernel, (kernel.shape[0], math.prod(kernel.shape[1:])))
    count = math.prod(rows.shape[:-1])
    found = matmul(reshape(rows, (count, rows.shape[-1])), matrix.mT)
    return permute(reshape(found, (*rows.shape[:-1], kernel.shape[0])), (0, 3, 1, 2))


def _conv_2d_dw(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    images, channels = data.shape[:2]
    one = _shaped(data, (1, 1, *kernel.shape[2:]))
    folded = reshape(data, (images * channels, 1, *data.shape[2:]))
    rows = apply("im2col", one, folded, dtype=data.dtype, **_steps(attributes))
    sizes, taps = rows.shape[1:-1], rows.shape[-1]
    by_image = reshape(rows, (images, channels, math.prod(sizes), taps))
    by_channel = reshape(permute(by_image, (1, 0, 2, 3)), (channels, images * math.prod(sizes), taps))
    found = matmul(by_channel, reshape(kernel, (channels, taps, 1)))
    return permute(reshape(found, (channels, images, *sizes)), (1, 0, *range(2, 2 + len(sizes))))


def _transposed(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    """The gradient of a convolution with respect to its data."""
    flat = data.ndim == 2
    images = reshape(data, (1, *data.shape)) if flat else data
    count, channels, *sizes = images.shape
    outer, *taps = kernel.shape[1:]
    rows = permute(reshape(images, (count, channels, math.prod(sizes))), (0, 2, 1))
    columns = matmul(rows, reshape(kernel, (channels, outer * math.prod(taps))))
    step = attributes["stride"]
    shape = [(size - 1) * step + tap for size, tap in zip(sizes, taps, strict=True)]
    found = apply(
        "im2col_back",
        reshape(columns, (count, *sizes, outer * math.prod(taps))),
        _shaped(data, (1, outer, *taps)),
        shape=(count, outer, *shape),
        stride=(step,) * len(sizes),
    )
    return reshape(found, found.shape[1:]) if flat else found


def _col2im_1d(attributes: Mapping[str, Any], x: Value) -> Value:
    channels, stride, padding = (attributes[name] for name in ("channels", "stride", "padding"))
    taps = x.shape[1] // channels
    length = (x.shape[0] - 1) * stride + taps - 2 * padding
    found = apply(
        "im2col_back",
        reshape(x, (1, *x.shape)),
        _shaped(x, (1, channels, taps)),
        shape=(1, channels, length),
        stride=(stride,),
        padding=(padding,),
    )
    return reshape(found, (channels, length))


# Three dimensions: a slice for each place of the kernel


def _taps(attributes: Mapping[str, Any], data: Value, kernel: Sequence[int]) -> list[Value]:
    """The elements of data [n, c, *sizes] at each place of the windows, [n, c, *windows]."""
    count = len(kernel)
    stride, padding, dilation = _full(attributes, count)
    edge = (0, 0, *padding)
    wide = apply("pad", data, left=edge, right=edge) if any(padding) else data
    counts = [
        (size - spread * (width - 1) - 1) // step + 1
        for size, width, step, spread in zip(wide.shape[2:], kernel, stride, dilation, strict=True)
    ]
    found = []
    for place in itertools.product(*map(range, kernel)):
        start = [at * spread for at, spread in zip(place, dilation, strict=True)]
        stop = [at + (many - 1) * step + 1 for at, many, step in zip(start, counts, stride, strict=True)]
        found.append(
            apply(
                "slice",
                wide,
                start=(0, 0, *start),
                stop=(*wide.shape[:2], *stop),
                step=(1, 1, *stride),
            )
        )
    return found


def _windows_3d(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    """Rows [n, *windows, channels k] of data [n channels, *sizes]."""
    channels = attributes["channels"]
    folded = reshape(data, (data.shape[0] // channels, channels, *data.shape[1:]))
    places = [reshape(one, (*one.shape, 1)) for one in _taps(attributes, folded, kernel.shape[1:])]
    stacked = apply("concat", *places, axis=places[0].ndim - 1)
    rows = permute(stacked, (0, 2, 3, 4, 1, 5))
    return reshape(rows, (*rows.shape[:4], channels * math.prod(kernel.shape[1:])))


def _im2col_3d(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    rows = _windows_3d(attributes, kernel, data)
    found = reshape(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:]))
    return cast(found, attributes["dtype"])


def _conv_3d(attributes: Mapping[str, Any], kernel: Value, data: Value) -> Value:
    rows = _windows_3d(attributes, kernel, data)
    outer = kernel.shape[0] // attributes["channels"]
    matrix = reshape(kernel, (outer, rows.shape[-1]))
    found = permute(matmul(rows, matrix.mT), (0, 4, 1, 2, 3))
    return reshape(found, (found.shape[0] * outer, *found.shape[2:]))


def _ssm_conv(attributes: Mapping[str, Any], x: Value, kernel: Value) -> Value:
    taps = kernel.shape[1]
    length = x.shape[2] - taps + 1
    total = x[:, :, :length] * kernel[:, 0:1]
    for tap in range(1, taps):
        total = total + x[:, :, tap : tap + length] * kernel[:, tap : tap + 1]
    return permute(total, (0, 2, 1))


# Pools


def _pool_2d(step: Step, g: Value) -> Value:
    return apply("pool_2d_back", g, step[0], **step.attributes)


def _pool_1d(attributes: Mapping[str, Any], x: Value) -> Value:
    """As a pool of rows of height 1; the mean leaves padding out."""
    (width,) = attributes["kernel"]
    (stride,), (padding,), _ = _full(attributes, 1)
    plane = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    found = apply(
        "pool_2d",
        plane,
        kernel=(1, width),
        stride=(1, stride),
        padding=(0, padding),
        average=attributes["average"],
    )
    flat = reshape(found, (*x.shape[:-1], found.shape[-1]))
    if not attributes["average"]:
        return flat
    first = np.arange(flat.shape[-1]) * stride - padding
    inside = np.minimum(first + width, x.shape[-1]) - np.maximum(first, 0)
    return flat * x.graph.constant(width / np.maximum(inside, 1), flat.dtype)


def _pool_2d_back(step: Step, g: Value) -> Value:
    """The mean of each window, or the element where the operand of the pool is largest."""
    if step.attributes["average"]:
        return apply("pool_2d", g, **step.attributes)
    x, taps = step[1], step.attributes["kernel"]
    kernel = _shaped(g, (1, 1, *taps))
    shape = (math.prod(x.shape[:-2]), 1, *x.shape[-2:])

    def windows(of: Value) -> Value:
        """Rows of windows, in which padding is 0."""
        steps = {name: step.attributes[name] for name in ("stride", "padding")}
        return apply("im2col", kernel, reshape(of, shape), dtype=g.dtype, **steps)

    inside = windows(g.graph.full(shape, 1.0, g.dtype)) > 0.0
    largest = apply("argmax", where(inside, windows(x), -math.inf))
    places = g.graph.constant(np.arange(math.prod(taps)), I32)
    chosen = where(reshape(largest, (*largest.shape, 1)) == places, windows(g), 0.0)
    return reshape(apply("reduce_sum", chosen, axes=(-1,), keepdims=False), step[0].shape)


# Resizing


def _upscale(attributes: Mapping[str, Any], x: Value) -> Value:
    """A product with a matrix for each of the last two dimensions."""
    shape, corners = attributes["shape"], attributes["align_corners"]
    for axis, (have, size) in enumerate(zip(x.shape[:-2], shape[:-2], strict=True)):
        if have != size:
            x = picked(x, [place * have // size for place in range(size)], axis)
    down, across = (
        x.graph.constant(_resampling(attributes, have, size, corners), x.dtype)
        for have, size in zip(x.shape[-2:], shape[-2:], strict=True)
    )
    return matmul(matmul(down, x), across.mT)


def _resampling(attributes: Mapping[str, Any], have: int, size: int, corners: bool) -> np.ndarray[Any, Any]:
    """The weights of old elements for each new one, [size, have]."""
    found = np.zeros((size, have))
    aligned = corners and have > 1 and size > 1
    offset = 0.0 if corners else 0.5
    scale = (have - 1) / (size - 1) if aligned else have / size
    for new in range(size):
        at = (new + offset) * scale - offset
        if attributes["mode"] == 0:
            found[new, new * (have - 1) // (size - 1) if aligned else new * have // size] = 1
        elif attributes["antialias"]:
            support = max(1.0, have / size if not corners or min(have, size) < 2 else scale)
            first, stop = (
                int(max(at + offset - support + offset, 0)),
                int(min(at + 2 * offset + support, have)),
            )
            for place in range(first, stop):
                found[new, place] = max(1 - abs(place - at) / support, 0)
            found[new] /= found[new].sum()
        elif attributes["mode"] == 1:
            before = min(max(math.floor(at), 0), have - 1)
            after = min(max(math.floor(at) + 1, 0), have - 1)
            part = min(max(at - before, 0), 1)
            found[new, before] += 1 - part
            found[new, after] += part
        else:
            _cubic(found[new], at)
    return found


def _cubic(row: np.ndarray[Any, Any], at: float, a: float = -0.75) -> None:
    """Add the weights of cubic convolution (Keys, 1981) to a row."""
    before = math.floor(at)
    for step in (-1, 0, 1, 2):
        away = abs(at - before - step)
        near = ((a + 2) * away - (a + 3)) * away * away + 1
        far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
        row[min(max(before + step, 0), len(row) - 1)] += near if step in (0, 1) else far


RULES: Mapping[str, Rule] = {
    "im2col": each(None, _im2col),
    "im2col_back": each(_im2col_back),
    "im2col_3d": composed(_im2col_3d),
    "conv_2d": composed(_conv_2d),
    "conv_2d_dw": composed(_conv_2d_dw),
    "conv_transpose_1d": composed(_transposed),
    "conv_transpose_2d": composed(_transposed),
    "conv_3d": composed(_conv_3d),
    "col2im_1d": composed(_col2im_1d),
    "ssm_conv": composed(_ssm_conv),
    "pool_1d": composed(_pool_1d),
    "pool_2d": each(_pool_2d),
    "pool_2d_back": each(_pool_2d_back),
    "upscale": composed(_upscale),
}
