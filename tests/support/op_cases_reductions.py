"""Cases of reductions, sorts and searches along the last dimension."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, NUMBERS, PLAIN, ROWS, SHAPES, Case, Cases, Refusal, data, t, wide

from heliograph_proto.types import DTYPES

WITH_ROWS = (*ROWS, (0,), (3, 0, 2), (300,))


def count_equal_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(PLAIN, SHAPES):
        a, b = data(random, name, shape), data(random, name, shape)
        b = np.where(random.random(shape) < 0.5, a, b).astype(a.dtype)
        count = sum(x == y for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
        yield Case(op, [a, b], np.array(count, object))


def sum_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(NUMBERS, (*SHAPES, (300,))):
        x = data(random, name, shape)
        yield Case(op, [x], np.asarray(wide(x).sum()))


def row_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(NUMBERS if op != "mean" else FLOATS, WITH_ROWS):
        x = data(random, name, shape)
        if op == "cumsum":
            yield Case(op, [x], np.cumsum(wide(x), axis=-1))
        elif op == "cumprod":
            x = (1 + x / 64).astype(x.dtype) if name in FLOATS else x
            yield Case(op, [x], np.cumprod(wide(x), axis=-1))
        elif op == "sum_rows":
            yield Case(op, [x], np.asarray(wide(x).sum(-1, keepdims=True)))
        elif shape[-1]:
            yield Case(op, [x], wide(x).sum(-1, keepdims=True) / shape[-1])


def sort_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape, falling in itertools.product(NUMBERS, WITH_ROWS, (False, True)):
        x = (data(random, name, shape) // 2).astype(data(random, name, ()).dtype)
        if op == "top_k" and not (falling and shape[-1]):
            continue
        sign = -1 if falling else 1
        rows = []
        for row in x.reshape(x.size // max(1, shape[-1]), shape[-1]).tolist():
            rows.append([place for _, place in sorted((sign * one, i) for i, one in enumerate(row))])
        places = np.array(rows, object).reshape(shape)
        if op == "argsort":
            yield Case(op, [x], places, {"descending": falling})
            continue
        for k in {1, max(1, shape[-1] // 2), shape[-1]}:
            yield Case(op, [x], places[..., :k], {"k": k})


def searchsorted_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    """Few different numbers, so that many are equal; NaN behind all of them."""
    for name, count, shape, right in itertools.product(NUMBERS, (0, 1, 2, 33), SHAPES, (False, True)):
        vector = np.sort((data(random, name, (count,)) // 2).astype(DTYPES[name].numpy))
        x = np.asarray((data(random, name, shape) // 2).astype(vector.dtype))
        if name in FLOATS and count > 2:
            vector[-2:] = np.nan
            x = np.where(random.random(shape) < 0.2, vector.dtype.type(np.nan), x)
        yield Case(op, [vector, x], places_in(vector, x, right=right), {"right": right})


def places_in(vector: Array, x: Array, *, right: bool) -> Array:
    """By counting."""

    def is_before(one: Array, other: Array) -> Array:
        later = np.isnan(other) & ~np.isnan(one) if other.dtype.kind == "f" else False
        return np.asarray((one < other) | later)

    one, other = vector, x[..., None]
    before = ~is_before(other, one) if right else is_before(one, other)
    return np.asarray(before.sum(-1).astype(object))


CASES: dict[str, Cases] = {
    "count_equal": count_equal_cases,
    "sum": sum_cases,
    **dict.fromkeys(("sum_rows", "mean", "cumsum", "cumprod"), row_cases),
    **dict.fromkeys(("argsort", "top_k"), sort_cases),
    "searchsorted": searchsorted_cases,
}

F = "f32"
REFUSED: list[Refusal] = [
    ("counts of two shapes", "count_equal", [t(F, 2), t(F, 1)], {}, "must be equal"),
    ("counts of two types", "count_equal", [t(F, 2), t("f64", 2)], {}, "different data types"),
    ("the sum of booleans", "sum", [t("bool", 2)], {}, "takes float or int"),
    ("the row of a scalar", "sum_rows", [t(F)], {}, "at least 1"),
    ("the mean of empty rows", "mean", [t(F, 2, 0)], {}, "empty rows"),
    ("the mean of integers", "mean", [t("i32", 2)], {}, "takes float"),
    ("the sums of a scalar", "cumsum", [t(F)], {}, "at least 1"),
    ("the products of booleans", "cumprod", [t("bool", 2)], {}, "takes float or int"),
    ("a search in a matrix", "searchsorted", [t(F, 2, 2), t(F)], {}, "must have one dimension"),
    ("a search for another type", "searchsorted", [t(F, 2), t("f64")], {}, "different data types"),
    ("a search in booleans", "searchsorted", [t("bool", 2), t("bool")], {}, "takes float or int"),
    ("the order of a scalar", "argsort", [t(F)], {}, "at least 1"),
    ("an order past i32", "argsort", [t("i8", 2**31)], {}, "do not fit in i32"),
    ("the largest none", "top_k", [t(F, 4)], {"k": 0}, "k is 0"),
    ("more than there are", "top_k", [t(F, 4)], {"k": 5}, "k is 5"),
]
