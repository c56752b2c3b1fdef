"""Rules of ops that take or replace elements at places that a run computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

import heliograph as hg
from heliograph.lowerings.arrays import cast, from_front, part
from heliograph.lowerings.scatters import Reduction, element_places, scatter_rows
from heliograph.torch.node import Node, Number, axis_of, in_f32, promoted
from heliograph.torch.ops.shapes import range_of
from heliograph.torch.rules import rule

#: An index of one dimension: places, or None for all of it.
Index: TypeAlias = Any


@rule("embedding")
def _embedding(node: Node, weight: hg.Value, places: hg.Value, *_: Any) -> hg.Value:
    return hg.take(weight, places, axis=0)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    node: Node,
    weight: hg.Value,
    places: hg.Value,
    offsets: hg.Value,
    scaled: bool,
    mode: int,
    sparse: bool,
    factors: hg.Value | None,
    include_last: bool,
    padding: int,
) -> list[hg.Value | None]:
    """Add up, average, or take the largest of the rows of each bag."""
    if any(node.wants(place) for place in (1, 2, 3)):
        raise node.refuse("what the gradient of bags of embeddings needs is not computed")
    count = offsets.shape[0] - include_last
    rows = in_f32(hg.take(weight, places, axis=0))
    if factors is not None:
        rows = rows * hg.expand_dims(cast(factors, rows.dtype), axis=1)
    numbers = hg.arange(places.shape[0], dtype="i64", graph=node.graph)
    starts = cast(offsets, "i64")[:count]
    # Each place belongs to the last bag that begins before it; what is padded, to one bag more.
    bags = hg.searchsorted(starts, numbers, side="right") - 1
    if padding >= 0:
        bags = hg.where(cast(places, "i64") == padding, count, bags)
    ones = node.full((places.shape[0], 1), 1, rows.dtype)
    counts = scatter_rows(node.full((count + 1, 1), 0, rows.dtype), ones, bags, "add")
    start = node.full((count + 1, weight.shape[1]), -math.inf if mode == 2 else 0, rows.dtype)
    found = scatter_rows(start, rows, bags, "max" if mode == 2 else "add")
    if mode == 1:
        found = found / hg.maximum(counts, 1.0)
    if mode == 2:
        found = hg.where(counts == 0, 0.0, found)
    return [found[:count], None, None, None]


@rule("index_select")
def _index_select(node: Node, x: hg.Value, axis: int, places: hg.Value) -> hg.Value:
    if not x.ndim:
        return x
    return hg.take(x, hg.reshape(places, (places.size,)), axis=axis_of(axis, x.ndim))


@rule("gather")
def _gather(node: Node, x: hg.Value, axis: int, places: hg.Value, *_: Any) -> hg.Value:
    if not x.ndim:
        return hg.broadcast_to(x, places.shape)
    place = axis_of(axis, x.ndim)
    if not places.ndim:
        return hg.reshape(hg.take(x, hg.reshape(places, (1,)), axis=0), ())
    if not places.size:
        return node.full(places.shape, 0, x.dtype)
    flat = hg.reshape(element_places(places, x.shape, place), (places.size,))
    return hg.reshape(hg.take(hg.flatten(x), flat, axis=0), places.shape)


@rule("index", host=True)
def _index(node: Node, x: hg.Value | torch.Tensor, given: Sequence[Index]) -> hg.Value:
    x = node.lift(x)
    indices = _Indices(node, x.shape, given)
    moved = hg.permute_dims(x, indices.order)
    flat = hg.reshape(moved, (math.prod(indices.indexed), *moved.shape[len(indices.axes) :]))
    found = indices.take(flat)
    wide = hg.reshape(found, (*indices.shape, *moved.shape[len(indices.axes) :]))
    return hg.permute_dims(wide, indices.back(wide.ndim))


class _Indices:
    """Places along some of the dimensions of a tensor, which broadcast with each other."""

    def __init__(self, node: Node, shape: Sequence[int], given: Sequence[Index]) -> None:
        if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in given if _is_host(one)):
            given = _expanded(node, given)
        if any(isinstance(one, hg.Value) and one.dtype.name in ("bool", "u8") for one in given):
            raise node.refuse(
                "a mask that a run computes decides the shape", "use torch.where, or multiply by the mask"
            )
        self.axes = [axis for axis, one in enumerate(given) if one is not None]
        self._places = [one for one in given if one is not None]
        self.indexed = [shape[axis] for axis in self.axes]
        self.order = [*self.axes, *(axis for axis in range(len(shape)) if axis not in self.axes)]
        self.shape: tuple[int, ...] = np.broadcast_shapes(*(tuple(one.shape) for one in self._places))
        # The dimensions of adjacent indices stay in their place; others go first.
        first, last = self.axes[0], self.axes[-1]
        self._start = first if last - first == len(self.axes) - 1 else 0

    def back(self, ndim: int) -> list[int]:
        """The order that brings the dimensions of the indices to their place."""
        own = list(range(len(self.shape)))
        rest = list(range(len(self.shape), ndim))
        return [*rest[: self._start], *own, *rest[self._start :]]

    def forth(self, ndim: int) -> list[int]:
        """The order that undoes `back`."""
        order = self.back(ndim)
        return [order.index(place) for place in range(ndim)]

    def take(self, table: hg.Value) -> hg.Value:
        """Return the rows of a table whose rows are the indexed places, in row-major order."""
        places = self.known()
        flat = places.reshape(-1) if places is not None else hg.flatten(self.flat(table.graph))
        return hg.take(table, flat, axis=0)

    def known(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The flat places, where they are known before a run."""
        if not all(isinstance(one, torch.Tensor) for one in self._places):
            return None
        total = np.zeros((), np.int64)
        for one, size in zip(self._places, self.indexed, strict=True):
            assert isinstance(one, torch.Tensor)
            places = one.long().numpy()
            total = total * size + np.where(places < 0, places + size, places)
        return np.broadcast_to(total, self.shape)

    def flat(self, graph: hg.Graph) -> hg.Value:
        """The flat places as a value."""
        total: hg.Value | None = None
        outside = -math.prod(self.indexed) if len(self.indexed) > 1 else None
        for one, size in zip(self._places, self.indexed, strict=True):
            value = graph.constant(one.long().numpy()) if isinstance(one, torch.Tensor) else one
            place = from_front(value, size, outside)
            total = place if total is None else total * size + place
        assert total is not None
        return hg.broadcast_to(total, self.shape)


