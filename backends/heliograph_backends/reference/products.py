"""Formulas: ggml's matrix products, in row-major order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import Array, Attributes, Formula, accumulated, check_indices
from heliograph_backends.reference.stored import Widening

#: Elements of narrow weights that are widened at once, unless one row has more.
TILE_ELEMENTS = 2**20


def repeated_matmul(xp: Any, a: Array, b: Array) -> Array:
    """Return a @ b, where each matrix of a is used for several consecutive ones of b.

    [.., m, k] and [.., k, n] give [.., m, n] with b's leading dimensions, which are multiples of
    a's. Nothing is copied: each dimension of b is split into a's and the number of repetitions.
    """
    lead = b.shape[:-2]
    own = (1,) * (b.ndim - a.ndim) + a.shape[:-2]
    split = [part for have, size in zip(own, lead, strict=True) for part in (have, size // max(1, have))]
    single = [part for have in own for part in (have, 1)]
    product = xp.matmul(a.reshape(*single, *a.shape[-2:]), b.reshape(*split, *b.shape[-2:]))
    return product.reshape(*lead, a.shape[-2], b.shape[-1])


def mul_mat(xp: Any, attributes: Attributes, weights: Array, activations: Array) -> Array:
    """Matrix product; narrow weights are widened some rows at a time, whose number depends only on
    shapes."""
    (activations,) = accumulated(xp, activations)
    if weights.dtype == activations.dtype and not isinstance(weights, Widening):
        return _mul_mat(xp, weights, activations)
    result = xp.empty((*activations.shape[:-1], weights.shape[-2]), activations.dtype)
    step = max(1, TILE_ELEMENTS // max(1, math.prod(weights.shape[:-2]) * weights.shape[-1]))
    for start in range(0, weights.shape[-2], step):
        part = slice(start, start + step)
        (some,) = accumulated(xp, weights[..., part, :])
        result[..., part] = _mul_mat(xp, some, activations)
    return result


def _mul_mat(xp: Any, weights: Array, activations: Array) -> Array:
    # BLAS is fastest with the many rows of the activations on the left.
    if weights.ndim == 2:
        return xp.matmul(activations, weights.T)
    return repeated_matmul(xp, weights, activations.swapaxes(-1, -2)).swapaxes(-1, -2)


def mul_mat_id(xp: Any, attributes: Attributes, experts: Array, activations: Array, ids: Array) -> Array:
    """Compute one product for each used expert, with all the rows that use it."""
    check_indices("mul_mat_id", ids, experts.shape[0], "experts")
    (activations,) = accumulated(xp, activations)
    result = xp.empty((ids.size, experts.shape[1]), activations.dtype)
    order = xp.argsort(ids.ravel(), kind="stable")
    used, counts = xp.unique(ids, return_counts=True)
    start = 0
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        places = order[start : start + count]
        start += count
        token, slot = places // ids.shape[1], places % ids.shape[1]
        (matrix,) = accumulated(xp, experts[expert])
        result[places] = xp.matmul(activations[token, slot % activations.shape[1]], matrix.T)
    return result.reshape(*ids.shape, experts.shape[1])


def out_prod(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    a, b = accumulated(xp, a, b)
    return repeated_matmul(xp, a.swapaxes(-1, -2), b).swapaxes(-1, -2)


FORMULAS: Mapping[str, Formula] = {"mul_mat": mul_mat, "mul_mat_id": mul_mat_id, "out_prod": out_prod}
