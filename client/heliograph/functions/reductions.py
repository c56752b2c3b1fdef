"""Functions that reduce along axes: the array API's names and rules.

`axis` is an int, several, or None for all; `keepdims` keeps reduced dimensions with size 1. All
raise InvalidGraphError at the user's line for axes that do not exist.
"""

from __future__ import annotations

from heliograph.functions.manipulation import concat
from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Axis, Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.types import BOOL, I64, DTypeArgument

__all__ = [
    "all",
    "any",
    "argmax",
    "argmin",
    "count_nonzero",
    "diff",
    "max",
    "mean",
    "min",
    "prod",
    "std",
    "sum",
    "var",
]


def sum(
    x: Operand, /, *, axis: Axis = None, dtype: DTypeArgument | None = None, keepdims: bool = False
) -> Value:
    """The sum, in `dtype`; unless given, small integers and bool add up in 64 bits."""
    return lowering.reduce("reduce_sum", lowering.accumulator(lowering.one_value(x), dtype), axis, keepdims)


def prod(
    x: Operand, /, *, axis: Axis = None, dtype: DTypeArgument | None = None, keepdims: bool = False
) -> Value:
    """The product, in `dtype`; unless given, small integers and bool multiply in 64 bits."""
    return lowering.reduce("reduce_prod", lowering.accumulator(lowering.one_value(x), dtype), axis, keepdims)


def mean(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """The mean, of floats; NaN of nothing."""
    return lowering.mean(lowering.one_value(x), axis, keepdims)


def max(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """The largest element, NaN if there is one; of at least one element."""
    return lowering.reduce("reduce_max", lowering.one_value(x), axis, keepdims)


def min(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """The smallest element, NaN if there is one; of at least one element."""
    return lowering.reduce("reduce_min", lowering.one_value(x), axis, keepdims)


def var(x: Operand, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Value:
    """The variance: squared distances from the mean, summed, divided by (count - correction); NaN
    unless that is above 0."""
    value = lowering.one_value(x)
    distance = value - lowering.mean(value, axis, True)
    count = lowering.count_of(value, axis)
    if count - correction <= 0:
        return lowering.nan(value, axis, keepdims)
    squares = lowering.apply("sqr", distance)
    if not correction:
        return lowering.mean(squares, axis, keepdims)
    return lowering.reduce("reduce_sum", squares, axis, keepdims) / float(count - correction)


def std(x: Operand, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Value:
    """The standard deviation: the root of the variance."""
    return lowering.apply("sqrt", var(x, axis=axis, correction=correction, keepdims=keepdims))


def all(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """True if every element is true, or not 0."""
    return _count_of(lowering.apply("logical_not", _truth(x)), axis, keepdims) == 0


def any(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """True if any element is true, or not 0."""
    return _count_of(_truth(x), axis, keepdims) != 0


def count_nonzero(x: Operand, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
    """The number of elements that are true, or not 0; i64."""
    return _count_of(_truth(x), axis, keepdims)


def diff(
    x: Operand,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Operand | None = None,
    append: Operand | None = None,
) -> Value:
    """The difference of neighbours along an axis, n times; `prepend` and `append` extend x
    first."""
    value = lowering.one_value(x)
    parts = [part for part in (prepend, value, append) if part is not None]
    place = lowering.axis_of(value, axis)
    if len(parts) > 1:
        value = concat(parts, axis=place)
    if n < 0:
        raise invalid(f"diff of {value.type} {n} times")
    whole = (slice(None),) * place
    for _ in range(n):
        if not value.shape[place]:
            break  # of nothing it is nothing, however often
        value = value[(*whole, slice(1, None))] - value[(*whole, slice(None, -1))]
    return value


def _truth(x: Operand) -> Value:
    return lowering.cast(lowering.one_value(x), BOOL)


def _count_of(truth: Value, axis: Axis, keepdims: bool) -> Value:
    return lowering.reduce("reduce_sum", lowering.cast(truth, I64), axis, keepdims)


def argmax(x: Operand, /, *, axis: int | None = None, keepdims: bool = False) -> Value:
    """The place (i64) of the first largest element; in row-major order when axis is None."""
    return _index(lowering.one_value(x), axis, keepdims)


def argmin(x: Operand, /, *, axis: int | None = None, keepdims: bool = False) -> Value:
    """The place (i64) of the first smallest element; in row-major order when axis is None."""
    value = lowering.one_value(x)
    opposite = lowering.apply("neg", value)
    # For integers -x - 1 turns the order round without overflow, also for unsigned ones.
    return _index(opposite - 1 if value.dtype.is_integer else opposite, axis, keepdims)


def _index(x: Value, axis: int | None, keepdims: bool) -> Value:
    rank = x.ndim
    if axis is None:
        flat, place = lowering.reshape(x, (x.size,)), 0
    else:
        place = lowering.axis_of(x, axis)
        flat = lowering.permute(x, [*(other for other in range(rank) if other != place), place])
    found = lowering.cast(lowering.apply("argmax", flat), I64)
    if not keepdims:
        return found
    kept = (1,) * rank if axis is None else (*x.shape[:place], 1, *x.shape[place + 1 :])
    return lowering.reshape(found, kept)
