"""Rules of matrix products."""

from __future__ import annotations

import heliograph as hg
from heliograph.torch.node import Node, Number, in_f32
from heliograph.torch.rules import rule


@rule("mm", "bmm", "matmul")
def _product(node: Node, a: hg.Value, b: hg.Value, *_: object) -> hg.Value:
    return hg.matmul(a, b)


@rule("addmm", "baddbmm")
def _add_product(node: Node, c: hg.Value, a: hg.Value, b: hg.Value, beta: Number, alpha: Number) -> hg.Value:
    found = hg.matmul(a, b)
    if alpha != 1:
        found = found * alpha
    if beta == 0:
        return found
    return found + (c if beta == 1 else c * beta)


@rule("linear")
def _linear(node: Node, x: hg.Value, weight: hg.Value, bias: hg.Value | None) -> hg.Value:
    found = hg.matmul(x, weight.mT)
    return found if bias is None else found + bias


@rule("_cdist_forward")
def _distances(node: Node, a: hg.Value, b: hg.Value, p: float, mode: int | None) -> hg.Value:
    node.parts(0)
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


def norm(x: hg.Value, p: float, axis: int) -> hg.Value:
    """Return the p-norm along an axis."""
    size = hg.abs(x)
    if p == 0:
        return hg.sum(hg.where(size != 0, 1.0, size * 0.0), axis=axis)
    if p == float("inf"):
        return hg.max(size, axis=axis)
    if p == 1:
        return hg.sum(size, axis=axis)
    if p == 2:
        return hg.sqrt(hg.sum(hg.square(x), axis=axis))
    return hg.pow(hg.sum(hg.pow(size, p), axis=axis), 1 / p)
