"""Rules of ops that change shapes, cut, and join."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, crop, pad, part
from heliograph.torch.elements import torch_dtype
from heliograph.torch.node import Node, Number, axis_of, number_of
from heliograph.torch.rules import rule


@rule("view", "view_copy", "_reshape_copy")
def _view(node: Node, x: hg.Value, shape: Sequence[int]) -> hg.Value:
    sizes = [int(one) for one in shape]
    if -1 in sizes:
        rest = math.prod(one for one in sizes if one != -1)
        sizes[sizes.index(-1)] = x.size // rest if rest else 0
    return hg.reshape(x, sizes)


@rule("view.dtype")
def _view_as(node: Node, x: hg.Value, dtype: object) -> hg.Value:
    dtypes = (str(x.dtype), node.dtype())
    if "bool" in dtypes or len({torch_dtype(one).itemsize for one in dtypes}) > 1:
        raise node.refuse("the bits of a tensor as a data type of another size, or as truth values")
    return hg.ops.bitcast(x, dtype=node.dtype())


@rule("permute")
def _permute(node: Node, x: hg.Value, axes: Sequence[int]) -> hg.Value:
    return hg.permute_dims(x, [axis_of(one, x.ndim) for one in axes])


@rule("expand")
def _expand(node: Node, x: hg.Value, shape: Sequence[int], implicit: bool = False) -> hg.Value:
    new = len(shape) - x.ndim
    return hg.broadcast_to(
        x, [x.shape[place - new] if size == -1 else int(size) for place, size in enumerate(shape)]
    )


@rule("unsqueeze")
def _unsqueeze(node: Node, x: hg.Value, axis: int) -> hg.Value:
    return hg.expand_dims(x, axis=axis)


@rule("squeeze")
def _squeeze(node: Node, x: hg.Value, axes: int | Sequence[int] | None = None) -> hg.Value:
    if axes is None:
        dropped = set(range(x.ndim))
    else:
        dropped = {axis_of(one, x.ndim) for one in ([axes] if isinstance(axes, int) else axes)}
    return hg.reshape(x, [size for place, size in enumerate(x.shape) if size != 1 or place not in dropped])


def range_of(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Return a slice's bounds as torch has them, within so many elements."""
    first, last = (0 if start is None else int(start)), (size if stop is None else int(stop))
    first, last = (one + size if one < 0 else one for one in (first, last))
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


@rule("slice")
def _slice(
    node: Node, x: hg.Value, axis: int, start: int | None, stop: int | None, step: int = 1
) -> hg.Value:
    place = axis_of(axis, x.ndim)
    return part(x, place, *range_of(x.shape[place], start, stop), int(step))


@rule("select")
def _select(node: Node, x: hg.Value, axis: int, index: int) -> hg.Value:
    place = axis_of(axis, x.ndim)
    key: list[int | slice] = [slice(None)] * x.ndim
    key[place] = int(index)
    return x[tuple(key)]


@rule("split_with_sizes")
def _split_with_sizes(node: Node, x: hg.Value, sizes: Sequence[int], axis: int) -> list[hg.Value]:
    place = axis_of(axis, x.ndim)
    edges = np.cumsum([0, *(int(one) for one in sizes)])
    return [part(x, place, int(edges[at]), int(edges[at + 1])) for at in range(len(sizes))]


@rule("cat")
def _cat(node: Node, given: Sequence[hg.Value], axis: int) -> hg.Value:
    # Vectors of nothing count as nothing, whatever the others' shapes.
    tensors = [cast(one, node.dtype()) for one in given if one.shape != (0,)] or [given[0]]
    return hg.concat(tensors, axis=axis_of(axis, tensors[0].ndim))


@rule("repeat")
def _repeat(node: Node, x: hg.Value, times: Sequence[int]) -> hg.Value:
    return hg.tile(x, [int(one) for one in times])


@rule("flip")
def _flip(node: Node, x: hg.Value, axes: Sequence[int]) -> hg.Value:
    return hg.flip(x, axis=tuple(axis_of(one, x.ndim) for one in axes)) if x.ndim and axes else x


@rule("constant_pad_nd")
def _pad(node: Node, x: hg.Value, sizes: Sequence[int], number: Number) -> hg.Value:
    low, high = sides(x.ndim, sizes)
    number = number_of(number, x.dtype)
    cut = crop(x, [max(0, -one) for one in low], [max(0, -one) for one in high])
    return pad(cut, [max(0, one) for one in low], [max(0, one) for one in high], number)


def sides(ndim: int, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the padding before and after each dimension; torch lists the last dimension first."""
    low, high = [0] * ndim, [0] * ndim
    for number in range(len(sizes) // 2):
        low[ndim - 1 - number], high[ndim - 1 - number] = (
            int(sizes[2 * number]),
            int(sizes[2 * number + 1]),
        )
    return low, high


@rule("diagonal")
def _diagonal(node: Node, x: hg.Value, offset: int, first: int, second: int) -> hg.Value:
    one, two = axis_of(first, x.ndim), axis_of(second, x.ndim)
    rows, columns = x.shape[one], x.shape[two]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    last = hg.moveaxis(x, (one, two), (x.ndim - 2, x.ndim - 1))
    flat = hg.reshape(last, (*last.shape[:-2], rows * columns))
    start = max(offset, 0) - min(offset, 0) * columns
    if not length:
        return part(flat, flat.ndim - 1, 0, 0)
    stop = start + (length - 1) * (columns + 1) + 1
    return part(flat, flat.ndim - 1, start, stop, columns + 1)


@rule("as_strided")
def _as_strided(
    node: Node, x: hg.Value, shape: Sequence[int], strides: Sequence[int], offset: int | None
) -> hg.Value:
    """Read the storage of x, which holds its elements by its own strides, in another order."""
    node.room(math.prod(shape))
    given = node.strides(0)
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, given, strict=True)) + 1
    node.room(extent)
    storage = np.full(max(extent, 1), -1, np.int64)
    if x.size:
        storage[_places(x.shape, given)] = np.arange(x.size, dtype=np.int64).reshape(x.shape)
    start = node.offset(0)
    wanted = _places(shape, strides) + (0 if offset is None else int(offset) - start)
    inside = (wanted >= 0) & (wanted < extent)
    flat = np.where(inside, storage[np.where(inside, wanted, 0)], -1)
    if (flat < 0).any():
        raise node.refuse("it reads elements of the storage that the tensor does not show")
    return hg.reshape(hg.take(hg.flatten(x), flat.reshape(-1), axis=0), tuple(int(one) for one in shape))


def _places(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found = np.zeros((), np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found


@rule("unfold")
def _unfold(node: Node, x: hg.Value, axis: int, size: int, step: int) -> hg.Value:
    if not x.ndim:
        return hg.reshape(x, (size,))
    place = axis_of(axis, x.ndim)
    count = (x.shape[place] - size) // step + 1
    node.room(count * size)
    places = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    return hg.moveaxis(hg.take(x, places, axis=place), place + 1, -1)
