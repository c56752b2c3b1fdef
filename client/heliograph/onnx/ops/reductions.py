"""Rules of reductions, sums in order, and normalized exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, is_integer, pad, part
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import Rule, rule

_Reduce = Callable[[hg.Value, tuple[int, ...], bool], hg.Value]


def _axes(node: Node, x: hg.Value) -> tuple[int, ...]:
    listed = node.integers(1) if node.has(1) else node.ints("axes")
    if listed:
        return tuple(sorted({node.axis(one, x.ndim) for one in listed}))
    return () if node.int("noop_with_empty_axes", 0) else tuple(range(x.ndim))


def _reduction(function: _Reduce) -> Rule:
    def reduce(node: Node) -> hg.Value:
        x = node.value(0)
        return function(x, _axes(node, x), bool(node.int("keepdims", 1)))

    return reduce


def total(x: hg.Value, axes: tuple[int, ...], keep: bool) -> hg.Value:
    """Return the sum in the type of x; over no axis it is x."""
    return cast(hg.sum(x, axis=axes, keepdims=keep), x.dtype) if axes else x


def _product(x: hg.Value, axes: tuple[int, ...], keep: bool) -> hg.Value:
    return cast(hg.prod(x, axis=axes, keepdims=keep), x.dtype) if axes else x


def _mean(x: hg.Value, axes: tuple[int, ...], keep: bool) -> hg.Value:
    if not axes:
        return x
    count = math.prod(x.shape[one] for one in axes)
    if not count:
        # The format leaves the mean of nothing open; it is 0 in onnxruntime.
        return total(x, axes, keep)
    if x.dtype.is_float:
        return hg.mean(x, axis=axes, keepdims=keep)
    return cast(hg.sum(cast(x, "f64"), axis=axes, keepdims=keep) / float(count), x.dtype)


def _extreme(function: Callable[..., hg.Value], x: hg.Value, axes: tuple[int, ...], keep: bool) -> hg.Value:
    if x.dtype.kind == "bool":
        return cast(_extreme(function, cast(x, "u8"), axes, keep), "bool")
    if not axes:
        return x
    if all(x.shape[one] for one in axes):
        return function(x, axis=axes, keepdims=keep)
    # Of nothing it is the neutral element.
    sizes = [1 if place in axes else one for place, one in enumerate(x.shape)]
    shape = sizes if keep else [one for place, one in enumerate(sizes) if place not in axes]
    is_max = function is hg.max
    if is_integer(x):
        limits = np.iinfo(x.dtype.numpy)
        return hg.full(shape, int(limits.min if is_max else limits.max), x.dtype, graph=x.graph)
    return hg.full(shape, -math.inf if is_max else math.inf, x.dtype, graph=x.graph)


def _log_sum_exp(x: hg.Value, axes: tuple[int, ...], keep: bool) -> hg.Value:
    if not axes or not all(x.shape[one] for one in axes):
        return hg.log(total(hg.exp(x), axes, keep))
    largest = hg.max(x, axis=axes, keepdims=True)
    shift = hg.where(hg.isfinite(largest), largest, 0.0)
    found = hg.log(total(hg.exp(x - shift), axes, True)) + shift
    return found if keep else hg.squeeze(found, axis=axes)


rule("ReduceSum")(_reduction(total))
rule("ReduceProd")(_reduction(_product))
rule("ReduceMean")(_reduction(_mean))
rule("ReduceMax")(_reduction(lambda x, axes, keep: _extreme(hg.max, x, axes, keep)))
rule("ReduceMin")(_reduction(lambda x, axes, keep: _extreme(hg.min, x, axes, keep)))
rule("ReduceL1")(_reduction(lambda x, axes, keep: total(hg.abs(x), axes, keep)))
rule("ReduceL2")(_reduction(lambda x, axes, keep: _root(total(x * x, axes, keep))))
rule("ReduceSumSquare")(_reduction(lambda x, axes, keep: total(x * x, axes, keep)))
rule("ReduceLogSum")(_reduction(lambda x, axes, keep: hg.log(total(x, axes, keep))))
rule("ReduceLogSumExp")(_reduction(_log_sum_exp))


def _root(x: hg.Value) -> hg.Value:
    return hg.sqrt(x) if x.dtype.is_float else cast(hg.sqrt(cast(x, "f64")), x.dtype)


@rule("ArgMax", "ArgMin")
def _extreme_place(node: Node) -> Item:
    x = node.value(0)
    axis, keep = node.axis(node.int("axis", 0), x.ndim), bool(node.int("keepdims", 1))
    function = hg.argmax if node.op == "ArgMax" else hg.argmin
    if not node.int("select_last_index", 0):
        return cast(function(x, axis=axis, keepdims=keep), "i64")
    found = function(hg.flip(x, axis=axis), axis=axis, keepdims=keep)
    return cast(x.shape[axis] - 1 - found, "i64")


def _by_axis(function: Callable[[hg.Value, int], hg.Value]) -> Rule:
    """An op along an axis; before opset 13, over all dimensions from the axis on."""

    def apply(node: Node) -> hg.Value:
        x = node.value(0)
        if node.opset >= 13:
            return function(x, node.axis(node.int("axis", -1), x.ndim))
        axis = node.axis(node.int("axis", 1), x.ndim)
        flat = hg.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
        return hg.reshape(function(flat, 1), x.shape)

    return apply


def _hardmax(x: hg.Value, axis: int) -> hg.Value:
    place = cast(hg.argmax(x, axis=axis, keepdims=True), "i64")
    numbers = np.arange(x.shape[axis], dtype=np.int64).reshape(along(axis, x.ndim))
    return cast(place == numbers, x.dtype)


rule("Softmax")(_by_axis(lambda x, axis: hg.softmax(x, axis=axis)))
rule("LogSoftmax")(_by_axis(lambda x, axis: hg.log_softmax(x, axis=axis)))
rule("Hardmax")(_by_axis(_hardmax))


@rule("CumSum", "CumProd")
def _cumulative(node: Node) -> Item:
    x = node.value(0)
    axis = node.axis(node.integer(1), x.ndim)
    backwards = bool(node.int("reverse", 0))
    is_sum = node.op == "CumSum"
    if backwards:
        x = hg.flip(x, axis=axis)
    if node.int("exclusive", 0) and x.shape[axis]:
        low = [0] * x.ndim
        low[axis] = 1
        x = pad(part(x, axis, 0, x.shape[axis] - 1), low, [0] * x.ndim, 0 if is_sum else 1)
    found = (hg.cumulative_sum if is_sum else hg.cumulative_prod)(x, axis=axis)
    found = cast(found, x.dtype)
    return hg.flip(found, axis=axis) if backwards else found
