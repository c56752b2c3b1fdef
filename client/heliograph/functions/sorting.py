"""Functions that sort, search, pick along an axis and add up in order: the array API's names and
rules."""

from __future__ import annotations

from typing import Literal

import numpy as np

from heliograph.functions.manipulation import broadcast_to, take
from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.types import I64, DTypeArgument

__all__ = ["argsort", "cumulative_prod", "cumulative_sum", "searchsorted", "sort", "take_along_axis"]


def argsort(x: Operand, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Value:
    """The places (i64) of the elements in their order along an axis; equal ones keep theirs,
    `stable` or not."""
    value, order = _axis_last(lowering.one_value(x), axis)
    found = lowering.apply("argsort", value, descending=bool(descending))
    return lowering.permute(lowering.cast(found, I64), _back(order))


def sort(x: Operand, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Value:
    """The elements in their order along an axis."""
    value, order = _axis_last(lowering.one_value(x), axis)
    places = lowering.apply("argsort", value, descending=bool(descending))
    return lowering.permute(_of_rows(value, places), _back(order))


def searchsorted(
    x1: Operand,
    x2: Operand,
    /,
    *,
    side: Literal["left", "right"] = "left",
    sorter: Operand | None = None,
) -> Value:
    """For each element of x2 the place (i64) in x1, a vector in rising order, before which it
    belongs: before its equals or, on the right, behind them. NaN is above all numbers. `sorter`:
    the argsort of an x1 that is in no order."""
    if side not in ("left", "right"):
        raise invalid(f"searchsorted: side is {side!r:.40}", "it is 'left' or 'right'")
    vector, values = lowering.promoted(x1, x2)
    if sorter is not None:
        vector = take(vector, sorter, axis=0)
    return lowering.apply("searchsorted", vector, values, right=side == "right")


def take_along_axis(x: Operand, indices: Operand, /, *, axis: int = -1) -> Value:
    """Of each row along an axis the elements at its own indices (integers, below 0 from the end);
    the other dimensions broadcast."""
    graph = lowering.graph_of(x, indices)
    value, order = _axis_last(lowering.lift(graph, x), axis)
    places, other = _axis_last(lowering.lift(graph, indices), axis)
    if not places.dtype.is_integer or order != other:
        raise invalid(f"take_along_axis of {value.type} at {places.type}: integers, in as many dimensions")
    rows, size = _broadcast(value, places), value.shape[-1]
    value, places = (broadcast_to(one, (*rows, one.shape[-1])) for one in (value, places))
    places = lowering.cast(places, I64)
    # An error names a place outside of the row as it was given.
    places = lowering.apply("where", (places < 0) & (places >= -size), places + size, places)
    return lowering.permute(_of_rows(value, places), _back(order))


def _broadcast(value: Value, places: Value) -> tuple[int, ...]:
    """The shape that the dimensions before the last broadcast to."""
    try:
        return np.broadcast_shapes(value.shape[:-1], places.shape[:-1])
    except ValueError:
        raise invalid(f"rows of {value.type} and of {places.type} do not broadcast") from None


def _of_rows(x: Value, places: Value) -> Value:
    """The elements of each row at its own places."""
    columns = lowering.reshape(x, (*x.shape, 1))
    found = lowering.apply("get_rows", columns, lowering.cast(places, I64))
    return lowering.reshape(lowering.cast(found, x.dtype), places.shape)


def cumulative_sum(
    x: Operand,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeArgument | None = None,
    include_initial: bool = False,
) -> Value:
    """The sums of the elements up to each one along an axis, in `dtype`; unless given, small
    integers and bool add up in 64 bits. The axis may be left out when x has one dimension. The
    initial sum is 0."""
    return _cumulative("cumsum", 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: Operand,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeArgument | None = None,
    include_initial: bool = False,
) -> Value:
    """As cumulative_sum, the products; the initial one is 1."""
    return _cumulative("cumprod", 1, x, axis, dtype, include_initial)


def _cumulative(
    op: str, initial: int, x: Operand, axis: int | None, dtype: DTypeArgument | None, include_initial: bool
) -> Value:
    given = lowering.one_value(x)
    if axis is None and given.ndim != 1:
        raise invalid(f"{op} of {given.type} needs an axis")
    value, order = _axis_last(lowering.accumulator(given, dtype), -1 if axis is None else axis)
    found = lowering.apply(op, value)
    if include_initial:
        first = value.graph.full((*value.shape[:-1], 1), initial, value.dtype)
        found = lowering.apply("concat", first, found, axis=-1)
    return lowering.permute(found, _back(order))


def _axis_last(x: Value, axis: int) -> tuple[Value, list[int]]:
    """x with an axis behind all others, and the old place of each dimension."""
    place = lowering.axis_of(x, axis)
    order = [*(other for other in range(x.ndim) if other != place), place]
    return lowering.permute(x, order), order


def _back(order: list[int]) -> list[int]:
    """The axes that undo `_axis_last`."""
    return [order.index(axis) for axis in range(len(order))]
