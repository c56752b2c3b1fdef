"""Rules of matrix products and sums of products."""

from __future__ import annotations

import heliograph as hg
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

#: The largest matrix whose determinant is expanded.
_MOST_ROWS = 5
#: The most operands of a sum of products, whose order is searched.
_MOST_FACTORS = 32


@rule("MatMul")
def _matmul(node: Node) -> Item:
    return hg.matmul(node.value(0), node.value(1))


@rule("Gemm")
def _gemm(node: Node) -> Item:
    a, b = node.value(0), node.value(1)
    a = a.mT if node.int("transA", 0) else a
    b = b.mT if node.int("transB", 0) else b
    found = hg.matmul(a, b)
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    if alpha != 1:
        found = found * _factor(alpha, found)
    if (c := node.optional(2)) is not None:
        found = found + (c if beta == 1 else c * _factor(beta, c))
    return found


def _factor(number: float, x: hg.Value) -> float | int:
    return int(number) if x.dtype.is_integer else number


@rule("Einsum")
def _einsum(node: Node) -> Item:
    values = node.values()
    if len(values) > _MOST_FACTORS:
        raise node.refuse(f"it has {len(values)} operands; {_MOST_FACTORS} are the most")
    return hg.einsum(node.string("equation", ""), *values)


@rule("Det")
def _determinant(node: Node) -> Item:
    """Expand along rows."""
    x = node.value(0)
    size = x.shape[-1]
    if size > _MOST_ROWS or x.shape[-2] != size:
        raise node.refuse(f"determinants of {x.shape[-2:]} matrices are not computed")
    return _minor(x, 0, tuple(range(size)))


def _minor(x: hg.Value, row: int, columns: tuple[int, ...]) -> hg.Value:
    if len(columns) == 1:
        return x[..., row, columns[0]]
    total: hg.Value | None = None
    for place, column in enumerate(columns):
        term = x[..., row, column] * _minor(x, row + 1, columns[:place] + columns[place + 1 :])
        signed = -term if place % 2 else term
        total = signed if total is None else total + signed
    assert total is not None
    return total
