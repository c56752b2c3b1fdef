"""Reductions of the last dimensions as native steps along rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.lowering.rows import FORMS, fits
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType, contiguous_strides

#: The builder's method of each op.
METHODS = {
    "reduce_sum": "sum_rows", "reduce_mean": "mean_rows", "reduce_max": "max_rows",
    "sum": "sum_rows", "sum_rows": "sum_rows", "mean": "mean_rows",
}  # fmt: skip
OPS = frozenset(METHODS)

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a node reduces its last dimensions, which have no gaps."""
    shape, count = types[0].shape, _reduced(node, types[0].ndim)
    if types[0].dtype.name not in FORMS or node.type.dtype is not types[0].dtype:
        return False
    if not fits(types[0], math.prod(shape[len(shape) - count :])):
        return False
    expected = types[0].dtype.block_bytes
    for size, step in zip(reversed(shape[-count:]), reversed(strides[0][-count:]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return count > 0


def _reduced(node: Node, ndim: int) -> int:
    """Return the number of last dimensions that a node reduces; 0 if it reduces others."""
    every = tuple(range(ndim))
    if node.op in ("sum_rows", "mean"):
        axes: tuple[int, ...] = every[-1:]
    else:
        axes = tuple(sorted(axis % ndim for axis in node.attributes.get("axes", ()))) or every
    return len(axes) if axes == every[ndim - len(axes) :] else 0


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step; `places`: operand and result."""
    source, target = places
    shape, count = types[0].shape, _reduced(node, types[0].ndim)
    leading = shape[: len(shape) - count]
    dtype = types[0].dtype
    source = source._replace(strides=(*source.strides[: len(leading)], dtype.block_bytes))
    target = target._replace(strides=contiguous_strides(leading, dtype))
    rows = (*leading, math.prod(shape[-count:]))
    getattr(builder, METHODS[node.op])(rows, source, target, FORMS[dtype.name])