def _is_host(one: Index) -> bool:
    return isinstance(one, torch.Tensor)


def _expanded(node: Node, given: Sequence[Index]) -> list[Index]:
    """Masks that are known before a run, as the places where they are true."""
    found: list[Index] = []
    for one in given:
        if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8):
            found += list(one.nonzero(as_tuple=True))
        else:
            found.append(one)
    return found


@rule("index_put", host=True)
def _index_put(
    node: Node, x: hg.Value, given: Sequence[Index], values: hg.Value, accumulate: bool, *_: Any
) -> hg.Value:
    x, values = node.lift(x), node.lift(values)
    if x.dtype.kind == "bool":
        x, values = cast(x, "i32"), cast(values, "i32")
    masks = [one for one in given if one is not None]
    if len(masks) == 1 and isinstance(masks[0], hg.Value) and masks[0].dtype.kind == "bool":
        return _masked_put(node, x, list(given), values, accumulate)
    indices = _Indices(node, x.shape, given)
    moved = hg.permute_dims(x, indices.order)
    rest = moved.shape[len(indices.axes) :]
    count, width = math.prod(indices.indexed), math.prod(rest)
    # The values have the shape of x[indices], and broadcast to it.
    shape = (*indices.shape, *rest)
    back = indices.back(len(shape))
    wide = hg.broadcast_to(values, [shape[place] for place in back])
    rows = hg.reshape(hg.permute_dims(wide, indices.forth(len(shape))), (math.prod(indices.shape), width))
    places = hg.flatten(indices.flat(x.graph))
    found = scatter_rows(hg.reshape(moved, (count, width)), rows, places, "add" if accumulate else "none")
    order = [indices.order.index(axis) for axis in range(x.ndim)]
    return hg.permute_dims(hg.reshape(found, moved.shape), order)


