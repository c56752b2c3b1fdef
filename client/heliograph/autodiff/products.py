"""Rules of matrix products and triangular systems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph.autodiff.step import Rule, Step, composed, each
from heliograph.graph.lowering import apply, matmul, reshape, reverse
from heliograph.graph.value import Value


def _left(step: Step, g: Value) -> Value:
    return apply("matmul", g, step[1].mT)


def _right(step: Step, g: Value) -> Value:
    left, right = step.operands
    if right.ndim == 2 and left.ndim > 2:
        # All matrices on the left meet the same one: their rows are one long matrix.
        rows = math.prod(left.shape[:-1])
        return apply("matmul", reshape(left, (rows, left.shape[-1])).mT, reshape(g, (rows, g.shape[-1])))
    return apply("matmul", left.mT, g)


def interleaved(x: Value, leading: Sequence[int]) -> Value:
    """Repeat each matrix of x for consecutive ones of the leading sizes, as in mul_mat."""
    if x.ndim == 2 or x.shape[:-2] == tuple(leading):
        return x
    have = (1,) * (len(leading) - x.ndim + 2) + x.shape[:-2]
    wide = [size for one in have for size in (one, 1)]
    repeated = [size for one, all_ in zip(have, leading, strict=True) for size in (one, all_ // max(1, one))]
    split = apply("broadcast_to", reshape(x, (*wide, *x.shape[-2:])), shape=(*repeated, *x.shape[-2:]))
    return reshape(split, (*leading, *x.shape[-2:]))


def _mul_mat(attributes: Mapping[str, Any], weights: Value, activations: Value) -> Value:
    return matmul(activations, interleaved(weights, activations.shape[:-2]).mT)


def _out_prod(attributes: Mapping[str, Any], a: Value, b: Value) -> Value:
    return matmul(b.mT, interleaved(a, b.shape[:-2]))


def _mul_mat_id(attributes: Mapping[str, Any], experts: Value, activations: Value, ids: Value) -> Value:
    count, outer, inner = experts.shape
    tokens, used = ids.shape
    chosen = apply("get_rows", reshape(experts, (count, outer * inner)), reshape(ids, (tokens * used,)))
    rows = apply("repeat", activations, shape=(tokens, used, inner))
    found = matmul(reshape(chosen, (tokens, used, outer, inner)), reshape(rows, (tokens, used, inner, 1)))
    return reshape(found, (tokens, used, outer))


def _solve_back(step: Step, g: Value) -> Value:
    """The transpose of a lower triangle, read backwards in both directions, is one too."""
    a, last = step[0], step[0].ndim - 1
    turned = reverse(a.mT, (last - 1, last))
    return reverse(apply("solve_tri", turned, reverse(g, (last - 1,))), (last - 1,))


def _solve_matrix(step: Step, g: Value) -> Value:
    product = -matmul(_solve_back(step, g), step.result.mT)
    return apply("tri", product, type=2)


RULES: Mapping[str, Rule] = {
    "matmul": each(_left, _right),
    "mul_mat": composed(_mul_mat),
    "mul_mat_id": composed(_mul_mat_id),
    "out_prod": composed(_out_prod),
    "solve_tri": each(_solve_matrix, _solve_back),
}
