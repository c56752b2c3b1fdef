"""Matrix products as launches and calls of cuBLAS. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import NamedTuple

from heliograph_backends.cuda.driver.driver import Gemm
from heliograph_backends.cuda.lowering.launch import Located, Strides, aligned, collapsed
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType

#: The most rows for which attention has a block for each.
MOST_FEW = 4
#: The data types of operands and result that cuBLAS supports.
CUBLAS = {
    ("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32"),
}  # fmt: skip
#: The most calls for one product that a batch cannot express. In a graph each call costs a
#: microsecond or two; the reference definition would copy the operands, and keep the step out of
#: graphs.
MOST_CALLS = 1024
#: The most rows of a product: cuBLAS counts them in 32 bits.
MOST_ROWS = 2**31 - 1
#: The limit of the second and third dimensions of a grid.
MOST_GRID = 65535


@dataclass(frozen=True, slots=True)
class Call:
    """A cuBLAS product, with operands as slots and offsets."""

    gemm: Gemm
    a: tuple[int, int]
    b: tuple[int, int]
    c: tuple[int, int]


# Matrices


def matrices(weights: Located, x: Located, result: Located) -> tuple[Strides, tuple[Strides, ...]]:
    """Return the leading dimensions and strides, split in two where a matrix of weights serves
    several consecutive ones."""
    sizes: list[int] = []
    steps: tuple[list[int], list[int], list[int]] = [], [], []
    lead = x.type.shape[:-2]
    own = (1,) * (len(lead) - len(weights.type.shape[:-2])) + weights.type.shape[:-2]
    w = (0,) * (len(lead) - len(weights.strides[:-2])) + weights.strides[:-2]
    for size, have, *strides in zip(lead, own, w, x.strides[:-2], result.strides[:-2], strict=True):
        times = size // max(1, have)
        sizes += [have, times]
        for into, step, repeats in zip(steps, strides, (True, False, False), strict=True):
            into += [step, 0] if repeats else [step * times, step]
    return collapsed(sizes, [tuple(one) for one in steps])


# cuBLAS


def is_cublas(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if cuBLAS may compute a product; `calls` checks the operands' strides."""
    if node.op not in ("matmul", "mul_mat") or node.type.size == 0:
        return False
    names = {one.dtype.name for one in operands}
    return len(names) == 1 and (names.pop(), node.type.dtype.name) in CUBLAS


def calls(node: Node, operands: Sequence[Located], result: Located) -> tuple[Call, ...] | None:
    """Return the calls; None if cuBLAS cannot read a matrix with these strides in place."""
    if node.op == "matmul":
        left, right = operands
        lead = result.type.shape[:-2]
        steps = [aligned(one.type.shape[:-2], one.strides[:-2], lead) for one in (left, right)]
        right_steps = right.strides[-2:]
        sizes, strides = collapsed(lead, [*steps, result.strides[:-2]])
    else:
        right, left = operands
        sizes, (w, a, c) = matrices(right, left, result)
        strides = (a, w, c)
        right_steps = right.strides[-1], right.strides[-2]
    m, n, k = result.type.shape[-2], result.type.shape[-1], left.type.shape[-1]
    if k == 0:
        return None
    found = _as_rows(_Rows(m, left, result, sizes, tuple(strides)))
    values = found.left, right, found.result
    return _calls((found.m, n, k), values, right_steps, found.sizes, found.strides)


class _Rows(NamedTuple):
    """The rows of the left side, and their matrices; sizes and strides are those of the batch."""

    m: int
    left: Located
    result: Located
    sizes: Strides
    strides: tuple[Strides, ...]


def _as_rows(one: _Rows) -> _Rows:
    """Merge dimensions of the batch into rows, as long as their matrices share the right side and
    their rows follow each other: one product instead of many."""
    while one.sizes and one.strides[1][-1] == 0 and one.m * one.sizes[-1] <= MOST_ROWS:
        left, result = (
            _with_rows(one.m, value, steps)
            for value, steps in zip((one.left, one.result), one.strides[::2], strict=True)
        )
        if left is None or result is None:
            break
        fewer = tuple(steps[:-1] for steps in one.strides)
        one = _Rows(one.m * one.sizes[-1], left, result, one.sizes[:-1], fewer)
    return one


def _with_rows(m: int, value: Located, steps: Strides) -> Located | None:
    """Return a value whose m rows continue with those of the next matrix of the batch; None if they
    do not."""
    row = value.strides[-2] if m > 1 else steps[-1]
    if steps[-1] != m * row or row < value.type.shape[-1] * value.type.dtype.block_bytes:
        return None
    return value._replace(strides=(*value.strides[:-2], row, value.strides[-1]))


def _calls(
    shape: tuple[int, int, int],
    operands: tuple[Located, Located, Located],
    right_steps: Strides,
    sizes: Strides,
    strides: Sequence[Strides],
) -> tuple[Call, ...] | None:
    """Return the calls. cuBLAS is column-major, so each computes the transpose: result^T = right^T
    left^T.

    Each call covers the longest dimension of the batch; there is a call for each index of the
    others.
    """
    m, n, k = shape
    left, right, result = operands
    items = [one.type.dtype.block_bytes for one in operands]
    a = _read(right_steps, (k, n), items[1])
    b = _read(left.strides[-2:], (m, k), items[0])
    c = _read(result.strides[-2:], (m, n), items[2])
    along = sizes.index(max(sizes)) if sizes else 0
    batch, last = sizes[along] if sizes else 1, [steps[along] if sizes else 0 for steps in strides]
    if a is None or b is None or c is None or c[0] or math.prod(sizes) > MOST_CALLS * batch:
        return None
    steps = [step // item for step, item in zip(last, items, strict=True)]
    types = (right.type.dtype.name, left.type.dtype.name, result.type.dtype.name)
    gemm = Gemm((n, m, k), (a[0], b[0]), types, (a[1], b[1], c[1]), (steps[1], steps[0], steps[2]), batch)
    found = []
    for place in combinations(*(range(1 if axis == along else size) for axis, size in enumerate(sizes))):
        at = [
            one.offset + sum(i * step for i, step in zip(place, steps, strict=True))
            for one, steps in zip(operands, strides, strict=True)
        ]
        found.append(Call(gemm, (right.slot, at[1]), (left.slot, at[0]), (result.slot, at[2])))
    return tuple(found)


def _read(steps: Strides, shape: tuple[int, int], item: int) -> tuple[bool, int] | None:
    """Return whether a row-major matrix must be transposed for cuBLAS, and the elements between its
    lines; None if cuBLAS cannot read it."""
    (row, column), (rows, columns) = steps, shape
    if (column == item or columns == 1) and (row >= columns * item or rows == 1) and row % item == 0:
        return False, max(row // item, columns) if rows > 1 else max(1, columns)
    if (row == item or rows == 1) and (column >= rows * item or columns == 1) and column % item == 0:
        return True, max(column // item, rows) if columns > 1 else max(1, rows)
    return None


def reads_rows(values: Sequence[Located]) -> bool:
    """True if the elements of rows are contiguous, as the kernels require."""
    return all(one.strides[-1] == one.type.dtype.block_bytes or one.type.shape[-1] == 1 for one in values)