def _masked_put(node: Node, x: hg.Value, given: list[Index], values: hg.Value, accumulate: bool) -> hg.Value:
    """Replace the elements where a mask is true."""
    before = 0
    while given[before] is None:
        before += 1
    mask: hg.Value = given[before]
    rest = x.shape[before + mask.ndim :]
    if values.ndim > len(rest) and values.shape[0] != 1:
        if before:
            raise node.refuse("values at the places of a mask that a run computes", "use torch.where")
        # Each place takes the next one of the values.
        order = hg.cumulative_sum(cast(hg.flatten(mask), "i64"), axis=0) - 1
        places = hg.minimum(hg.maximum(order, 0), values.shape[0] - 1)
        chosen = hg.reshape(hg.take(values, places, axis=0), (*mask.shape, *values.shape[1:]))
    else:
        chosen = values if values.ndim <= len(rest) else hg.squeeze(values, axis=0)
    shape = (1,) * before + mask.shape + (1,) * len(rest)
    chosen = hg.broadcast_to(chosen, x.shape)
    return hg.where(hg.reshape(mask, shape), x + chosen if accumulate else chosen, x)


_REDUCTIONS: dict[str, Reduction] = {
    "sum": "add",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
    "add": "add",
    "multiply": "mul",
}


@rule("scatter.src")
def _scatter(node: Node, x: hg.Value, axis: int, places: hg.Value, source: hg.Value) -> hg.Value:
    return scattered(x, axis, places, source, "none")


@rule("scatter.value")
def _scatter_value(node: Node, x: hg.Value, axis: int, places: hg.Value, number: Number) -> hg.Value:
    return scattered(x, axis, places, node.full(places.shape, number, x.dtype), "none")


@rule("scatter.reduce")
def _scatter_reduced(
    node: Node, x: hg.Value, axis: int, places: hg.Value, source: hg.Value, reduce: str
) -> hg.Value:
    return scattered(x, axis, places, source, _REDUCTIONS[reduce])


@rule("scatter_add")
def _scatter_add(node: Node, x: hg.Value, axis: int, places: hg.Value, source: hg.Value) -> hg.Value:
    return scattered(x, axis, places, source, "add")


@rule("scatter_reduce.two")
def _scatter_reduce(
    node: Node,
    x: hg.Value,
    axis: int,
    places: hg.Value,
    source: hg.Value,
    reduce: str,
    include_self: bool,
) -> hg.Value:
    if x.dtype.kind == "bool":
        x, source = cast(x, "i32"), cast(source, "i32")
    is_mean = reduce == "mean"
    how: Reduction = "add" if is_mean else _REDUCTIONS[reduce]
    start = x
    if not include_self:
        # Elements that are replaced begin with the neutral element.
        hit = scattered(
            node.full(x.shape, False, "bool"), axis, places, node.full(places.shape, True, "bool")
        )
        start = hg.where(hit, node.full((), _neutral(how, x.dtype), x.dtype), x)
    found = scattered(start, axis, places, source, how)
    if not is_mean:
        return found
    base = node.full(x.shape, 1 if include_self else 0, "i64")
    counts = scattered(base, axis, places, node.full(places.shape, 1, "i64"), "add")
    counts = hg.maximum(counts, 1)
    if x.dtype.is_float:
        return found / cast(counts, x.dtype)
    return hg.floor_divide(found, cast(counts, x.dtype))


def _neutral(how: str, dtype: hg.DType) -> Number:
    if how in ("add", "mul"):
        return 0 if how == "add" else 1
    if dtype.is_float:
        return -math.inf if how == "max" else math.inf
    limits = hg.iinfo(dtype)
    return limits.min if how == "max" else limits.max


def scattered(
    x: hg.Value, axis: int, places: hg.Value, source: hg.Value, how: Reduction = "none"
) -> hg.Value:
    """Return x with elements of the source at the places along an axis, or combined with them."""
    if not places.size:
        return x
    if not x.ndim:
        x, places, source = (hg.reshape(one, (1,)) for one in (x, places, source))
        return hg.reshape(scattered(x, 0, places, source, how), ())
    if not places.ndim:
        places, source = hg.reshape(places, (1,)), hg.reshape(source, (1,))
    if x.dtype.kind == "bool":
        return cast(scattered(cast(x, "i32"), axis, places, cast(source, "i32"), how), "bool")
    if source.shape != places.shape:
        source = source[tuple(slice(0, size) for size in places.shape)]
    flat = element_places(places, x.shape, axis_of(axis, x.ndim))
    found = scatter_rows(
        hg.reshape(x, (x.size, 1)),
        hg.reshape(source, (source.size, 1)),
        hg.reshape(flat, (places.size,)),
        how,
    )
    return hg.reshape(found, x.shape)


