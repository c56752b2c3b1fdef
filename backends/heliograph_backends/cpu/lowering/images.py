"""Resampled images, windows as rows, and the gradients of windows as native steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.encoding_images import MOST_TABLE_WORDS, Taps, table_words
from heliograph_backends.cpu.kernels.program.words import BUFFER_AREA_BYTES, OUTER_DIMENSIONS
from heliograph_backends.cpu.lowering import copies
from heliograph_backends.reference.windows import resampling
from heliograph_proto.graph import Node
from heliograph_proto.ops.windows import steps
from heliograph_proto.types import F32, TensorType

OPS = frozenset({"upscale", "im2col", "im2col_back", "pool_2d_back"})
#: The data types of windows that become rows: of equal types, elements are moved by the byte.
NARROW = {"f16": HALF, "bf16": BRAIN}
#: The largest size, padding and step of windows, whose places are numbers of 32 bits.
MOST_SIZE = 2**28
#: The taps of a line that is resampled, by the mode.
MODES = {0: 1, 1: 2, 2: 4}

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel runs a node of operands with these types and strides; the result's are the
    last."""
    if not all(one.size for one in (*types, node.type)):
        return False
    if node.op == "upscale":
        return copies.has_kernel(node, types, strides) or _resamples(node, types[0], strides[-1])
    geometry = _geometry_of(node, types)
    if max(*geometry.image, *geometry.padding, *geometry.result, *geometry.window) > MOST_SIZE:
        return False
    if max(*geometry.step, *geometry.spread) > MOST_SIZE:
        return False
    if node.op == "im2col":
        return _unfolds(node, types, strides[-1])
    if any(one.dtype is not F32 for one in (types[0], node.type)):
        return False
    if node.op == "im2col_back":
        return strides[0] == types[0].strides and strides[-1][-1] == 4
    return types[1].dtype is F32 and strides[-1][-1] == 4 and node.type.ndim - 2 <= OUTER_DIMENSIONS


def _resamples(node: Node, type: TensorType, result: Strides) -> bool:
    """True if a kernel resamples an image; its other dimensions stay as they are."""
    if type.dtype is not F32 or not 2 <= type.ndim <= 2 + OUTER_DIMENSIONS:
        return False
    if node.attributes["antialias"] and node.attributes["mode"]:
        return False
    height, width = node.type.shape[-2:]
    words = table_words(height, width, MODES[node.attributes["mode"]])
    same = type.shape[:-2] == node.type.shape[:-2]
    return same and words <= MOST_TABLE_WORDS and (width == 1 or result[-1] == 4)


def _unfolds(node: Node, types: Sequence[TensorType], result: Strides) -> bool:
    """True if a kernel writes these rows: of the data's type, or of f32 as f16 or bf16."""
    data, rows = types[1].dtype, node.type.dtype
    width = node.type.shape[-1]
    if data is rows:
        fits = data.name in ("f32", *NARROW)
    else:
        fits = data is F32 and rows.name in NARROW and 4 * width <= BUFFER_AREA_BYTES
    return fits and result == node.type.strides


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step; `places`: operands, then the result, with stride 0 where they repeat."""
    if node.op == "upscale":
        by_parts = copies.has_kernel(node, types, [one.strides for one in places])
        if by_parts:
            copies.append(builder, node, types, places)
        else:
            _resample(builder, node, types[0], *places)
        return
    geometry = _geometry_of(node, types)
    if node.op == "im2col":
        data, rows = types[1], node.type
        rounded = 0 if data.dtype is rows.dtype else NARROW[rows.dtype.name]
        sizes = data.shape[0], data.shape[1]
        size = data.dtype.block_bytes
        image = _image(places[1], len(data.shape))
        target = _rows(places[-1], rows)
        builder.unfold(sizes, geometry, image, target, size, rounded)
    elif node.op == "im2col_back":
        shape = node.type.shape
        gradient = _rows(places[0], types[0])
        builder.fold((shape[0], shape[1]), geometry, gradient, _image(places[-1], len(shape)))
    else:
        gradients, images, result = places
        average = node.attributes["average"]
        builder.pool_back(node.type.shape[:-2], geometry, (gradients, images, result), average=average)


def _resample(
    builder: k.ProgramBuilder, node: Node, type: TensorType, source: k.Operand, target: k.Operand
) -> None:
    sides = [
        Taps(*resampling(numpy, node.attributes, have, size))
        for have, size in zip(type.shape[-2:], node.type.shape[-2:], strict=True)
    ]
    copied = node.attributes["mode"] == 0
    builder.resample(type.shape[:-2], source, target, sides[0], sides[1], copied=copied)


def _image(operand: k.Operand, ndim: int) -> k.Operand:
    """Return data [n, c, *sizes] as [n, c, h, w]; data of one dimension has images of one row."""
    if ndim == 4:
        return operand
    strides = operand.strides
    return operand._replace(strides=(*strides[:2], 0, *strides[2:]))


def _rows(operand: k.Operand, type: TensorType) -> k.Operand:
    """Return rows [n, *windows, k] as [n, windows, k]; windows have no gaps."""
    each = type.shape[-1] * type.dtype.block_bytes
    return operand._replace(strides=(operand.strides[0], each, type.dtype.block_bytes))


def _geometry_of(node: Node, types: Sequence[TensorType]) -> k.Geometry:
    """Return the geometry of windows; in one dimension, of images of one row."""
    given = dict(node.attributes)
    if node.op == "pool_2d_back":
        window, image, result = given["kernel"], node.type.shape[-2:], types[0].shape[-2:]
    elif node.op == "im2col":
        window, image, result = types[0].shape[2:], types[1].shape[2:], node.type.shape[1:-1]
    else:
        window, image, result = types[1].shape[2:], node.type.shape[2:], types[0].shape[1:-1]
    stride, spread, padding = (
        steps(given, name, len(window), default)
        for name, default in (("stride", 1), ("dilation", 1), ("padding", 0))
    )
    parts = ((image, 1), (window, 1), (stride, 1), (spread, 1), (padding, 0), (result, 1))
    return k.Geometry(*[(fill,) * (2 - len(window)) + tuple(part) for part, fill in parts])
