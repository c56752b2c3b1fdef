"""Formulas: powers of integers, bit shifts, adjacent floats, and the error function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, Writer, constant

#: Bits of infinity, by the data type: larger ones, without the sign, are NaN.
_INFINITY = {"float64": 0x7FF0000000000000, "float32": 0x7F800000, "float16": 0x7C00}
_INFINITY_BF16 = 0x7F80


def power(xp: Any, attributes: Attributes, out: Array, a: Array, b: Array) -> None:
    if a.dtype.kind == "f":
        xp.power(a, b, out)
    else:
        out[...] = _integer_power(xp, a, b) if a.dtype.kind == "i" else xp.power(a, b)


def _integer_power(xp: Any, a: Array, b: Array) -> Array:
    """Integer power with exponents below 0, which NumPy rejects and CuPy leaves undefined."""
    zero, one = constant(a, 0), constant(a, 1)
    of_minus_one = xp.where(b & one == zero, one, -one)
    inverse = xp.where(a == one, one, xp.where(a == -one, of_minus_one, zero))
    return xp.where(b < zero, inverse, xp.power(a, xp.maximum(b, zero)))


def left_shift(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """Left shift; 0 for counts outside of the bits, which are undefined in C and CuPy."""
    inside = _is_within(a, b)
    return xp.where(inside, a << xp.where(inside, b, constant(b, 0)), constant(a, 0))


def right_shift(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    inside = _is_within(a, b)
    # A shift by all bits in two steps leaves only the sign of signed integers and 0 of unsigned
    # ones.
    beyond = (a >> constant(a, _bits(a) - 1)) >> constant(a, 1)
    return xp.where(inside, a >> xp.where(inside, b, constant(b, 0)), beyond)


def _bits(x: Array) -> int:
    return int(x.dtype.itemsize) * 8


def _is_within(a: Array, b: Array) -> Array:
    return (b >= constant(b, 0)) & (b < constant(b, _bits(a)))


def nextafter(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """Adjacent floats by their bits, since CuPy's nextafter treats denormals as zeros."""
    bits = xp.dtype(f"int{_bits(a)}")
    found = bits_after(xp, a.view(bits), b.view(bits), _INFINITY[a.dtype.name])
    return found.view(a.dtype)


def bf16_after(xp: Any, a: Array, b: Array) -> Array:
    """Return nextafter of bf16 given as bits in uint16."""
    return bits_after(xp, a.view(xp.int16), b.view(xp.int16), _INFINITY_BF16).view(xp.uint16)


def bits_after(xp: Any, a: Array, b: Array, infinity: int) -> Array:
    """Return the bits, as signed integers, of the float next to a towards b; those of b if equal.

    Without the sign, floats are in the order of their bits. So each has a rank, negative below 0.
    """
    least, zero, one = constant(a, -(2 ** (_bits(a) - 1))), constant(a, 0), constant(a, 1)
    rank_a, rank_b = (xp.where(x < zero, least - x, x) for x in (a, b))
    rank = rank_a + xp.where(rank_b > rank_a, one, zero) - xp.where(rank_b < rank_a, one, zero)
    # A step from rank -1 or 1 to 0 keeps the sign of a.
    negative = (rank < zero) | ((rank == zero) & (a < zero))
    stepped = xp.where(negative, least - rank, rank)
    found = xp.where(rank_a == rank_b, b, stepped)
    largest = constant(a, 2 ** (_bits(a) - 1) - 1)
    for x in (a, b):
        found = xp.where((x & largest) > constant(a, infinity), x, found)
    return found


#: Ops that are a single ufunc for floats.
WRITERS: Mapping[str, Writer] = {"pow": power}
#: Ops that are more than one ufunc.
FORMULAS: Mapping[str, Formula] = {
    "bitwise_left_shift": left_shift,
    "bitwise_right_shift": right_shift,
    "nextafter": nextafter,
}


# Rational approximations of erf with errors below 2**-57, from Sun's fdlibm (s_erf.c, 1993):
# near 0, x + x P(x^2)/Q(x^2); near 1, 0.845... + P(|x|-1)/Q(|x|-1);
# beyond 1.25, 1 - exp(-x^2 - 0.5625 + R(1/x^2)/S(1/x^2)) / |x|, in two ranges.
_SMALL = (
    (1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
     -5.77027029648944159157e-03, -2.37630166566501626084e-05),
    (1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
     1.32494738004321644526e-04, -3.96022827877536812320e-06),
)  # fmt: skip
_MIDDLE = (
    (-2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
     3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
     -2.16637559486879084300e-03),
    (1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
     1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02),
)  # fmt: skip
_LARGE = (
    (-9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e01,
     -6.23753324503260060396e01, -1.62396669462573470355e02, -1.84605092906711035994e02,
     -8.12874355063065934246e01, -9.81432934416914548592e00),
    (1.0, 1.96512716674392571292e01, 1.37657754143519042600e02, 4.34565877475229228821e02,
     6.45387271733267880336e02, 4.29008140027567833386e02, 1.08635005541779435134e02,
     6.57024977031928170135e00, -6.04244152148580987438e-02),
)  # fmt: skip
_HUGE = (
    (-9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e01,
     -1.60636384855821916062e02, -6.37566443368389627722e02, -1.02509513161107724954e03,
     -4.83519191608651397019e02),
    (1.0, 3.03380607434824582924e01, 3.25792512996573918826e02, 1.53672958608443695994e03,
     3.19985821950859553908e03, 2.55305040643316442583e03, 4.74528541206955367215e02,
     -2.24409524465858183362e01),
)  # fmt: skip
_OFFSET = 8.45062911510467529297e-01


def _ratio(tables: tuple[tuple[float, ...], tuple[float, ...]], x: Any) -> Any:
    values = []
    for coefficients in tables:
        value = x * 0.0
        for coefficient in reversed(coefficients):
            value = value * x + coefficient
        values.append(value)
    return values[0] / values[1]


def erf(xp: Any, x: Any) -> Any:
    """Return the error function of x, computed in float64, in the data type of x."""
    wide = xp.asarray(x, dtype=xp.float64)
    size = xp.minimum(xp.abs(wide), 6.0)
    small = size + size * _ratio(_SMALL, size * size)
    middle = _OFFSET + _ratio(_MIDDLE, size - 1.0)
    safe = xp.maximum(size, 1.0)
    inverse = 1.0 / (safe * safe)
    exponent = xp.where(safe < 1.0 / 0.35, _ratio(_LARGE, inverse), _ratio(_HUGE, inverse))
    large = 1.0 - xp.exp(-safe * safe - 0.5625 + exponent) / safe
    positive = xp.where(size < 0.84375, small, xp.where(size < 1.25, middle, large))
    return xp.copysign(positive, wide).astype(x.dtype)