@rule("put")
def _put(node: Node, x: hg.Value, places: hg.Value, source: hg.Value, accumulate: bool) -> hg.Value:
    flat = (hg.flatten(one) if one.ndim else hg.reshape(one, (1,)) for one in (x, places, source))
    line, at, rows = flat
    return hg.reshape(scattered(line, 0, at, rows, "add" if accumulate else "none"), x.shape)


@rule("index_reduce")
def _index_reduce(
    node: Node,
    given: hg.Value,
    axis: int,
    places: hg.Value,
    source: hg.Value,
    reduce: str,
    include_self: bool,
) -> hg.Value:
    x = given
    if not x.ndim:
        x, source = hg.reshape(x, (1,)), hg.reshape(source, (1,))
    place = axis_of(axis, x.ndim)
    shape = [size if one == place else 1 for one, size in enumerate(source.shape)]
    at = hg.broadcast_to(hg.reshape(places, shape), source.shape)
    found = _scatter_reduce(node, x, place, at, source, reduce, include_self)
    return hg.reshape(found, given.shape)


@rule("diagonal_scatter")
def _diagonal_scatter(
    node: Node, x: hg.Value, source: hg.Value, offset: int, first: int, second: int
) -> hg.Value:
    node.room(x.size)
    places = np.diagonal(np.arange(x.size).reshape(x.shape), offset, first, second).reshape(-1)
    line = scattered(hg.flatten(x), 0, node.graph.constant(places), hg.flatten(source))
    return hg.reshape(line, x.shape)


@rule("slice_scatter")
def _slice_scatter(
    node: Node,
    x: hg.Value,
    source: hg.Value,
    axis: int,
    start: int | None,
    stop: int | None,
    step: int = 1,
) -> hg.Value:
    place = axis_of(axis, x.ndim)
    first, last = range_of(x.shape[place], start, stop)
    count = len(range(first, last, int(step)))
    return _set(x, source, place, first, int(step)) if count else x


def _set(x: hg.Value, source: hg.Value, axis: int, start: int, step: int) -> hg.Value:
    """Return x with a block replaced that begins at a place along an axis."""
    if not source.size:
        return x
    begin = tuple(start if place == axis else 0 for place in range(x.ndim))
    steps = tuple(step if place == axis else 1 for place in range(x.ndim))
    return hg.ops.set(x, cast(source, x.dtype), start=begin, step=steps)


@rule("masked_scatter")
def _masked_scatter(node: Node, x: hg.Value, mask: hg.Value, source: hg.Value) -> hg.Value:
    """The elements where the mask is true become those of the source, in their order."""
    shape = np.broadcast_shapes(x.shape, mask.shape)
    x, mask = hg.broadcast_to(x, shape), hg.broadcast_to(cast(mask, "bool"), shape)
    if not x.size or not source.size:
        return x
    order = hg.cumulative_sum(cast(hg.flatten(mask), "i64"), axis=0) - 1
    places = hg.minimum(hg.maximum(order, 0), source.size - 1)
    taken = hg.reshape(hg.take(hg.flatten(source), places, axis=0), shape)
    return hg.where(mask, taken, x)


@rule("sort")
def _sort(node: Node, x: hg.Value, axis: int, descending: bool) -> list[hg.Value]:
    return _sorted(node, x, axis, descending)


@rule("sort.stable")
def _stable_sort(node: Node, x: hg.Value, stable: bool, axis: int, descending: bool) -> list[hg.Value]:
    return _sorted(node, x, axis, descending)


def _sorted(node: Node, x: hg.Value, axis: int, descending: bool) -> list[hg.Value]:
    if not x.ndim:
        return [x, node.full((), 0, "i64")]
    number = cast(x, "i32") if x.dtype.kind == "bool" else x
    places = hg.argsort(number, axis=axis, descending=descending)
    return [hg.take_along_axis(x, places, axis=axis), places]


