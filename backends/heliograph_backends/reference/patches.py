"""Formulas: rarer ops of vision, and the gradients of windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, accumulated, constant, in_wide
from heliograph_backends.reference.windows import gathered, places_of, tiles
from heliograph_proto.ops.windows import steps, window_sizes


def conv_3d(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    """Multiply each tile's windows, as rows, by the kernel, as in conv_2d."""
    channels, taps = attributes["channels"], kernel.shape[1:]
    (kernel,) = accumulated(xp, kernel)
    count, made = data.shape[0] // channels, kernel.shape[0] // channels
    matrix = kernel.reshape(made, channels * math.prod(taps)).T
    folded = data.reshape(count, channels, *data.shape[1:])
    sizes = window_sizes(dict(attributes), data.shape[1:], taps)
    result = xp.empty((count, made, *sizes), kernel.dtype)
    for images, *part in tiles((count, *sizes), matrix.shape[0]):
        places = places_of(xp, attributes, taps, part)
        (windows,) = accumulated(xp, gathered(xp, folded[images], places))
        rows = windows.transpose(0, 2, 3, 4, 1, 5, 6, 7)
        flat = rows.reshape(math.prod(rows.shape[:4]), matrix.shape[0])
        product = xp.matmul(flat, matrix).reshape(*rows.shape[:4], made)
        result[(images, slice(None), *part)] = xp.moveaxis(product, -1, 1)
    return result.reshape(count * made, *sizes)


def col2im_1d(xp: Any, attributes: Attributes, x: Array) -> Array:
    """Compute only the kept elements, so that neither stride nor padding takes memory."""
    channels, stride, padding = (attributes[name] for name in ("channels", "stride", "padding"))
    taps = x.shape[1] // channels
    length = (x.shape[0] - 1) * stride + taps - 2 * padding
    result = xp.zeros((channels, length), x.dtype)
    for tap in range(taps):
        place = xp.arange(x.shape[0]) * stride + (tap - padding)
        inside = (place >= 0) & (place < length)
        result[:, place[inside]] += x[inside, tap::taps].T
    return result


def win_part(xp: Any, attributes: Attributes, x: Array) -> Array:
    window = attributes["window"]
    height, width, channels = x.shape
    down, across = -(-height // window), -(-width // window)
    padded = xp.zeros((down * window, across * window, channels), x.dtype)
    padded[:height, :width] = x
    split = padded.reshape(down, window, across, window, channels)
    return split.swapaxes(1, 2).reshape(down * across, window, window, channels)


def win_unpart(xp: Any, attributes: Attributes, x: Array) -> Array:
    height, width, window = attributes["height"], attributes["width"], x.shape[1]
    down, across = -(-height // window), -(-width // window)
    joined = x.reshape(down, across, window, window, x.shape[3]).swapaxes(1, 2)
    return joined.reshape(down * window, across * window, x.shape[3])[:height, :width]


def get_rel_pos(xp: Any, attributes: Attributes, x: Array) -> Array:
    place = xp.arange((x.shape[0] + 1) // 2)
    return x[place.size - 1 + place[:, None] - place]


def add_rel_pos(xp: Any, attributes: Attributes, x: Array, columns: Array, rows: Array) -> Array:
    split = x.reshape(*columns.shape, columns.shape[-1])
    return (split + rows[..., :, None] + columns[..., None, :]).reshape(x.shape)


def im2col_back(xp: Any, attributes: Attributes, gradient: Array, kernel: Array) -> Array:
    """Add each tap's gradients at the places that it read; within one tap all places are
    distinct."""
    (gradient,) = accumulated(xp, gradient)
    shape, taps = tuple(attributes["shape"]), kernel.shape[2:]
    windows = gradient.shape[1:-1]
    split = gradient.reshape(shape[0], *windows, shape[1], *taps)
    places = places_of(xp, attributes, taps, [slice(0, size) for size in windows])
    result = xp.zeros(shape, gradient.dtype)
    for tap in itertools.product(*map(range, taps)):
        inside, targets = [], []
        for place, at, size in zip(places, tap, shape[2:], strict=True):
            kept = xp.flatnonzero((place[:, at] >= 0) & (place[:, at] < size))
            inside.append(kept)
            targets.append(place[kept, at])
        some = xp.moveaxis(split[(..., *tap)], -1, 1)
        every = slice(None)
        result[(every, every, *xp.ix_(*targets))] += some[(every, every, *xp.ix_(*inside))]
    return result


def pool_2d_back(xp: Any, attributes: Attributes, gradient: Array, x: Array) -> Array:
    """Process the part of each window inside x, so that padding takes neither memory nor time."""
    gradient, x = accumulated(xp, gradient, x)
    flat, given = x.reshape(-1, *x.shape[-2:]), gradient.reshape(-1, *gradient.shape[-2:])
    result = xp.zeros(flat.shape, x.dtype)
    for (row, rows), (column, columns) in itertools.product(
        *_inside(attributes, flat.shape[1:], given.shape[1:])
    ):
        part = (slice(None), rows, columns)
        _add_gradient(xp, result[part], flat[part], given[:, row, column], attributes)
    return result.reshape(x.shape)


def _inside(
    attributes: Attributes, sizes: Sequence[int], counts: Sequence[int]
) -> Iterator[list[tuple[int, slice]]]:
    """Yield for each dimension the windows that reach into x, with their slices of it."""
    strides, padding = (steps(dict(attributes), *named) for named in (("stride", 2, 1), ("padding", 2, 0)))
    numbers = zip(sizes, counts, attributes["kernel"], strides, padding, strict=True)
    for size, count, width, stride, pad in numbers:
        first, stop = max(0, (pad - width) // stride + 1), min(count, (size - 1 + pad) // stride + 1)
        starts = ((n, n * stride - pad) for n in range(first, stop))
        yield [(n, slice(max(0, start), min(size, start + width))) for n, start in starts]


def _add_gradient(xp: Any, result: Array, window: Array, gradient: Array, attributes: Attributes) -> None:
    """Add the gradients [b] of a window [b, h, w] to those of its elements in `result`."""
    if attributes["average"]:
        result += (gradient / constant(gradient, math.prod(attributes["kernel"])))[:, None, None]
    else:
        largest = window.reshape(window.shape[0], -1).argmax(-1)
        image = xp.arange(window.shape[0])
        result[image, largest // window.shape[2], largest % window.shape[2]] += gradient


FORMULAS: Mapping[str, Formula] = {
    "conv_3d": conv_3d,
    "col2im_1d": in_wide(col2im_1d),
    "win_part": win_part,
    "win_unpart": win_unpart,
    "get_rel_pos": get_rel_pos,
    "add_rel_pos": in_wide(add_rel_pos),
    "im2col_back": im2col_back,
    "pool_2d_back": pool_2d_back,
}
