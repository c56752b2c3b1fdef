"""Functions of each element by itself: the array API's names and rules.

Operands are values of a graph, Python scalars (weak) and NumPy arrays (constants); at least one is
a value. Shapes broadcast. All raise InvalidGraphError at the user's line for data types that do not
fit.
"""

from __future__ import annotations

import math

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.promotion import default_dtype, is_scalar, promote_all, weak_scalar
from heliograph.graph.value import Value

__all__ = [
    "abs",
    "add",
    "ceil",
    "clip",
    "conj",
    "divide",
    "equal",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "square",
    "subtract",
    "trunc",
    "where",
]


def add(x1: Operand, x2: Operand, /) -> Value:
    """x1 + x2."""
    return lowering.elementwise("add", x1, x2)


def subtract(x1: Operand, x2: Operand, /) -> Value:
    """x1 - x2."""
    return lowering.elementwise("sub", x1, x2)


def multiply(x1: Operand, x2: Operand, /) -> Value:
    """x1 * x2."""
    return lowering.elementwise("mul", x1, x2)


def divide(x1: Operand, x2: Operand, /) -> Value:
    """x1 / x2, of floats."""
    return lowering.elementwise("div", x1, x2)


def floor_divide(x1: Operand, x2: Operand, /) -> Value:
    """floor(x1 / x2); by an integer 0: 0."""
    return lowering.elementwise("floor_divide", x1, x2)


def remainder(x1: Operand, x2: Operand, /) -> Value:
    """x1 - floor(x1 / x2) * x2, with the sign of x2; by an integer 0: 0."""
    return lowering.elementwise("remainder", x1, x2)


def pow(x1: Operand, x2: Operand, /) -> Value:
    """x1 to the power of x2; of integers, where x2 is below 0, towards 0, and 0 if x1 is 0."""
    return lowering.power(x1, x2)


def maximum(x1: Operand, x2: Operand, /) -> Value:
    """The larger one; NaN if either is."""
    return lowering.elementwise("maximum", x1, x2)


def minimum(x1: Operand, x2: Operand, /) -> Value:
    """The smaller one; NaN if either is."""
    return lowering.elementwise("minimum", x1, x2)


def equal(x1: Operand, x2: Operand, /) -> Value:
    """x1 == x2, bool."""
    return lowering.elementwise("equal", x1, x2)


def not_equal(x1: Operand, x2: Operand, /) -> Value:
    """x1 != x2, bool."""
    return lowering.elementwise("not_equal", x1, x2)


def less(x1: Operand, x2: Operand, /) -> Value:
    """x1 < x2, bool."""
    return lowering.elementwise("less", x1, x2)


def less_equal(x1: Operand, x2: Operand, /) -> Value:
    """x1 <= x2, bool."""
    return lowering.elementwise("less_equal", x1, x2)


def greater(x1: Operand, x2: Operand, /) -> Value:
    """x1 > x2, bool."""
    return lowering.elementwise("greater", x1, x2)


def greater_equal(x1: Operand, x2: Operand, /) -> Value:
    """x1 >= x2, bool."""
    return lowering.elementwise("greater_equal", x1, x2)


def logical_and(x1: Operand, x2: Operand, /) -> Value:
    """True where both are true, of bool."""
    return lowering.elementwise("logical_and", x1, x2)


def logical_or(x1: Operand, x2: Operand, /) -> Value:
    """True where at least one is true, of bool."""
    return lowering.elementwise("logical_or", x1, x2)


def logical_xor(x1: Operand, x2: Operand, /) -> Value:
    """True where exactly one is true, of bool."""
    return lowering.elementwise("logical_xor", x1, x2)


def logical_not(x: Operand, /) -> Value:
    """True where x is false, of bool."""
    return lowering.unary("logical_not", x)


def negative(x: Operand, /) -> Value:
    """-x."""
    return lowering.unary("neg", x)


def positive(x: Operand, /) -> Value:
    """x itself."""
    return lowering.one_value(x)


def conj(x: Operand, /) -> Value:
    """x itself: no data type is complex."""
    return lowering.one_value(x)


def real(x: Operand, /) -> Value:
    """x itself: no data type is complex."""
    return lowering.one_value(x)


def abs(x: Operand, /) -> Value:
    """The absolute value."""
    return lowering.unary("abs", x)


def sign(x: Operand, /) -> Value:
    """-1, 0 or 1 by the sign of x; NaN stays."""
    return lowering.unary("sgn", x)


def square(x: Operand, /) -> Value:
    """x * x."""
    return lowering.unary("sqr", x)


def reciprocal(x: Operand, /) -> Value:
    """1 / x."""
    return lowering.elementwise("div", 1, x)


def _whole(op: str, x: Operand) -> Value:
    """A rounding: integers stay."""
    value = lowering.one_value(x)
    return value if value.dtype.is_integer else lowering.apply(op, value)


def floor(x: Operand, /) -> Value:
    """The largest whole number not above x."""
    return _whole("floor", x)


def ceil(x: Operand, /) -> Value:
    """The smallest whole number not below x."""
    return _whole("ceil", x)


def round(x: Operand, /) -> Value:
    """The nearest whole number; halves to even."""
    return _whole("round", x)


def trunc(x: Operand, /) -> Value:
    """The whole part of x."""
    return _whole("trunc", x)


def _classify(op: str, x: Operand, of_integers: str) -> Value:
    """A test of floats; integers give the constant result of x == x or x != x."""
    value = lowering.one_value(x)
    if value.dtype.is_integer:
        return lowering.apply(of_integers, value, value)
    return lowering.apply(op, value)


def isnan(x: Operand, /) -> Value:
    """True where x is NaN."""
    return _classify("isnan", x, "not_equal")


def isinf(x: Operand, /) -> Value:
    """True where x is infinite."""
    return _classify("isinf", x, "not_equal")


def isfinite(x: Operand, /) -> Value:
    """True where x is neither infinite nor NaN."""
    return _classify("isfinite", x, "equal")


def clip(x: Operand, /, min: Operand | None = None, max: Operand | None = None) -> Value:
    """x, but not below `min` nor above `max`; NaN stays. The data type is x's."""
    value = lowering.one_value(x)
    if value.dtype.is_float and _scalar_or_none(min) and _scalar_or_none(max):
        least = -math.inf if min is None else weak_scalar(min, value.dtype)  # type: ignore[arg-type]
        most = math.inf if max is None else weak_scalar(max, value.dtype)  # type: ignore[arg-type]
        return lowering.apply("clamp", value, min=float(least), max=float(most))
    for op, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            value = lowering.elementwise(op, value, bound)
    return value


def _scalar_or_none(bound: object) -> bool:
    return bound is None or is_scalar(bound)


def where(condition: Operand, x1: Operand, x2: Operand, /) -> Value:
    """x1 where the condition (bool) is true, else x2; two Python scalars give f32, i64 or bool."""
    graph = lowering.graph_of(condition, x1, x2)
    if is_scalar(x1) and is_scalar(x2):
        common = promote_all(default_dtype(one) for one in (x1, x2))  # type: ignore[arg-type]
        chosen = [lowering.lift(graph, one, common) for one in (x1, x2)]
    else:
        strong = [one for one in (x1, x2) if not is_scalar(one)]
        common = promote_all(lowering.lift(graph, one).dtype for one in strong)
        lifted = [lowering.lift(graph, one, common) for one in (x1, x2)]
        chosen = [lowering.cast(one, common) for one in lifted]
    return lowering.apply("where", lowering.lift(graph, condition), *chosen)