@rule("topk")
def _top(node: Node, x: hg.Value, k: int, axis: int, largest: bool, is_sorted: bool) -> list[hg.Value]:
    if not x.ndim:
        return [x, node.full((), 0, "i64")]
    place = axis_of(axis, x.ndim)
    values, places = _sorted(node, x, place, largest)
    key = tuple(slice(0, int(k)) if one == place else slice(None) for one in range(x.ndim))
    return [values[key], places[key]]


@rule("searchsorted.Tensor")
def _searchsorted(
    node: Node,
    line: hg.Value,
    x: hg.Value,
    int32: bool,
    right: bool,
    side: str | None = None,
    sorter: hg.Value | None = None,
) -> hg.Value:
    where = "right" if right or side == "right" else "left"
    if line.ndim != 1:
        row, numbers = promoted(node, line if sorter is None else hg.take_along_axis(line, sorter), x)
        node.room(row.size // row.shape[-1] * numbers.shape[-1])
        beyond = hg.greater if where == "right" else hg.greater_equal
        is_before = hg.logical_not(beyond(hg.expand_dims(row, axis=-2), hg.expand_dims(numbers, axis=-1)))
        return hg.sum(cast(is_before, "i64"), axis=-1)
    return hg.searchsorted(*promoted(node, line, x), side=where, sorter=sorter)  # type: ignore[arg-type]


@rule("bucketize.Tensor")
def _bucketize(node: Node, x: hg.Value, line: hg.Value, int32: bool, right: bool) -> hg.Value:
    return _searchsorted(node, line, x, int32, right)


@rule("median.dim")
def _median(node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    """The middle element along an axis, the lower one of two."""
    if not x.ndim:
        return [x, node.full((), 0, "i64")]
    place = axis_of(axis, x.ndim)
    found = _ranked(node, x, place, (x.shape[place] - 1) // 2)
    if x.dtype.is_float:
        # NaN comes last in the order, and counts as the median.
        is_nan = hg.isnan(x)
        has_nan = hg.any(is_nan, axis=place, keepdims=True)
        found[0] = hg.where(has_nan, node.full((), math.nan, x.dtype), found[0])
        first = hg.argmax(cast(is_nan, "i32"), axis=place, keepdims=True)
        found[1] = hg.where(has_nan, first, found[1])
    return found if keep else [hg.squeeze(one, axis=place) for one in found]


@rule("median.default")
def _median_of_all(node: Node, x: hg.Value) -> hg.Value:
    return _median(node, hg.flatten(x), 0, False)[0] if x.ndim else x


@rule("nanmedian.dim")
def _median_of_numbers(node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    """The middle element of those that are numbers."""
    if not x.ndim or not x.dtype.is_float:
        return _median(node, x, axis, keep)
    place = axis_of(axis, x.ndim)
    count = hg.sum(cast(hg.logical_not(hg.isnan(x)), "i64"), axis=place, keepdims=True)
    middle = hg.floor_divide(hg.maximum(count - 1, 0), 2)
    found = [hg.take_along_axis(one, middle, axis=place) for one in _sorted(node, x, place, False)]
    return found if keep else [hg.squeeze(one, axis=place) for one in found]


@rule("nanmedian.default")
def _median_of_all_numbers(node: Node, x: hg.Value) -> hg.Value:
    return _median_of_numbers(node, hg.flatten(x), 0, False)[0] if x.ndim else x


@rule("kthvalue")
def _smallest_at(node: Node, x: hg.Value, k: int, axis: int, keep: bool) -> list[hg.Value]:
    if not x.ndim:
        return [x, node.full((), 0, "i64")]
    place = axis_of(axis, x.ndim)
    found = _ranked(node, x, place, int(k) - 1)
    return found if keep else [hg.squeeze(one, axis=place) for one in found]


def _ranked(node: Node, x: hg.Value, axis: int, rank: int) -> list[hg.Value]:
    """The element of a rank along an axis, and its place."""
    return [part(one, axis, rank, rank + 1) for one in _sorted(node, x, axis, False)]
