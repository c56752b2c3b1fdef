"""Elementary functions of each element: the array API's names and rules, of floats.

Operands and errors are those of `elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.value import Value
from heliograph_proto.types import F32, F64

__all__ = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cos",
    "cosh",
    "erf",
    "exp",
    "expm1",
    "hypot",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]

#: exp is finite up to here, and beyond it e**-x is nothing beside e**x.
_EXP_END_F64, _EXP_END_F32 = 709.0, 88.0


def _rounded_once(function: Callable[[Value], Value], x: Operand) -> Value:
    """Apply several ops to x; f16 and bf16 in f32, so that only the result is rounded."""
    value = lowering.one_value(x)
    if not value.dtype.is_float or value.dtype.itemsize >= F32.itemsize:
        return function(value)
    return lowering.cast(function(lowering.cast(value, F32)), value.dtype)


def _hyperbolic(twice: Callable[[Value], Value], x: Operand) -> Value:
    """Half of the function's value; where that would overflow too soon, the rest of e**x is a
    factor."""

    def formula(value: Value) -> Value:
        end = _EXP_END_F64 if value.dtype is F64 else _EXP_END_F32
        near = lowering.apply("clamp", value, min=-end, max=end)
        return twice(near) * 0.5 * exp(lowering.apply("abs", value - near))

    return _rounded_once(formula, x)


def sqrt(x: Operand, /) -> Value:
    """The square root; NaN below 0."""
    return lowering.unary("sqrt", x)


def rsqrt(x: Operand, /) -> Value:
    """1 / sqrt(x)."""
    return lowering.unary("rsqrt", x)


def exp(x: Operand, /) -> Value:
    """e to the x."""
    return lowering.unary("exp", x)


def expm1(x: Operand, /) -> Value:
    """exp(x) - 1, accurate near 0."""
    return lowering.unary("expm1", x)


def log(x: Operand, /) -> Value:
    """The natural logarithm; -inf at 0, NaN below."""
    return lowering.unary("log", x)


def log2(x: Operand, /) -> Value:
    """The logarithm to the base 2; exact of powers of two."""
    return lowering.unary("log2", x)


def log10(x: Operand, /) -> Value:
    """The logarithm to the base 10."""
    return lowering.unary("log10", x)


def log1p(x: Operand, /) -> Value:
    """log(1 + x), accurate near 0."""
    return lowering.unary("log1p", x)


def sin(x: Operand, /) -> Value:
    """The sine of x in radians."""
    return lowering.unary("sin", x)


def cos(x: Operand, /) -> Value:
    """The cosine of x in radians."""
    return lowering.unary("cos", x)


def tan(x: Operand, /) -> Value:
    """The tangent of x in radians."""
    return _rounded_once(lambda wide: sin(wide) / cos(wide), x)


def sinh(x: Operand, /) -> Value:
    """The hyperbolic sine."""
    return _hyperbolic(lambda near: expm1(near) - expm1(-near), x)


def cosh(x: Operand, /) -> Value:
    """The hyperbolic cosine."""
    return _hyperbolic(lambda near: exp(near) + exp(-near), x)


def tanh(x: Operand, /) -> Value:
    """The hyperbolic tangent."""
    return lowering.unary("tanh", x)


def erf(x: Operand, /) -> Value:
    """The error function."""
    return lowering.unary("erf", x)


def acos(x: Operand, /) -> Value:
    """The angle, from 0 to pi, whose cosine is x; NaN beyond -1 and 1."""
    return lowering.unary("acos", x)


def acosh(x: Operand, /) -> Value:
    """The number, from 0 on, whose hyperbolic cosine is x; NaN below 1."""
    return lowering.unary("acosh", x)


def asin(x: Operand, /) -> Value:
    """The angle, from -pi/2 to pi/2, whose sine is x; NaN beyond -1 and 1."""
    return lowering.unary("asin", x)


def asinh(x: Operand, /) -> Value:
    """The number whose hyperbolic sine is x."""
    return lowering.unary("asinh", x)


def atan(x: Operand, /) -> Value:
    """The angle, from -pi/2 to pi/2, whose tangent is x."""
    return lowering.unary("atan", x)


def atanh(x: Operand, /) -> Value:
    """The number whose hyperbolic tangent is x; infinite at -1 and 1, NaN beyond."""
    return lowering.unary("atanh", x)


def atan2(x1: Operand, x2: Operand, /) -> Value:
    """The angle, from -pi to pi, of the point with the ordinate x1 and the abscissa x2."""
    return lowering.elementwise("atan2", x1, x2)


def hypot(x1: Operand, x2: Operand, /) -> Value:
    """sqrt(x1 * x1 + x2 * x2), without overflow."""
    return lowering.elementwise("hypot", x1, x2)


def logaddexp(x1: Operand, x2: Operand, /) -> Value:
    """log(exp(x1) + exp(x2)), without overflow."""
    return lowering.elementwise("logaddexp", x1, x2)
