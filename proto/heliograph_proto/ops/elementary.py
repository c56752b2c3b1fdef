"""Rows of the array API's functions that ggml lacks: logarithms, inverse functions, functions of
two floats, and bits of floats and integers."""

from __future__ import annotations

from heliograph_proto.ops.row import EXACT, Op, binary, question, unary
from heliograph_proto.ops.rules import FLOATS, INTEGERS

_COUNT = "; a count below 0, or of all bits or more, shifts by all bits."

ROWS: tuple[Op, ...] = (
    # of one float
    unary("log2", "The logarithm to the base 2; -inf at 0, NaN below."),
    unary("log10", "The logarithm to the base 10; -inf at 0, NaN below."),
    unary("acos", "The angle, from 0 to pi, whose cosine is x; NaN beyond -1 and 1."),
    unary("acosh", "The number, from 0 on, whose hyperbolic cosine is x; NaN below 1."),
    unary("asin", "The angle, from -pi/2 to pi/2, whose sine is x; NaN beyond -1 and 1."),
    unary("asinh", "The number whose hyperbolic sine is x."),
    unary("atan", "The angle, from -pi/2 to pi/2, whose tangent is x."),
    unary("atanh", "The number whose hyperbolic tangent is x; infinite at -1 and 1, NaN beyond."),
    # of two floats
    binary("atan2", "The angle, from -pi to pi, of the point at the ordinate a and the abscissa b.", FLOATS),
    binary("hypot", "sqrt(a * a + b * b), without overflow.", FLOATS),
    binary("logaddexp", "log(exp(a) + exp(b)), without overflow.", FLOATS),
    # the bits of floats
    question("signbit", "True where the sign bit is set, also for -0 and NaN."),
    binary("copysign", "a with the sign of b.", FLOATS, EXACT),
    binary("nextafter", "The next float after a towards b; b if they are equal.", FLOATS, EXACT),
    # the bits of integers
    unary("bitwise_invert", "Each bit inverted.", INTEGERS, EXACT),
    binary("bitwise_and", "The bits set in both.", INTEGERS, EXACT),
    binary("bitwise_or", "The bits set in at least one.", INTEGERS, EXACT),
    binary("bitwise_xor", "The bits set in exactly one.", INTEGERS, EXACT),
    binary("bitwise_left_shift", "The bits of a shifted up by b" + _COUNT, INTEGERS, EXACT),
    binary(
        "bitwise_right_shift", "The bits of a shifted down by b, keeping the sign" + _COUNT, INTEGERS, EXACT
    ),
)
