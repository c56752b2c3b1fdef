"""Functions of the bits of integers and floats: the array API's names and rules.

Operands and errors are those of `elementwise`.
"""

from __future__ import annotations

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.value import Value

__all__ = [
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "copysign",
    "nextafter",
    "signbit",
]


def bitwise_and(x1: Operand, x2: Operand, /) -> Value:
    """The bits that both have, of integers; whether both are true, of bool."""
    return lowering.bitwise("and", x1, x2)


def bitwise_or(x1: Operand, x2: Operand, /) -> Value:
    """The bits that one of them has, of integers; whether one is true, of bool."""
    return lowering.bitwise("or", x1, x2)


def bitwise_xor(x1: Operand, x2: Operand, /) -> Value:
    """The bits that exactly one of them has, of integers; whether exactly one is true, of bool."""
    return lowering.bitwise("xor", x1, x2)


def bitwise_invert(x: Operand, /) -> Value:
    """Invert each bit of integers; of bool, true where x is false."""
    return lowering.invert(lowering.one_value(x))


def bitwise_left_shift(x1: Operand, x2: Operand, /) -> Value:
    """The bits of x1 moved x2 places up, of integers; 0 where x2 is negative or all bits and
    more."""
    return lowering.elementwise("bitwise_left_shift", x1, x2)


def bitwise_right_shift(x1: Operand, x2: Operand, /) -> Value:
    """The bits of x1 moved x2 places down, the sign stays, of integers; the sign alone is left
    where x2 is negative or all bits and more."""
    return lowering.elementwise("bitwise_right_shift", x1, x2)


def signbit(x: Operand, /) -> Value:
    """True where the sign is negative, also that of -0 and NaN, of floats."""
    return lowering.unary("signbit", x)


def copysign(x1: Operand, x2: Operand, /) -> Value:
    """x1 with the sign of x2, of floats."""
    return lowering.elementwise("copysign", x1, x2)


def nextafter(x1: Operand, x2: Operand, /) -> Value:
    """The float after x1 on the way to x2; x2 where they are equal."""
    return lowering.elementwise("nextafter", x1, x2)
