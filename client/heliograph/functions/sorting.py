"""Functions that sort, pick along an axis and add up in order: the array API's names and rules."""

from __future__ import annotations

import math

import numpy as np

from heliograph import _lowering as lowering
from heliograph._lowering import Operand
from heliograph._source import invalid
from heliograph.functions.manipulation import flatten, take
from heliograph.value import Value
from heliograph_proto.types import I64


def argsort(x: Operand, /, *, axis: int = -1, descending: bool = False) -> Value:
    """The places (i64) of the elements in their order along an axis; equal ones keep theirs."""
    value, order = _axis_last(lowering.one_value(x), axis)
    found = lowering.apply("argsort", value, descending=descending)
    return lowering.permute(lowering.cast(found, I64), _back(order))


def sort(x: Operand, /, *, axis: int = -1, descending: bool = False) -> Value:
    """The elements in their order along an axis."""
    value = lowering.one_value(x)
    return take_along_axis(value, argsort(value, axis=axis, descending=descending), axis=axis)


def take_along_axis(x: Operand, indices: Operand, /, *, axis: int = -1) -> Value:
    """Of each row along an axis the elements at its own indices (integers, from 0 on); the other dimensions
    are those of x."""
    graph = lowering.graph_of(x, indices)
    value, order = _axis_last(lowering.lift(graph, x), axis)
    places, _ = _axis_last(lowering.lift(graph, indices), axis)
    if places.shape[:-1] != value.shape[:-1] or not places.dtype.is_integer:
        raise invalid(f"take_along_axis of {value.type} at {places.type}: integers for each row")
    rows, size = math.prod(value.shape[:-1]), value.shape[-1]
    starts = (np.arange(rows, dtype=np.int64) * size).reshape((*value.shape[:-1], 1))
    found = take(flatten(value), flatten(lowering.cast(places, I64) + starts), axis=0)
    return lowering.permute(lowering.reshape(found, places.shape), _back(order))


def cumulative_sum(x: Operand, /, *, axis: int | None = None) -> Value:
    """The sums of the elements up to each one along an axis; small integers and bool add up in 64 bits. The
    axis may be left out when x has one dimension."""
    given = lowering.one_value(x)
    if axis is None and given.ndim != 1:
        raise invalid(f"cumulative_sum of {given.type} needs an axis")
    value, order = _axis_last(lowering.accumulator(given), -1 if axis is None else axis)
    return lowering.permute(lowering.apply("cumsum", value), _back(order))


def _axis_last(x: Value, axis: int) -> tuple[Value, list[int]]:
    """x with an axis behind all others, and where each of its dimensions was."""
    place = lowering.axis_of(x, axis)
    order = [*(other for other in range(x.ndim) if other != place), place]
    return lowering.permute(x, order), order


def _back(order: list[int]) -> list[int]:
    """The axes that undo `_axis_last`."""
    return [order.index(axis) for axis in range(len(order))]
