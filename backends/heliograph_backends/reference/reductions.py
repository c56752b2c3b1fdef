"""Formulas: reductions, sorts and searches along the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, constant


def sum_(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.sum(dtype=_accumulator(xp, x))


def sum_rows(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.sum(-1, keepdims=True, dtype=_accumulator(xp, x))


def mean(xp: Any, attributes: Attributes, x: Array) -> Array:
    total = sum_rows(xp, attributes, x)
    return total / constant(total, x.shape[-1])


def cumsum(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.cumsum(x, axis=-1, dtype=_accumulator(xp, x))


def cumprod(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.cumprod(x, axis=-1, dtype=_accumulator(xp, x))


def _accumulator(xp: Any, x: Array) -> Any:
    """f32 for f16; integers keep their width, as if NumPy's wider sum were cast back."""
    return xp.float32 if x.dtype == xp.float16 else x.dtype


def argsort(xp: Any, attributes: Attributes, x: Array) -> Array:
    if not attributes["descending"]:
        return xp.argsort(x, axis=-1, kind="stable")
    # Sorted from behind and read from behind: falling, and still the first of equals first.
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
