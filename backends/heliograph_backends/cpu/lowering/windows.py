"""Convolutions and pools as native steps. Pure.

A convolution whose window is all of the data is a product with the kernel as its right side, so
that a few rows of data read a large kernel once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.encoding_direct import direct_geometry
from heliograph_backends.cpu.kernels.program.encoding_windows import MOST_TAPS, staged_lines, wide_bytes
from heliograph_backends.cpu.kernels.program.tiles import MOST_PANELS
from heliograph_backends.cpu.kernels.program.words import OUTER_DIMENSIONS, PANEL_COLUMNS
from heliograph_backends.planning.layout import in_one_piece
from heliograph_proto.graph import Node
from heliograph_proto.ops.windows import steps
from heliograph_proto.types import F32, TensorType

CONVOLUTIONS = frozenset({"conv_2d", "conv_2d_dw"})
POOLS = frozenset({"pool_1d", "pool_2d"})
OPS = CONVOLUTIONS | POOLS
#: The numbers of data types.
FORMS = {"f32": 0, "f16": HALF, "bf16": BRAIN}
#: The most elements that a row of windows reads, if a kernel runs them: a worker's scratch has
#: them.
MOST_LINE_ELEMENTS = 2**20
#: The largest size and padding of a kernel's image, whose places are numbers of 32 bits.
MOST_SIZE = 2**28

#: The speed of a direct convolution over that of a product with windows, if both fill their panels, of
#: windows of one element, and of others.
SINGLE_GAIN, WINDOWS_GAIN = 0.93, 1.05

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel runs a node of operands with these types and strides; the result's are the
    last."""
    if node.type.dtype is not F32 or not all(one.size for one in (*types, node.type)):
        return False
    if any(one.dtype.name not in FORMS for one in types):
        return False
    if node.op in POOLS:
        lead = types[0].ndim - len(node.attributes["kernel"])
        # The mean of one dimension leaves padding out.
        padded = node.op == "pool_1d" and node.attributes["average"] and any(node.attributes["padding"])
        return not padded and lead <= OUTER_DIMENSIONS and _fits(_geometry_of(node, types), staged=True)
    kernel = types[0]
    pairs = zip(kernel.shape[1:], strides[0][1:], kernel.strides[1:], strict=True)
    dense = all(size == 1 or step == plain for size, step, plain in pairs)
    geometry = _geometry_of(node, types)
    return dense and _fits(geometry, kernel.shape[1], staged=node.op == "conv_2d_dw")


