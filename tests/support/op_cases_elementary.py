"""Cases of logarithms, inverse functions, functions of two floats, and the bits of floats and integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, INTEGERS, PAIRS, SHAPES, Case, Cases, Refusal, data, t, wide

from heliograph_proto.types import DTYPES

#: What an op gives, and how its ordinary operands are made of any.
OF_ONE: dict[str, tuple[Callable[..., Array], Callable[[Array], Array]]] = {
    "log2": (np.log2, lambda x: np.abs(x) + 0.0625),
    "log10": (np.log10, lambda x: np.abs(x) + 0.0625),
    "acos": (np.arccos, lambda x: x / 4),
    "acosh": (np.arccosh, lambda x: np.abs(x) + 1),
    "asin": (np.arcsin, lambda x: x / 4),
    "asinh": (np.arcsinh, lambda x: x),
    "atan": (np.arctan, lambda x: x),
    "atanh": (np.arctanh, lambda x: x / 4),
}
OF_BITS: dict[str, Callable[[Array, Array], Array]] = {
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
}


def of_one_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    formula, ordinary = OF_ONE[op]
    for name, shape in itertools.product(FLOATS, SHAPES):
        x = np.asarray(ordinary(data(random, name, shape)), DTYPES[name].numpy)
        yield Case(op, [x], formula(wide(x)))


def signbit_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(FLOATS, SHAPES):
        x = data(random, name, shape)
        yield Case(op, [x], np.asarray(x < 0))


def nextafter_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (left, right) in itertools.product(FLOATS, PAIRS):
        a, b = data(random, name, left), data(random, name, right)
        yield Case(op, [a, b], wide(np.nextafter(a, b)))


def bitwise_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (left, right) in itertools.product(INTEGERS, PAIRS):
        a, b = integers(random, name, left), integers(random, name, right)
        yield Case(op, [a, b], np.asarray(OF_BITS[op](wide(a), wide(b))))


def bitwise_invert_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(INTEGERS, SHAPES):
        x = integers(random, name, shape)
        yield Case(op, [x], np.asarray(-1 - wide(x)))


def shift_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (left, right) in itertools.product(INTEGERS, PAIRS):
        bits = DTYPES[name].itemsize * 8
        a = integers(random, name, left)
        b = random.integers(-2 if name[0] == "i" else 0, bits + 3, right).astype(a.dtype)
        yield Case(op, [a, b], np.asarray(SHIFTS[op](wide(a), wide(b), bits)))


def shifted_up(a: Array, b: Array, bits: int) -> Array:
    """By counts that are none, everything is shifted out."""
    return np.frompyfunc(lambda x, by: x << by if 0 <= by < bits else 0, 2, 1)(a, b)


def shifted_down(a: Array, b: Array, bits: int) -> Array:
    """Likewise, but for the sign."""
    return np.frompyfunc(lambda x, by: x >> (by if 0 <= by < bits else bits), 2, 1)(a, b)


SHIFTS = {"bitwise_left_shift": shifted_up, "bitwise_right_shift": shifted_down}


def integers(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Of the whole range."""
    bounds = np.iinfo(DTYPES[name].numpy)
    return np.asarray(random.integers(bounds.min, bounds.max, shape, bounds.dtype, endpoint=True))


CASES: dict[str, Cases] = {
    **dict.fromkeys(OF_ONE, of_one_cases),
    **dict.fromkeys(OF_BITS, bitwise_cases),
    **dict.fromkeys(SHIFTS, shift_cases),
    "bitwise_invert": bitwise_invert_cases,
    "signbit": signbit_cases,
    "nextafter": nextafter_cases,
}

F = "f32"
REFUSED: list[Refusal] = [
    ("the bits of floats", "bitwise_and", [t(F), t(F)], {}, "takes int or uint elements"),
    ("the bits of booleans", "bitwise_invert", [t("bool")], {}, "takes int or uint elements"),
    ("a shift by another type", "bitwise_left_shift", [t("i64"), t("i32")], {}, "different data types"),
    ("the sign of integers", "signbit", [t("i32")], {}, "takes float elements"),
    ("the float after an integer", "nextafter", [t("i32"), t("i32")], {}, "takes float elements"),
    ("the angle of integers", "atan2", [t("i32"), t("i32")], {}, "takes float elements"),
]
