"""Formulas: powers of integers, shifts of bits, and the floats beside floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.definition.base import Array, Attributes, Formula, Writer, constant

#: Bits of infinity, by the data type: what is above them, without the sign, is NaN.
_INFINITY = {"float64": 0x7FF0000000000000, "float32": 0x7F800000, "float16": 0x7C00}
_INFINITY_BF16 = 0x7F80


def power(xp: Any, attributes: Attributes, out: Array, a: Array, b: Array) -> None:
    if a.dtype.kind == "f":
        xp.power(a, b, out)
    else:
        out[...] = _integer_power(xp, a, b) if a.dtype.kind == "i" else xp.power(a, b)


def _integer_power(xp: Any, a: Array, b: Array) -> Array:
    """NumPy refuses exponents below 0, of which CuPy makes what it likes."""
    zero, one = constant(a, 0), constant(a, 1)
    of_minus_one = xp.where(b & one == zero, one, -one)
    inverse = xp.where(a == one, one, xp.where(a == -one, of_minus_one, zero))
    return xp.where(b < zero, inverse, xp.power(a, xp.maximum(b, zero)))


def left_shift(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """C leaves open what shifts by other counts give, and CuPy with it."""
    inside = _is_within(a, b)
    return xp.where(inside, a << xp.where(inside, b, constant(b, 0)), constant(a, 0))


def right_shift(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    inside = _is_within(a, b)
    # By all bits in two steps: only the sign is left of integers that have one, nothing of others.
    beyond = (a >> constant(a, _bits(a) - 1)) >> constant(a, 1)
    return xp.where(inside, a >> xp.where(inside, b, constant(b, 0)), beyond)


def _bits(x: Array) -> int:
    return int(x.dtype.itemsize) * 8


def _is_within(a: Array, b: Array) -> Array:
    return (b >= constant(b, 0)) & (b < constant(b, _bits(a)))


def nextafter(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """By the bits, since CuPy's own takes denormals for zeros."""
    bits = xp.dtype(f"int{_bits(a)}")
    found = bits_after(xp, a.view(bits), b.view(bits), _INFINITY[a.dtype.name])
    return found.view(a.dtype)


def bf16_after(xp: Any, a: Array, b: Array) -> Array:
    """As nextafter, of bf16 as bits in uint16."""
    return bits_after(xp, a.view(xp.int16), b.view(xp.int16), _INFINITY_BF16).view(xp.uint16)


def bits_after(xp: Any, a: Array, b: Array, infinity: int) -> Array:
    """The bits, as signed integers, of the float after a on the way to b; those of b where they are equal.

    Without the sign, floats are in the order of their bits: so they have a rank, which is negative below 0.
    """
    least, zero, one = constant(a, -(2 ** (_bits(a) - 1))), constant(a, 0), constant(a, 1)
    rank_a, rank_b = (xp.where(x < zero, least - x, x) for x in (a, b))
    rank = rank_a + xp.where(rank_b > rank_a, one, zero) - xp.where(rank_b < rank_a, one, zero)
    # Above -1 is 0 with the sign of where it came from.
    negative = (rank < zero) | ((rank == zero) & (a < zero))
    stepped = xp.where(negative, least - rank, rank)
    found = xp.where(rank_a == rank_b, b, stepped)
    largest = constant(a, 2 ** (_bits(a) - 1) - 1)
    for x in (a, b):
        found = xp.where((x & largest) > constant(a, infinity), x, found)
    return found


#: Ops of which floats are one ufunc.
WRITERS: Mapping[str, Writer] = {"pow": power}
#: Ops that are more than one ufunc.
FORMULAS: Mapping[str, Formula] = {
    "bitwise_left_shift": left_shift,
    "bitwise_right_shift": right_shift,
    "nextafter": nextafter,
}
