"""Formulas: reductions, sorts and searches along the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, accumulator, constant


def sum_(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.sum(dtype=accumulator(xp, x))


def sum_rows(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.sum(-1, keepdims=True, dtype=accumulator(xp, x))


def mean(xp: Any, attributes: Attributes, x: Array) -> Array:
    total = sum_rows(xp, attributes, x)
    return total / constant(total, x.shape[-1])


def cumsum(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.cumsum(x, axis=-1, dtype=accumulator(xp, x))


def cumprod(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.cumprod(x, axis=-1, dtype=accumulator(xp, x))


def argsort(xp: Any, attributes: Attributes, x: Array) -> Array:
    if not attributes["descending"]:
        return xp.argsort(x, axis=-1, kind="stable")
    # A stable sort of the reversed row, read backwards, is descending and keeps equal elements in
    # order.
    backwards = xp.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return x.shape[-1] - 1 - backwards


def top_k(xp: Any, attributes: Attributes, x: Array) -> Array:
    return argsort(xp, {"descending": True}, x)[..., : attributes["k"]]


def searchsorted(xp: Any, attributes: Attributes, vector: Array, x: Array) -> Array:
    return xp.searchsorted(vector, x, side="right" if attributes["right"] else "left")


FORMULAS: Mapping[str, Formula] = {
    "sum": sum_,
    "sum_rows": sum_rows,
    "mean": mean,
    "cumsum": cumsum,
    "cumprod": cumprod,
    "count_equal": lambda xp, attributes, a, b: xp.count_nonzero(a == b),
    "argsort": argsort,
    "top_k": top_k,
    "searchsorted": searchsorted,
}
