"""Rules of reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast, part
from heliograph.torch.node import Node, Number, axes_of, axis_of, in_f32
from heliograph.torch.rules import rule

Axes = int | Sequence[int] | None


@rule("sum")
def _sum(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.sum(wide, axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else wide


@rule("sum.default")
def _sum_of_all(node: Node, x: hg.Value, dtype: Any = None) -> hg.Value:
    return _sum(node, x)


@rule("mean")
def _mean(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.mean(wide, axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else wide


@rule("mean.default")
def _mean_of_all(node: Node, x: hg.Value, dtype: Any = None) -> hg.Value:
    return _mean(node, x)


@rule("prod.default")
def _product_of_all(node: Node, x: hg.Value, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.prod(wide, axis=axes_of(None, x.ndim)) if x.ndim else wide


@rule("prod.dim_int")
def _product(node: Node, x: hg.Value, axis: int, keep: bool, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.prod(wide, axis=axis_of(axis, x.ndim), keepdims=keep) if x.ndim else wide


def _as_number(x: hg.Value) -> hg.Value:
    return cast(x, "i32") if x.dtype.kind == "bool" else x


@rule("amax")
def _largest(node: Node, x: hg.Value, axes: Axes, keep: bool) -> hg.Value:
    return hg.max(_as_number(x), axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else x


@rule("amin")
def _smallest(node: Node, x: hg.Value, axes: Axes, keep: bool) -> hg.Value:
    return hg.min(_as_number(x), axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else x


@rule("any")
def _any(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False) -> hg.Value:
    # An empty list of axes is none here, unlike elsewhere.
    if not x.ndim or (axes is not None and not isinstance(axes, int) and not len(axes)):
        return cast(x, "bool")
    return hg.any(x, axis=axes_of(axes, x.ndim), keepdims=keep)


@rule("argmax")
def _place_of_largest(node: Node, x: hg.Value, axis: int | None, keep: bool) -> hg.Value:
    return _place(hg.argmax, node, x, axis, keep)


@rule("argmin")
def _place_of_smallest(node: Node, x: hg.Value, axis: int | None, keep: bool) -> hg.Value:
    return _place(hg.argmin, node, x, axis, keep)


def _place(function: Any, node: Node, x: hg.Value, axis: int | None, keep: bool) -> hg.Value:
    if not x.ndim:
        return node.full((), 0, "i64")
    found: hg.Value = function(_as_number(x), axis=axis, keepdims=keep)
    return found


@rule("max.dim")
def _largest_and_place(node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    return _with_place(hg.max, hg.argmax, node, x, axis, keep)


@rule("min.dim")
def _smallest_and_place(node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    return _with_place(hg.min, hg.argmin, node, x, axis, keep)


def _with_place(function: Any, place: Any, node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    if not x.ndim:
        return [x, node.full((), 0, "i64")]
    number = _as_number(x)
    return [function(number, axis=axis, keepdims=keep), place(number, axis=axis, keepdims=keep)]


@rule("max.default")
def _largest_of_all(node: Node, x: hg.Value) -> hg.Value:
    return hg.max(_as_number(x)) if x.ndim else x


@rule("min.default")
def _smallest_of_all(node: Node, x: hg.Value) -> hg.Value:
    return hg.min(_as_number(x)) if x.ndim else x


@rule("var.correction")
def _variance(node: Node, x: hg.Value, axes: Axes, correction: Number | None, keep: bool) -> hg.Value:
    by = 1.0 if correction is None else float(correction)
    return hg.var(in_f32(x), axis=axes_of(axes, x.ndim), correction=by, keepdims=keep)


@rule("var.dim")
def _variance_by_axes(node: Node, x: hg.Value, axes: Axes, unbiased: bool, keep: bool) -> hg.Value:
    return _variance(node, x, axes, 1 if unbiased else 0, keep)


@rule("var_mean.correction")
def _variance_and_mean(
    node: Node, x: hg.Value, axes: Axes, correction: Number | None, keep: bool
) -> list[hg.Value]:
    return [
        _variance(node, x, axes, correction, keep),
        hg.mean(in_f32(x), axis=axes_of(axes, x.ndim), keepdims=keep),
    ]


@rule("cumsum")
def _running_sum(node: Node, x: hg.Value, axis: int, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.cumulative_sum(wide, axis=axis_of(axis, x.ndim)) if x.ndim else wide


@rule("cumprod")
def _running_product(node: Node, x: hg.Value, axis: int, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    return hg.cumulative_prod(wide, axis=axis_of(axis, x.ndim)) if x.ndim else wide


@rule("cummax")
def _running_largest(node: Node, x: hg.Value, axis: int) -> list[hg.Value]:
    return _running(node, x, axis, hg.greater_equal)


@rule("cummin")
def _running_smallest(node: Node, x: hg.Value, axis: int) -> list[hg.Value]:
    return _running(node, x, axis, hg.less_equal)


def _running(node: Node, given: hg.Value, axis: int, is_next: Any) -> list[hg.Value]:
    """The extreme of the elements so far, the last of equal ones, with its place; NaN stays."""
    if not given.ndim:
        return [given, node.full((), 0, "i64")]
    x, place = _as_number(given), axis_of(axis, given.ndim)
    shape = [size if one == place else 1 for one, size in enumerate(x.shape)]
    numbers = hg.reshape(hg.arange(x.shape[place], dtype="i64", graph=node.graph), shape)

    def later(first: Sequence[hg.Value], second: Sequence[hg.Value]) -> list[hg.Value]:
        takes = is_next(second[0], first[0])
        if x.dtype.is_float:
            takes = hg.isnan(second[0]) | (takes & ~hg.isnan(first[0]))
        return [hg.where(takes, after, before) for before, after in zip(first, second, strict=True)]

    return _scanned([x, hg.broadcast_to(numbers, x.shape)], place, later)


@rule("logcumsumexp")
def _running_log_sum(node: Node, x: hg.Value, axis: int) -> hg.Value:
    def both(first: Sequence[hg.Value], second: Sequence[hg.Value]) -> list[hg.Value]:
        return [hg.logaddexp(first[0], second[0])]

    return _scanned([in_f32(x)], axis_of(axis, x.ndim), both)[0] if x.ndim else x


def _scanned(parts: list[hg.Value], axis: int, combine: Any) -> list[hg.Value]:
    """Combine each element along an axis with all before it, in as many steps as its size has
    bits."""
    size, step = parts[0].shape[axis], 1
    while step < size:
        made = combine(
            [part(one, axis, 0, size - step) for one in parts], [part(one, axis, step, size) for one in parts]
        )
        starts = [part(one, axis, 0, step) for one in parts]
        parts = [hg.concat(pair, axis=axis) for pair in zip(starts, made, strict=True)]
        step *= 2
    return parts


@rule("linalg_vector_norm")
def _norm(node: Node, x: hg.Value, p: Number, axes: Axes, keep: bool, dtype: Any = None) -> hg.Value:
    wide = in_f32(cast(x, node.dtype()))
    if not x.ndim:
        return norm(hg.reshape(wide, (1,)), float(p), (0,))
    return norm(wide, float(p), axes_of(axes, x.ndim), keep)


def norm(x: hg.Value, p: float, axis: Axes, keep: bool = False) -> hg.Value:
    """Return the p-norm along axes."""
    size = hg.abs(x)
    if p == 0:
        return hg.sum(hg.where(size != 0, 1.0, size * 0.0), axis=axis, keepdims=keep)
    if p in (math.inf, -math.inf):
        return (hg.max if p > 0 else hg.min)(size, axis=axis, keepdims=keep)
    if p == 1:
        return hg.sum(size, axis=axis, keepdims=keep)
    if p == 2:
        return hg.sqrt(hg.sum(hg.square(x), axis=axis, keepdims=keep))
    return hg.pow(hg.sum(hg.pow(size, p), axis=axis, keepdims=keep), 1 / p)
