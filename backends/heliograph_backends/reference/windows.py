"""Formulas: the ops of vision.

Windows are gathered by index, a tile of the result at a time, so that padding, dilation and stride
take no memory: a temporary has about as many elements as the result or a tile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heliograph_backends.reference.base import (
    Array,
    Attributes,
    Formula,
    Writer,
    accumulated,
    constant,
    in_wide,
)
from heliograph_proto.ops.windows import steps, window_sizes

#: Elements of the windows that are gathered at once, unless one window has more.
TILE_ELEMENTS = 2**22


def tiles(sizes: Sequence[int], unit: int) -> Iterator[tuple[slice, ...]]:
    """Yield parts of a grid, each of at most TILE_ELEMENTS // unit places, or one; by shapes
    alone."""
    room, edges = max(1, TILE_ELEMENTS // max(1, unit)), []
    for size in reversed(sizes):
        edges.append(max(1, min(size, room)))
        room = max(1, room // edges[-1])
    ranges = [range(0, size, edge) for size, edge in zip(sizes, reversed(edges), strict=True)]
    for starts in itertools.product(*ranges):
        ends = zip(starts, reversed(edges), sizes, strict=True)
        yield tuple(slice(start, min(start + edge, size)) for start, edge, size in ends)


def places_of(xp: Any, attributes: Attributes, kernel: Sequence[int], part: Sequence[slice]) -> list[Array]:
    """Return the places of the windows' elements in each dimension, [windows, k]; some lie outside
    of the data."""
    given, defaults = dict(attributes), (("stride", 1), ("padding", 0), ("dilation", 1))
    numbers = [steps(given, name, len(kernel), default) for name, default in defaults]
    found = []
    for width, rows, step, pad, spread in zip(kernel, part, *numbers, strict=True):
        first = xp.arange(rows.start, rows.stop)[:, None] * step - pad
        found.append(first + xp.arange(width) * spread)
    return found


def gathered(xp: Any, x: Array, places: Sequence[Array], outside: float = 0.0) -> Array:
    """x [b, c, *sizes] at places [windows, k] of each dimension: [b, c, *windows, *k]."""
    count = len(places)
    grids, inside = [], xp.ones((1,) * 2 * count, bool)
    for axis, place in enumerate(places):
        shape = [1] * 2 * count
        shape[axis], shape[count + axis] = place.shape
        size = x.shape[2 + axis]
        inside = inside & ((place >= 0) & (place < size)).reshape(shape)
        grids.append(xp.clip(place, 0, size - 1).reshape(shape))
    found = x[(slice(None), slice(None), *grids)]
    return found if inside.all() else xp.where(inside, found, x.dtype.type(outside))


def im2col(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    return _windows_as_rows(xp, attributes, kernel.shape[2:], data)


def im2col_3d(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    channels = attributes["channels"]
    folded = data.reshape(data.shape[0] // channels, channels, *data.shape[1:])
    rows = _windows_as_rows(xp, attributes, kernel.shape[1:], folded)
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _windows_as_rows(xp: Any, attributes: Attributes, kernel: tuple[int, ...], data: Array) -> Array:
    """Gather the windows of data [n, c, *sizes] as [n, *windows, c * k]."""
    sizes = window_sizes(dict(attributes), data.shape[2:], kernel)
    places = places_of(xp, attributes, kernel, [slice(0, size) for size in sizes])
    windows = xp.moveaxis(gathered(xp, data, places), 1, 1 + len(sizes))
    return windows.reshape(data.shape[0], *sizes, data.shape[1] * math.prod(kernel))


def conv_2d(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    """Multiply each tile's windows, as rows, by the kernel; one group after the other.

    A window of one element at each place is a product with the data itself.
    """
    groups = attributes["groups"]
    if groups > 1:
        pairs = zip(xp.split(kernel, groups), xp.split(data, groups, 1), strict=True)
        one = {**attributes, "groups": 1}
        return xp.concatenate([conv_2d(xp, one, *pair) for pair in pairs], 1)
    (kernel,) = accumulated(xp, kernel)
    if math.prod((*kernel.shape[2:], *attributes["stride"])) == 1 and not any(attributes["padding"]):
        (data,) = accumulated(xp, data)
        flat = data.reshape(data.shape[0], data.shape[1], math.prod(data.shape[2:]))
        made = xp.matmul(kernel[:, :, 0, 0], flat)
        return made.reshape(data.shape[0], kernel.shape[0], *data.shape[2:])
    # All sizes are given, since without channels reshape could not infer one.
    matrix = kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:])).T

    def product(windows: Array) -> Array:
        rows = windows.transpose(0, 2, 3, 1, 4, 5)
        flat = rows.reshape(math.prod(rows.shape[:3]), matrix.shape[0])
        made = xp.matmul(flat, matrix).reshape(*rows.shape[:3], matrix.shape[1])
        return made.transpose(0, 3, 1, 2)

    return _convolved(xp, attributes, kernel, data, kernel.shape[0], product)


def conv_2d_dw(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    (kernel,) = accumulated(xp, kernel)
    own = kernel[:, 0]
    return _convolved(
        xp,
        attributes,
        kernel,
        data,
        data.shape[1],
        lambda windows: xp.einsum("bcyxij,cij->bcyx", windows, own),
    )


def _convolved(
    xp: Any, attributes: Attributes, kernel: Array, data: Array, channels: int, product: Any
) -> Array:
    """Apply `product` to the windows [b, c, y, x, kh, kw] of every tile."""
    sizes = window_sizes(dict(attributes), data.shape[2:], kernel.shape[2:])
    result = xp.empty((data.shape[0], channels, *sizes), kernel.dtype)
    unit = data.shape[1] * math.prod(kernel.shape[2:])
    for images, rows, columns in tiles((data.shape[0], *sizes), unit):
        places = places_of(xp, attributes, kernel.shape[2:], (rows, columns))
        (windows,) = accumulated(xp, gathered(xp, data[images], places))
        result[images, :, rows, columns] = product(windows)
    return result


def conv_transpose_2d(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    """Add for each tap of the kernel the product of its matrix and the data, at the tap's
    places."""
    kernel, data = accumulated(xp, kernel, data)
    step = attributes["stride"]
    count, _, height, width = data.shape
    taps = kernel.shape[2:]
    sizes = [(size - 1) * step + tap for size, tap in zip((height, width), taps, strict=True)]
    result = xp.zeros((count, kernel.shape[1], *sizes), kernel.dtype)
    rows = data.reshape(count, data.shape[1], height * width)
    for y, x in itertools.product(*map(range, taps)):
        product = xp.matmul(kernel[:, :, y, x].T, rows).reshape(count, -1, height, width)
        result[:, :, y : y + height * step - step + 1 : step, x : x + width * step - step + 1 : step] += (
            product
        )
    return result


def conv_transpose_1d(xp: Any, attributes: Attributes, kernel: Array, data: Array) -> Array:
    return conv_transpose_2d(xp, attributes, kernel[:, :, None], data[None, :, None])[0, :, 0]


def pool(count: int) -> Formula:
    """Return the pooling over the last `count` dimensions. As in ggml, only the mean of one
    dimension leaves padding out."""

    def formula(xp: Any, attributes: Attributes, x: Array) -> Array:
        sizes = window_sizes(dict(attributes), x.shape[-count:], attributes["kernel"])
        lead = x.shape[: x.ndim - count]
        flat = x.reshape(math.prod(lead), 1, *x.shape[-count:])
        widths = [min(pair) for pair in zip(attributes["kernel"], x.shape[-count:], strict=True)]
        result = xp.empty((flat.shape[0], *sizes), accumulated(xp, x[:0])[0].dtype)
        for images, *part in tiles(result.shape, math.prod(widths)):
            result[(images, *part)] = _pooled(xp, attributes, flat[images], part)
        return result.reshape(*lead, *sizes)

    return formula


def _pooled(xp: Any, attributes: Attributes, x: Array, part: Sequence[slice]) -> Array:
    count = len(part)
    places = _covered(xp, attributes, x.shape[2:], part)
    axes = tuple(range(-count, 0))
    (x,) = accumulated(xp, x)
    if not attributes["average"]:
        return gathered(xp, x, places, float(xp.finfo(x.dtype).min))[:, 0].max(axes)
    total = gathered(xp, x, places)[:, 0].sum(axes)
    if count == 2:
        return total / constant(total, math.prod(attributes["kernel"]))
    counted = (places[0] >= 0).sum(-1).astype(total.dtype)
    return total / xp.maximum(counted, constant(total, 1))


def _covered(xp: Any, attributes: Attributes, sizes: Sequence[int], part: Sequence[slice]) -> list[Array]:
    """Return the places that each window covers, [windows, most places]; -1 fills up shorter
    ones."""
    given, count = dict(attributes), len(sizes)
    stride, padding = steps(given, "stride", count, 1), steps(given, "padding", count, 0)
    found = []
    for size, rows, width, step, pad in zip(sizes, part, attributes["kernel"], stride, padding, strict=True):
        start = xp.arange(rows.start, rows.stop)[:, None] * step - pad
        place = xp.maximum(start, 0) + xp.arange(min(width, size))
        found.append(xp.where(place < xp.minimum(start + width, size), place, -1))
    return found


def open_grid(places: Sequence[Array]) -> tuple[Array, ...]:
    """Reshape 1-D indices so that x[grid] has one dimension for each."""
    count = len(places)
    return tuple(one.reshape(-1, *(1,) * (count - 1 - axis)) for axis, one in enumerate(places))


def upscale(xp: Any, attributes: Attributes, x: Array) -> Array:
    shape = attributes["shape"]
    corners = attributes["align_corners"]
    nearest = [
        _nearest(xp, have, size, corners and axis >= x.ndim - 2)
        for axis, (have, size) in enumerate(zip(x.shape, shape, strict=True))
    ]
    if attributes["mode"] == 0:
        return x[open_grid(nearest)]
    if attributes["antialias"]:
        for axis in (-2, -1):
            x = _weighted(xp, x, axis, _triangles(xp, x.shape[axis], shape[axis], corners))
        return x[open_grid([*nearest[:-2], *map(xp.arange, shape[-2:])])]
    between = _between if attributes["mode"] == 1 else _among_four
    sides = [between(xp, have, size, corners) for have, size in zip(x.shape[-2:], shape[-2:], strict=True)]
    result: Any = 0
    for (row, down), (column, across) in itertools.product(*sides):
        weight = (down[:, None] * across).astype(x.dtype)
        result = result + x[open_grid([*nearest[:-2], row, column])] * weight
    return result


def resampling(xp: Any, attributes: Attributes, have: int, size: int) -> tuple[Array, Array]:
    """Return the elements of one dimension of an image that become each of the new ones, [size,
    taps], and their weights; without antialias."""
    corners = attributes["align_corners"]
    if attributes["mode"] == 0:
        place = _nearest(xp, have, size, corners)[:, None]
        return place, xp.ones(place.shape)
    between = _between if attributes["mode"] == 1 else _among_four
    places, weights = zip(*between(xp, have, size, corners), strict=True)
    return xp.stack(places, -1), xp.stack(weights, -1)


def _nearest(xp: Any, have: int, size: int, corners: bool) -> Array:
    """Return the element at or before each of the new places."""
    if corners and have > 1 and size > 1:
        return xp.arange(size) * (have - 1) // (size - 1)
    return xp.arange(size) * have // size


def _between(xp: Any, have: int, size: int, corners: bool) -> list[tuple[Array, Array]]:
    """Return the two neighbours of each of the new places, with their weights."""
    at = _positions(xp, have, size, corners)
    before = xp.clip(xp.floor(at), 0, have - 1).astype(int)
    after = xp.clip(xp.floor(at) + 1, 0, have - 1).astype(int)
    part = xp.clip(at - before, 0, 1)
    return [(before, 1 - part), (after, part)]


def _among_four(xp: Any, have: int, size: int, corners: bool) -> list[tuple[Array, Array]]:
    """Return the four neighbours, with the weights of cubic convolution (Keys, 1981; a = -0.75, as
    in ggml)."""
    at = _positions(xp, have, size, corners)
    before, a = xp.floor(at), -0.75
    found = []
    for step in (-1, 0, 1, 2):
        away = xp.abs(at - before - step)
        near = ((a + 2) * away - (a + 3)) * away * away + 1
        far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
        place = xp.clip(before + step, 0, have - 1).astype(int)
        found.append((place, near if step in (0, 1) else far))
    return found


def _triangles(xp: Any, have: int, size: int, corners: bool) -> tuple[Array, Array]:
    """Return the elements that each of the new places covers, [size, most elements], with their
    weights.

    The weights form a triangle as wide as two new elements, but at least two old ones, and add up
    to 1.
    """
    offset = 0.0 if corners else 0.5
    at = _positions(xp, have, size, corners) + offset
    support = max(1.0, have / size if not corners or min(have, size) < 2 else (have - 1) / (size - 1))
    first = xp.maximum(at - support + offset, 0).astype(int)
    stop = xp.minimum(at + support + offset, have).astype(int)
    place = first[:, None] + xp.arange(int(2 * support) + 2)
    weight = xp.maximum(1 - xp.abs(place - at[:, None] + offset) / support, 0)
    weight = xp.where(place < stop[:, None], weight, 0)
    return xp.minimum(place, have - 1), weight / weight.sum(-1, keepdims=True)


def _weighted(xp: Any, x: Array, axis: int, taps: tuple[Array, Array]) -> Array:
    """Return weighted sums of elements along an axis, at places [size, taps]."""
    total: Any = 0
    for place, weight in zip(taps[0].T, taps[1].T, strict=True):
        wide = weight.astype(x.dtype).reshape(-1, *(1,) * (-1 - axis))
        total = total + xp.take(x, place, axis=axis) * wide
    return total


def _positions(xp: Any, have: int, size: int, corners: bool) -> Array:
    """Return the new places in old coordinates, with pixel centres or corners aligned."""
    offset = 0.0 if corners else 0.5
    aligned = corners and have > 1 and size > 1
    scale = (have - 1) / (size - 1) if aligned else have / size
    return (xp.arange(size) + offset) * scale - offset


def pad(xp: Any, attributes: Attributes, out: Array, x: Array) -> None:
    left = attributes["left"]
    if attributes["circular"]:
        sizes = zip(out.shape, x.shape, left, strict=True)
        out[...] = x[open_grid([(xp.arange(size) - at) % have for size, have, at in sizes])] if x.ndim else x
        return
    out[...] = 0
    out[tuple(slice(at, at + size) for at, size in zip(left, x.shape, strict=True))] = x


def pad_reflect_1d(xp: Any, attributes: Attributes, x: Array) -> Array:
    size = x.shape[-1]
    place = xp.abs(xp.arange(-attributes["left"], size + attributes["right"]))
    return xp.take(x, xp.where(place < size, place, 2 * size - 2 - place), axis=-1)


def roll(xp: Any, attributes: Attributes, x: Array) -> Array:
    shifts = [shift % size for shift, size in zip(attributes["shifts"], x.shape, strict=True)]
    return xp.roll(x, shifts, tuple(range(x.ndim))) if x.ndim else x


FORMULAS: Mapping[str, Formula] = {
    "im2col": im2col,
    "im2col_3d": im2col_3d,
    "conv_2d": conv_2d,
    "conv_2d_dw": conv_2d_dw,
    "conv_transpose_1d": conv_transpose_1d,
    "conv_transpose_2d": conv_transpose_2d,
    "pool_1d": pool(1),
    "pool_2d": pool(2),
    "upscale": in_wide(upscale),
    "pad_reflect_1d": pad_reflect_1d,
    "roll": roll,
}
WRITERS: Mapping[str, Writer] = {"pad": pad}
