"""Rules of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.torch.node import Node, Number, in_f32
from heliograph.torch.ops.reductions import norm
from heliograph.torch.rules import rule


@rule("addbmm")
def _add_products(node: Node, c: hg.Value, a: hg.Value, b: hg.Value, beta: Number, alpha: Number) -> hg.Value:
    rows = hg.reshape(hg.moveaxis(a, 0, 1), (a.shape[1], a.shape[0] * a.shape[2]))
    return _add_product(node, c, rows, hg.reshape(b, (b.shape[0] * b.shape[1], b.shape[2])), beta, alpha)


@rule("_int_mm")
def _product_of_integers(node: Node, a: hg.Value, b: hg.Value) -> hg.Value:
    return hg.matmul(cast(a, "i32"), cast(b, "i32"))


@rule("_trilinear")
def _trilinear(
    node: Node,
    a: hg.Value,
    b: hg.Value,
    c: hg.Value,
    first: Sequence[int],
    second: Sequence[int],
    third: Sequence[int],
    summed: Sequence[int],
    *_: object,
) -> hg.Value:
    """The sum of the products of three tensors, each with new dimensions at places of its own."""
    total: hg.Value | None = None
    for one, new in zip((a, b, c), (first, second, third), strict=True):
        for axis in sorted(new):
            one = hg.expand_dims(one, axis=axis)
        total = one if total is None else total * one
    assert total is not None
    node.room(total.size)
    return hg.sum(total, axis=tuple(summed))


@rule("mm", "bmm")
def _product(node: Node, a: hg.Value, b: hg.Value, *_: object) -> hg.Value:
    return hg.matmul(a, b)


@rule("addmm")
def _add_product(node: Node, c: hg.Value, a: hg.Value, b: hg.Value, beta: Number, alpha: Number) -> hg.Value:
    found = hg.matmul(a, b)
    if alpha != 1:
        found = found * alpha
    if beta == 0:
        return found
    return found + (c if beta == 1 else c * beta)


@rule("addmv")
def _add_vector_product(
    node: Node, c: hg.Value, a: hg.Value, b: hg.Value, beta: Number, alpha: Number
) -> hg.Value:
    return _add_product(node, c, a, b, beta, alpha)


@rule("_cdist_forward")
def _distances(node: Node, a: hg.Value, b: hg.Value, p: float, mode: int | None) -> hg.Value:
    apart = hg.expand_dims(in_f32(a), axis=a.ndim - 1) - hg.expand_dims(in_f32(b), axis=b.ndim - 2)
    return norm(apart, p, axis=apart.ndim - 1)


@rule("_pdist_forward")
def _distances_of_pairs(node: Node, x: hg.Value, p: float) -> hg.Value:
    rows = [(i, j) for i in range(x.shape[0]) for j in range(i + 1, x.shape[0])]
    node.room(len(rows))
    if not rows:
        return node.full((0,), 0, x.dtype)
    left, right = (hg.take(x, list(one), axis=0) for one in zip(*rows, strict=True))
    return norm(left - right, p, axis=1)
