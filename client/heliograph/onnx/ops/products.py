"""Rules of matrix products and sums of products."""

from __future__ import annotations

from itertools import chain

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

#: The largest matrix whose determinant is expanded.
_MOST_ROWS = 5


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
    """Align the operands by their letters, multiply them and sum up what the result lacks."""
    values = node.values()
    inputs, output = _subscripts(node, [one.ndim for one in values])
    letters = list(dict.fromkeys(output + "".join(inputs)))
    aligned = [_aligned(one, list(text), letters) for one, text in zip(values, inputs, strict=True)]
    if len(aligned) == 2 and (found := _as_matmul(aligned, letters, output, values[0].dtype)) is not None:
        return found
    product = aligned[0]
    for one in aligned[1:]:
        product = product * one
    gone = tuple(place for place, letter in enumerate(letters) if letter not in output)
    found = cast(hg.sum(product, axis=gone), values[0].dtype) if gone else product
    return found


def _as_matmul(aligned: list[hg.Value], letters: list[str], output: str, dtype: hg.DType) -> hg.Value | None:
    """Two operands with sums over letters of both are a matrix product."""
    left, right = aligned
    groups: dict[str, list[int]] = {"both": [], "left": [], "right": [], "sum": []}
    for place, letter in enumerate(letters):
        in_left, in_right = left.shape[place] != 1, right.shape[place] != 1
        if letter not in output:
            if not (in_left and in_right):
                return None
            groups["sum"].append(place)
        else:
            groups["both" if in_left == in_right else "left" if in_left else "right"].append(place)
    if not groups["sum"]:
        return None
    both, rows, columns, inner = (groups[name] for name in ("both", "left", "right", "sum"))
    a = hg.permute_dims(left, [*both, *rows, *columns, *inner])
    b = hg.permute_dims(right, [*both, *rows, *inner, *columns])
    batch = [left.shape[place] for place in both]
    m = [left.shape[place] for place in rows]
    n = [right.shape[place] for place in columns]
    k = [left.shape[place] for place in inner]
    found = hg.matmul(
        hg.reshape(a, (*batch, int(np.prod(m)), int(np.prod(k)))),
        hg.reshape(b, (*batch, int(np.prod(k)), int(np.prod(n)))),
    )
    order = [*both, *rows, *columns]
    wide = hg.reshape(found, (*batch, *m, *n))
    return cast(hg.permute_dims(wide, [order.index(place) for place in sorted(order)]), dtype)


def _subscripts(node: Node, ranks: list[int]) -> tuple[list[str], str]:
    """Return the letters of the operands and of the result, without dots."""
    left, arrow, output = node.string("equation", "").replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise node.broken(f"its equation has {len(texts)} operands, and the node {len(ranks)}")
    free = [
        rank - len(text.replace("...", "")) if "..." in text else 0
        for text, rank in zip(texts, ranks, strict=True)
    ]
    if any(
        len(text.replace("...", "")) + more != rank
        for text, more, rank in zip(texts, free, ranks, strict=True)
    ):
        raise node.broken("its equation does not fit the shapes")
    dots = "".join(chr(0x100 + number) for number in range(max(free, default=0)))
    inputs = [text.replace("...", dots[len(dots) - more :]) for text, more in zip(texts, free, strict=True)]
    if arrow:
        return inputs, output.replace("...", dots)
    everything = list(chain.from_iterable(inputs))
    once = sorted(one for one in set(everything) if everything.count(one) == 1 and one not in dots)
    return inputs, dots + "".join(once)


def _aligned(x: hg.Value, text: list[str], letters: list[str]) -> hg.Value:
    """Return x with a dimension for each letter; letters that come twice are diagonals."""
    for letter in dict.fromkeys(text):
        while text.count(letter) > 1:
            first = text.index(letter)
            second = text.index(letter, first + 1)
            moved = hg.moveaxis(x, (first, second), (-2, -1))
            diagonal = hg.eye(x.shape[first], dtype="bool", graph=x.graph)
            zero = cast(hg.full((), 0, "i32", graph=x.graph), x.dtype)
            x = cast(hg.sum(hg.where(diagonal, moved, zero), axis=-1), x.dtype)
            text = [one for place, one in enumerate(text) if place not in (first, second)] + [letter]
    order = sorted(range(len(text)), key=lambda place: letters.index(text[place]))
    x = hg.permute_dims(x, order)
    sizes = {text[place]: x.shape[number] for number, place in enumerate(order)}
    return hg.reshape(x, [sizes.get(letter, 1) for letter in letters])


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
