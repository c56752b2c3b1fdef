"""Formulas: ggml's matrix products, in row-major order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy

from heliograph_backends.reference.base import Array, Attributes, Formula, accumulated, check_indices
from heliograph_backends.reference.stored import Widening

#: Elements of narrow weights that are widened at once, unless one row has more.
TILE_ELEMENTS = 2**20
#: Columns that BLAS computes at once.
COLUMNS = 32

Order: TypeAlias = Literal["C", "F"]


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


def product(xp: Any, a: Array, b: Array, out: Array | None = None, order: Order = "C") -> Array:
    """Return a @ b, written to `out` if given. With NumPy, the bits of a column do not depend on
    how many there are: a part of a divided weight gives those of the whole.

    BLAS adds in an order that depends on the sizes, so it gets COLUMNS columns each time; those of
    a single row are added alike if there is no remainder. `order`: the memory order of b.
    """
    columns = b.shape[-1]
    if xp is not numpy or b.ndim != 2 or not columns or b.dtype.kind != "f":
        return xp.matmul(a, b) if out is None else xp.matmul(a, b, out=out)
    if out is None:
        out = numpy.empty((*a.shape[:-1], columns), numpy.result_type(a, b))
    rest = columns % COLUMNS
    step = COLUMNS if a.shape[-2] > 1 else max(COLUMNS, columns - rest)
    for start in range(0, columns - rest, step):
        part = slice(start, start + step)
        numpy.matmul(a, b[:, part], out=out[..., part])
    if rest:
        filled = numpy.zeros((b.shape[0], COLUMNS), b.dtype, order)
        filled[:, :rest] = b[:, columns - rest :]
        out[..., columns - rest :] = numpy.matmul(a, filled)[..., :rest]
    return out


def mul_mat(xp: Any, attributes: Attributes, weights: Array, activations: Array) -> Array:
    """Matrix product; narrow weights are widened some rows at a time, whose number depends only on
    shapes."""
    (activations,) = accumulated(xp, activations)
    if weights.dtype == activations.dtype and not isinstance(weights, Widening):
        return _mul_mat(xp, weights, activations)
    result = xp.empty((*activations.shape[:-1], weights.shape[-2]), activations.dtype)
    step = TILE_ELEMENTS // max(1, math.prod(weights.shape[:-2]) * weights.shape[-1])
    step = max(COLUMNS, step - step % COLUMNS)
    for start in range(0, weights.shape[-2], step):
        part = slice(start, start + step)
        (some,) = accumulated(xp, weights[..., part, :])
        result[..., part] = _mul_mat(xp, some, activations)
    return result


def _mul_mat(xp: Any, weights: Array, activations: Array) -> Array:
    # BLAS is fastest with the many rows of the activations on the left.
    if weights.ndim == 2:
        return product(xp, activations, weights.T, order="F")
    if xp is not numpy:
        return repeated_matmul(xp, weights, activations.swapaxes(-1, -2)).swapaxes(-1, -2)
    result = numpy.empty((*activations.shape[:-1], weights.shape[-2]), activations.dtype)
    own = (1,) * (activations.ndim - weights.ndim) + weights.shape[:-2]
    repeats = [there // max(1, here) for here, there in zip(own, activations.shape[:-2], strict=True)]
    matrices = weights.reshape(*own, *weights.shape[-2:])
    for place in numpy.ndindex(activations.shape[:-2]):
        matrix = matrices[tuple(one // repeat for one, repeat in zip(place, repeats, strict=True))]
        product(xp, activations[place], matrix.T, result[place], "F")
    return result


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
        result[places] = product(xp, activations[token, slot % activations.shape[1]], matrix.T, order="F")
    return result.reshape(*ids.shape, experts.shape[1])


def out_prod(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    a, b = accumulated(xp, a, b)
    return repeated_matmul(xp, a.swapaxes(-1, -2), b).swapaxes(-1, -2)


FORMULAS: Mapping[str, Formula] = {"mul_mat": mul_mat, "mul_mat_id": mul_mat_id, "out_prod": out_prod}
