"""Rules of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast, part
from heliograph.torch.node import Node, Number, axes_of, axis_of, in_f32
from heliograph.torch.rules import rule

Axes = int | Sequence[int] | None


def _added_up(function: Any) -> Callable[..., hg.Value]:
    """A reduction that computes in the data type of its result."""

    def reduce(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False, dtype: Any = None) -> hg.Value:
        wide = in_f32(cast(x, node.dtype()))
        found: hg.Value = function(wide, axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else wide
        return found

    return reduce


def _running_total(function: Any) -> Callable[..., hg.Value]:
    def run(node: Node, x: hg.Value, axis: int, dtype: Any = None) -> hg.Value:
        wide = in_f32(cast(x, node.dtype()))
        found: hg.Value = function(wide, axis=axis_of(axis, x.ndim)) if x.ndim else wide
        return found

    return run


def _extreme(function: Any) -> Callable[..., hg.Value]:
    def reduce(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False) -> hg.Value:
        found: hg.Value = function(_as_number(x), axis=axes_of(axes, x.ndim), keepdims=keep) if x.ndim else x
        return found

    return reduce


def _place(function: Any) -> Callable[..., hg.Value]:
    def reduce(node: Node, x: hg.Value, axis: int | None, keep: bool) -> hg.Value:
        if not x.ndim:
            return node.full((), 0, "i64")
        found: hg.Value = function(_as_number(x), axis=axis, keepdims=keep)
        return found

    return reduce


def _as_number(x: hg.Value) -> hg.Value:
    return cast(x, "i32") if x.dtype.kind == "bool" else x


def _of_all(reduce: Any, node: Node, x: hg.Value, dtype: Any = None) -> hg.Value:
    found: hg.Value = reduce(node, x)
    return found


def _with_place(value: Any, place: Any, node: Node, x: hg.Value, axis: int, keep: bool) -> list[hg.Value]:
    return [value(node, x, axis, keep), place(node, x, axis, keep)]


@rule("any")
def _any(node: Node, x: hg.Value, axes: Axes = None, keep: bool = False) -> hg.Value:
    # An empty list of axes is none here, unlike elsewhere.
    if not x.ndim or (axes is not None and not isinstance(axes, int) and not len(axes)):
        return cast(x, "bool")
    return hg.any(x, axis=axes_of(axes, x.ndim), keepdims=keep)


@rule("var.correction")
def _variance(node: Node, x: hg.Value, axes: Axes, correction: Number | None, keep: bool) -> hg.Value:
    by = 1.0 if correction is None else float(correction)
    return hg.var(in_f32(x), axis=axes_of(axes, x.ndim), correction=by, keepdims=keep)


@rule("var_mean.correction")
def _variance_and_mean(
    node: Node, x: hg.Value, axes: Axes, correction: Number | None, keep: bool
) -> list[hg.Value]:
    return [
        _variance(node, x, axes, correction, keep),
        hg.mean(in_f32(x), axis=axes_of(axes, x.ndim), keepdims=keep),
    ]


def _running(is_next: Any, node: Node, given: hg.Value, axis: int) -> list[hg.Value]:
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


for _op, _function in {"sum": hg.sum, "mean": hg.mean, "prod": hg.prod}.items():
    rule(_op)(_added_up(_function))
for _op, _function in {"mean": hg.mean, "prod": hg.prod}.items():
    rule(f"{_op}.default")(partial(_of_all, _added_up(_function)))
for _op, _total in {"cumsum": hg.cumulative_sum, "cumprod": hg.cumulative_prod}.items():
    rule(_op)(_running_total(_total))
for _op, _value, _at, _order in (
    ("max", hg.max, hg.argmax, hg.greater_equal),
    ("min", hg.min, hg.argmin, hg.less_equal),
):
    rule(f"a{_op}", f"{_op}.default")(_extreme(_value))
    rule(f"arg{_op}")(_place(_at))
    rule(f"{_op}.dim")(partial(_with_place, _extreme(_value), _place(_at)))
    rule(f"cum{_op}")(partial(_running, _order))
