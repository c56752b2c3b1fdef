"""Products of matrices and vectors: the array API's names and rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value

__all__ = ["matmul", "tensordot", "vecdot"]


def matmul(x1: Operand, x2: Operand, /) -> Value:
    """[..., m, k] and [..., k, n] give [..., m, n]; leading dimensions broadcast; vectors as in
    NumPy."""
    return lowering.matmul(x1, x2)


def vecdot(x1: Operand, x2: Operand, /, *, axis: int = -1) -> Value:
    """The sum of the products along an axis; the other dimensions broadcast."""
    left, right = lowering.promoted(x1, x2)
    sizes = {left.shape[lowering.axis_of(left, axis)], right.shape[lowering.axis_of(right, axis)]}
    if axis >= 0 or len(sizes) > 1:
        raise invalid(f"vecdot of {left.type} and {right.type} along {axis}: a negative axis of one size")
    return lowering.reduce("reduce_sum", lowering.elementwise("mul", left, right), axis, False)


def tensordot(x1: Operand, x2: Operand, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Value:
    """Sums of products along pairs of axes: the last `axes` of x1 with the first of x2, or as
    listed."""
    left, right = lowering.promoted(x1, x2)
    if isinstance(axes, int):
        if not 0 <= axes <= min(left.ndim, right.ndim):
            raise invalid(f"tensordot of {left.type} and {right.type} over {axes} axes")
        pair = (tuple(range(left.ndim - axes, left.ndim)), tuple(range(axes)))
    else:
        pair = (_axes(left, axes[0]), _axes(right, axes[1]))
    return _contract(left, right, *pair)


def _axes(x: Value, listed: Sequence[int]) -> tuple[int, ...]:
    return lowering.axes_of(x, tuple(map(index, listed))) if len(listed) else ()


def _contract(left: Value, right: Value, over: tuple[int, ...], with_: tuple[int, ...]) -> Value:
    summed = [left.shape[place] for place in over]
    if summed != [right.shape[place] for place in with_]:
        raise invalid(f"tensordot of {left.type} and {right.type}: axes {over} and {with_} differ in size")
    rows = [place for place in range(left.ndim) if place not in over]
    columns = [place for place in range(right.ndim) if place not in with_]
    shape = [left.shape[place] for place in rows] + [right.shape[place] for place in columns]
    inner = math.prod(summed)
    tall = lowering.reshape(lowering.permute(left, [*rows, *over]), (_size(left, rows), inner))
    wide = lowering.reshape(lowering.permute(right, [*with_, *columns]), (inner, _size(right, columns)))
    return lowering.reshape(lowering.apply("matmul", tall, wide), shape)


def _size(x: Value, places: Sequence[int]) -> int:
    return math.prod(x.shape[place] for place in places)
