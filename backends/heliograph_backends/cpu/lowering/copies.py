"""Padding with zeros, and repetition of nearest elements, as copies of parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels import Operation
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, TensorType

OPS = frozenset({"pad", "upscale"})
#: The most dimensions that are walked, and the most copies across.
MOST_DIMENSIONS, MOST_COPIES = 6, 16

_COPY = (k.Instruction(Operation.COPY, k.Input(0), (k.Input(1),)),)
_CLEAR = (k.Instruction(Operation.COPY, k.Input(0), (0.0,)),)

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if steps run a node: a pad that is not circular, or an upscale by whole factors."""
    (type,) = types
    if type.dtype is not F32 or not 0 < type.ndim <= MOST_DIMENSIONS or not type.size:
        return False
    if node.op == "pad":
        return not node.attributes["circular"]
    if node.attributes["mode"] != 0 or node.attributes["align_corners"]:
        return False
    pairs = list(zip(type.shape, node.type.shape, strict=True))
    repeated = sum(size > have for have, size in pairs)
    whole = all(size % have == 0 for have, size in pairs) and repeated <= 8 - type.ndim
    return whole and node.type.shape[-1] // type.shape[-1] <= MOST_COPIES


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the steps; `places`: operand and result."""
    source, target = places
    if node.op == "pad":
        _pad(builder, node, types[0], source, target)
    else:
        _repeat(builder, types[0].shape, node.type.shape, source, target)


def _pad(
    builder: k.ProgramBuilder, node: Node, type: TensorType, source: k.Operand, target: k.Operand
) -> None:
    """Clear what lies before and behind each dimension, and copy the rest."""
    strides, offset = node.type.strides, target.offset
    for axis, (left, right) in enumerate(zip(node.attributes["left"], node.attributes["right"], strict=True)):
        for size, start in ((left, 0), (right, left + type.shape[axis])):
            if size:
                shape = (*type.shape[:axis], size, *node.type.shape[axis + 1 :])
                part = k.Operand(target.slot, offset + start * strides[axis], strides)
                builder.elementwise(shape, k.Elementwise((part,), _CLEAR))
        offset += left * strides[axis]
    body = k.Elementwise((k.Operand(target.slot, offset, strides), source), _COPY)
    builder.elementwise(type.shape, body)


def _repeat(
    builder: k.ProgramBuilder,
    shape: tuple[int, ...],
    result: tuple[int, ...],
    source: k.Operand,
    target: k.Operand,
) -> None:
    """Copy the rows once for each place across, so that a step walks the source's elements."""
    factors = [size // have for have, size in zip(shape, result, strict=True)]
    sizes: list[int] = []
    read: list[int] = []
    written: list[int] = []
    for axis, (have, factor) in enumerate(zip(shape, factors, strict=True)):
        step = 4 * math.prod(result[axis + 1 :])
        sizes.append(have)
        read.append(source.strides[axis])
        written.append(step * factor)
        if factor > 1 and axis < len(shape) - 1:
            sizes.append(factor)
            read.append(0)
            written.append(step)
    for across in range(factors[-1]):
        part = k.Operand(target.slot, target.offset + 4 * across, tuple(written))
        walked = source._replace(strides=tuple(read))
        builder.elementwise(tuple(sizes), k.Elementwise((part, walked), _COPY))