def _fits(geometry: k.Geometry, channels: int = 1, *, staged: bool) -> bool:
    """True if kernels can run windows; `staged`: a row of them lies in the scratch."""
    sizes = (*geometry.image, *geometry.padding, *geometry.result)
    if geometry.taps > MOST_TAPS or max(sizes) > MOST_SIZE:
        return False
    if not staged:
        return wide_bytes(geometry, channels, MOST_PANELS * PANEL_COLUMNS) <= 4 * MOST_LINE_ELEMENTS
    wide = geometry.wide_bytes(staged_lines(geometry), 1)
    return max(wide // 4, geometry.line_elements) <= MOST_LINE_ELEMENTS


def append(
    builder: k.ProgramBuilder,
    node: Node,
    types: Sequence[TensorType],
    places: Sequence[k.Operand],
    epilogue: k.Elementwise | None = None,
    *,
    packed: bool = False,
) -> None:
    """Append the step; `places`: operands, then the result, with stride 0 where they repeat.

    `packed`: the kernel of a product lies in its packed form.
    """
    if node.op in POOLS:
        _pool(builder, node, types[0], places, epilogue)
        return
    (kernel, data), (weights, source, target) = types, places
    geometry = _geometry_of(node, types)
    count, (outer, inner) = data.shape[0], kernel.shape[:2]
    if node.op == "conv_2d_dw":
        taps = k.Operand(weights.slot, weights.offset, (weights.strides[0], kernel.dtype.block_bytes))
        builder.windows(k.Windowing.PRODUCT, (count,), outer, geometry, (source, taps, target), epilogue)
        return
    groups = node.attributes["groups"]
    if is_product(node, types, source.strides):
        _product(builder, types, places, epilogue, packed=packed)
        return
    if packed:
        packed_kernel = k.PackedOperand(weights.slot)
        builder.direct(count, (inner, outer), geometry, (packed_kernel, source, target), epilogue)
        return
    each, step = outer // groups, weights.strides[0]
    operands = (
        k.Operand(weights.slot, weights.offset, (0, each * step, step, kernel.dtype.block_bytes)),
        _grouped(source, inner),
        _grouped(target, each),
    )
    if epilogue is not None:
        more = tuple([_grouped(one, each) for one in epilogue.operands])
        epilogue = epilogue._replace(operands=more)
    builder.convolution((count, groups), (inner, each), geometry, operands, epilogue)


def _grouped(operand: k.Operand, channels: int) -> k.Operand:
    """Cut the channels of an operand [n, c, h, w] into groups."""
    strides = (0,) * (4 - len(operand.strides)) + tuple(operand.strides)
    image, plane, *rest = strides
    return operand._replace(strides=(image, channels * plane, plane, *rest))


def _geometry_of(node: Node, types: Sequence[TensorType]) -> k.Geometry:
    """Return the geometry of windows; in one dimension, of images of one row."""
    given = dict(node.attributes)
    window = given["kernel"] if node.op in POOLS else types[0].shape[2:]
    image, result = types[-1].shape[-len(window) :], node.type.shape[-len(window) :]
    stride, spread, padding = (
        steps(given, name, len(window), default)
        for name, default in (("stride", 1), ("dilation", 1), ("padding", 0))
    )
    parts = ((image, 1), (window, 1), (stride, 1), (spread, 1), (padding, 0), (result, 1))
    pairs = [(fill,) * (2 - len(window)) + tuple(part) for part, fill in parts]
    narrow = FORMS[types[-1].dtype.name], 0 if node.op in POOLS else FORMS[types[0].dtype.name]
    return k.Geometry(*pairs)._replace(narrow=narrow)


def is_product(node: Node, types: Sequence[TensorType], strides: Strides) -> bool:
    """True if a node is a product of images as rows and kernels as columns: the only window is the
    data of an image, which is contiguous. `strides`: those of the data."""
    if node.op != "conv_2d" or node.attributes["groups"] != 1 or node.type.shape[2:] != (1, 1):
        return False
    if any(one.dtype is not F32 for one in types):
        return False
    geometry, image = _geometry_of(node, types), TensorType(types[1].dtype, types[1].shape[1:])
    whole = geometry.image == geometry.window and geometry.padding == (0, 0)
    return whole and in_one_piece(image, strides[1:])


def is_direct(node: Node, types: Sequence[TensorType], strides: Strides) -> bool:
    """True if a node convolves with a kernel in its packed form, if it has one, and gains by it.
    `strides`: those of the data."""
    if node.op != "conv_2d" or node.attributes["groups"] != 1 or any(one.dtype is not F32 for one in types):
        return False
    geometry = direct_geometry(_geometry_of(node, types), types[0].shape[1], strides[-2:])
    if geometry is None or not node.type.size:
        return False
    outer, places = types[0].shape[0], prod(geometry.result)
    gain = SINGLE_GAIN if geometry.taps == 1 and geometry.step == (1, 1) else WINDOWS_GAIN
    return gain * _filled(outer) > _filled(places)


def _filled(count: int) -> float:
    """Return the part of panels that so many columns fill."""
    return count / (-(-count // PANEL_COLUMNS) * PANEL_COLUMNS)


def _product(
    builder: k.ProgramBuilder,
    types: Sequence[TensorType],
    places: Sequence[k.Operand],
    epilogue: k.Elementwise | None,
    *,
    packed: bool,
) -> None:
    """Append a product of images as rows and kernels as columns."""
    (kernel, data), (weights, source, target) = types, places
    rows, columns = data.shape[0], kernel.shape[0]
    left = source._replace(strides=(source.strides[0], 4))
    right: k.PackedOperand | k.StoredOperand = k.PackedOperand(weights.slot)
    if not packed:
        right = k.StoredOperand(weights.slot, weights.offset, (weights.strides[0],), k.Stored.F32)
    if epilogue is not None:
        more = [one._replace(strides=((0,) * 4 + tuple(one.strides))[-4:-2]) for one in epilogue.operands]
        epilogue = epilogue._replace(operands=tuple(more))
    result = target._replace(strides=(4 * columns, 4))
    builder.gemm(rows, columns, kernel.size // columns, left, right, result, (), epilogue)


def _pool(
    builder: k.ProgramBuilder,
    node: Node,
    type: TensorType,
    places: Sequence[k.Operand],
    epilogue: k.Elementwise | None,
) -> None:
    (source, target), count = places, len(node.attributes["kernel"])
    lead = type.ndim - count
    kind = k.Windowing.MEAN if node.attributes["average"] else k.Windowing.LARGEST
    geometry = _geometry_of(node, [type])
    sizes = (1,) * (1 - lead) + type.shape[:lead]

    def planes(operand: k.Operand) -> k.Operand:
        strides = (0,) * (type.ndim - len(operand.strides)) + tuple(operand.strides)
        added = (0,) * (2 - count)
        return operand._replace(strides=(*strides[:lead], *added, *strides[lead:]))

    if epilogue is not None:
        epilogue = epilogue._replace(operands=tuple([planes(one) for one in epilogue.operands]))
    operands = planes(source), None, planes(target)
    builder.windows(kind, sizes[:-1], sizes[-1], geometry, operands, epilogue)
