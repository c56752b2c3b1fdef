"""Copies of parts: padding, rotation, and repetition of nearest elements. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels import Operation
from heliograph_backends.cpu.kernels.program.elements import HALF
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, DType, TensorType

#: Ops that put parts of their operand side by side.
PARTS = frozenset({"pad", "pad_reflect_1d", "roll"})
OPS = PARTS | {"upscale"}
#: The most dimensions that are walked, and the most copies.
MOST_DIMENSIONS, MOST_COPIES = 6, 16

#: A single object, so that equal copies are encoded once.
_COPY = (k.Instruction(Operation.COPY, k.Input(0), (k.Input(1),)),)
_CLEAR = (k.Instruction(Operation.COPY, k.Input(0), (0.0,)),)

Strides = tuple[int, ...]


class Part(NamedTuple):
    """Consecutive elements of one dimension of the result, and the first one that they come from."""

    start: int
    size: int
    source: int
    step: int = 1


def copy(
    builder: k.ProgramBuilder, shape: tuple[int, ...], source: k.Operand, target: k.Operand, dtype: DType
) -> None:
    """Append a copy of elements that are not blocks."""
    if dtype is not F32:
        builder.convert(shape, source, target, k.BYTES[dtype.block_bytes])
    elif math.prod(shape):
        builder.elementwise(shape, k.Elementwise((target, source), _COPY))


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if steps run a node: few copies of parts, or an upscale by whole factors."""
    (type,) = types
    if not 0 < type.ndim <= MOST_DIMENSIONS or not type.size or not node.type.size:
        return False
    if node.op in PARTS:
        if type.dtype.kind == "quantized" or (_clears(node) and type.dtype.block_bytes not in (2, 4, 8)):
            return False
        return math.prod(len(parts) for parts in _parts(node, type.shape)) <= MOST_COPIES
    if type.dtype is not F32 or node.attributes["mode"] != 0 or node.attributes["align_corners"]:
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
    if node.op == "upscale":
        _repeat(builder, types[0].shape, node.type.shape, source, target)
        return
    if _clears(node):
        _clear_around(builder, node, types[0], target)
    for parts in itertools.product(*_parts(node, types[0].shape)):
        shape = tuple(part.size for part in parts)
        there, here = target.offset, source.offset
        steps = []
        for part, written, read in zip(parts, target.strides, source.strides, strict=True):
            there += part.start * written
            here += part.source * read
            steps.append(part.step * read)
        copy(
            builder,
            shape,
            k.Operand(source.slot, here, tuple(steps)),
            target._replace(offset=there),
            types[0].dtype,
        )


def _clears(node: Node) -> bool:
    return node.op == "pad" and not node.attributes["circular"]


def _parts(node: Node, shape: tuple[int, ...]) -> list[list[Part]]:
    """Return the parts of each dimension of the result."""
    attributes = node.attributes
    if node.op == "roll":
        pairs = zip(attributes["shifts"], shape, strict=True)
        found = [_around(shift % size, size, size) for shift, size in pairs]
    elif node.op == "pad_reflect_1d":
        left, right, size = attributes["left"], attributes["right"], shape[-1]
        sides = [Part(0, left, left, -1), Part(left, size, 0), Part(left + size, right, size - 2, -1)]
        found = [*([Part(0, size, 0)] for size in shape[:-1]), sides]
    elif attributes["circular"]:
        triples = zip(attributes["left"], shape, node.type.shape, strict=True)
        found = [_around(left, have, size) for left, have, size in triples]
    else:
        pairs = zip(attributes["left"], shape, strict=True)
        found = [[Part(left, size, 0)] for left, size in pairs]
    return [[part for part in parts if part.size] for parts in found]


def _around(first: int, have: int, size: int) -> list[Part]:
    """Return the parts of `size` elements that go around `have`, of which element 0 is at `first`;
    at most one more than are ever copied."""
    found: list[Part] = []
    start = 0
    while start < size and len(found) <= MOST_COPIES:
        source = (start - first) % have
        each = min(have - source, size - start)
        found.append(Part(start, each, source))
        start += each
    return found


def _clear_around(builder: k.ProgramBuilder, node: Node, type: TensorType, target: k.Operand) -> None:
    """Clear what lies before and behind each dimension."""
    offset = target.offset
    for axis, (left, right) in enumerate(zip(node.attributes["left"], node.attributes["right"], strict=True)):
        step = target.strides[axis]
        for size, start in ((left, 0), (right, left + type.shape[axis])):
            if size:
                shape = (*type.shape[:axis], size, *node.type.shape[axis + 1 :])
                part = target._replace(offset=offset + start * step)
                _clear(builder, shape, part, type.dtype.block_bytes)
        offset += left * step


def _clear(builder: k.ProgramBuilder, shape: tuple[int, ...], part: k.Operand, size: int) -> None:
    """Append zeros of `size` bytes, which are the same for all data types."""
    if size == 8:
        shape, part = (*shape, 2), part._replace(strides=(*part.strides, 4))
    builder.elementwise(shape, k.Elementwise((part,), _CLEAR, (HALF,) if size == 2 else ()))


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
