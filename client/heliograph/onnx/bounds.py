"""Values whose size a run decides, in ops that do not need to know it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.onnx.elements import Bounded, Item
from heliograph.onnx.node import Node

_WORDS = """
    Abs Add And Cast Ceil Clip Div Equal Exp Floor Greater GreaterOrEqual Identity Less LessOrEqual
    Log Max Min Mod Mul Neg Not Or Pow Reciprocal Relu Round Sigmoid Sign Sqrt Sub Sum Tanh Where
"""
#: Ops that compute each element by itself; operands broadcast.
_ELEMENTWISE = frozenset(_WORDS.split())
#: Why other ops are refused.
NEEDS_SIZE = "only a run knows the size of one of its inputs, and it needs that"


def bounded_axis(node: Node, items: Sequence[Item]) -> int | None:
    """Return the axis of a node's result that has the size of its bounded input. None if the op
    needs that size, or if two such sizes meet."""
    bounded = [(place, one) for place, one in enumerate(items) if isinstance(one, Bounded)]
    (place, first), *rest = bounded
    axis, ndim = first.axis, first.value.ndim
    if node.op in _ELEMENTWISE:
        return _elementwise(items, first)
    if rest:
        return None
    if node.op == "Transpose":
        return (node.ints("perm") or list(range(ndim))[::-1]).index(axis)
    if node.op == "Gather" and place == 1:
        return node.axis(node.int("axis", 0), len(node.shape(0))) + axis
    if node.op == "Gather":
        along = node.axis(node.int("axis", 0), ndim)
        return None if along == axis else axis + (len(node.shape(1)) - 1) * (along < axis)
    if node.op == "GatherND" and place == 1 and axis < ndim - 1 and not node.int("batch_dims", 0):
        return axis
    if node.op in ("Squeeze", "Unsqueeze"):
        return _after_squeeze(node, axis, ndim)
    if node.op == "Slice":
        axes = node.integers(3) if node.has(3) else node.ints("axes") or [axis]
        return None if axis in [one % ndim for one in axes] else axis
    if node.op == "Reshape" and first.value.size == first.value.shape[axis]:
        # All other dimensions are 1, before and after.
        target = node.integers(1)
        return target.index(-1) if sorted(target) == [-1] + [1] * (len(target) - 1) else None
    return None


def _elementwise(items: Sequence[Item], first: Bounded) -> int | None:
    """The axis counts from the end, and all others broadcast along it or have its size."""
    back = first.value.ndim - first.axis
    most = 0
    for one in items:
        if isinstance(one, Bounded):
            if one.count is not first.count or one.value.ndim - one.axis != back:
                return None
            most = max(most, one.value.ndim)
        elif isinstance(one, (hg.Value, np.ndarray)):
            if one.ndim >= back and one.shape[-back] != 1:
                return None
            most = max(most, one.ndim)
        elif one is not None:
            return None
    return most - back


def _after_squeeze(node: Node, axis: int, ndim: int) -> int | None:
    axes = node.integers(1) if node.has(1) else node.ints("axes")
    if axes is None:
        return None
    if node.op == "Squeeze":
        gone = [one % ndim for one in axes]
        return None if axis in gone else axis - sum(one < axis for one in gone)
    new = {one % (ndim + len(axes)) for one in axes}
    return [place for place in range(ndim + len(axes)) if place not in new][axis]
