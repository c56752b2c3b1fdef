"""Rows: what the array API has and ggml lacks of logarithms, inverse functions, functions of two floats, and
the bits of floats and integers.
"""

from __future__ import annotations

from heliograph_proto.ops.row import EXACT, Op, binary, question, unary
from heliograph_proto.ops.rules import FLOATS, INTEGERS

_COUNT = "; by less than 0 or all bits and more: by all of them."

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
    question("signbit", "Whether the sign is negative, that of -0 and NaN too."),
    binary("copysign", "a with the sign of b.", FLOATS, EXACT),
    binary("nextafter", "The float after a on the way to b; b where they are equal.", FLOATS, EXACT),
    # the bits of integers
    unary("bitwise_invert", "Each bit the other way round.", INTEGERS, EXACT),
    binary("bitwise_and", "The bits that both have.", INTEGERS, EXACT),
    binary("bitwise_or", "The bits that one of them has.", INTEGERS, EXACT),
    binary("bitwise_xor", "The bits that exactly one of them has.", INTEGERS, EXACT),
    binary("bitwise_left_shift", "The bits of a moved b places up" + _COUNT, INTEGERS, EXACT),
    binary(
        "bitwise_right_shift", "The bits of a moved b places down, the sign stays" + _COUNT, INTEGERS, EXACT
    ),
)
