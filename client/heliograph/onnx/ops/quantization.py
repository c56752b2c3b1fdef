"""Rules of linear quantization, per tensor, per axis and by blocks."""

from __future__ import annotations

from onnx import TensorProto

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, part
from heliograph.lowerings.windows import convolve
from heliograph.onnx.elements import NARROW, Item, element_of
from heliograph.onnx.node import Node
from heliograph.onnx.ops.casts import converted, widened
from heliograph.onnx.ops.convolutions import by_output, groups_of, window_of
from heliograph.onnx.rules import rule


def _limits(node: Node, element: int) -> tuple[float, float] | None:
    """The least and the largest integer of an element type; None for floats."""
    narrow = NARROW.get(element)
    name = narrow.storage if narrow else node.dtype(element)
    bits = narrow.bits if narrow else int(name[1:]) if name[0] in "iu" else 0
    if not bits:
        return None
    return (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if name[0] == "i" else (0.0, 2.0**bits - 1)


def _spread(v: hg.Value, like: hg.Value, axis: int, block: int) -> hg.Value:
    """Return a scale or zero point so that it broadcasts: one, one for each place along an axis, or
    one for each block there."""
    if v.ndim == 0 or (v.size == 1 and v.ndim <= 1):
        return hg.reshape(v, ())
    if v.ndim == 1 and not block:
        return hg.reshape(v, along(axis, like.ndim))
    if not block:
        block = -(-like.shape[axis] // v.shape[axis])
    block = min(block, like.shape[axis])
    return part(hg.repeat(v, block, axis=axis), axis, 0, like.shape[axis])


@rule("QuantizeLinear")
def _quantize(node: Node) -> Item:
    x, scale = node.value(0), node.value(1)
    axis, block = node.axis(node.int("axis", 1), max(x.ndim, 2)), node.int("block_size", 0)
    element = node.int("output_dtype", 0)
    if node.has(2):
        element = element_of(node.item(2))
    element = element or TensorProto.UINT8
    found = cast(x, "f32") / cast(_spread(scale, x, axis, block), "f32")
    limits = _limits(node, element)
    if limits is None:
        return converted(node, found, element, saturate=bool(node.int("saturate", 1)))
    found = hg.round(found)
    if node.has(2):
        found = found + _spread(widened(node, 2), x, axis, block)
    return converted(node, hg.clip(found, *limits), element)


@rule("DequantizeLinear")
def _dequantize(node: Node) -> Item:
    x, scale = widened(node, 0), node.value(1)
    axis, block = node.axis(node.int("axis", 1), max(x.ndim, 2)), node.int("block_size", 0)
    if node.has(2):
        x = x - _spread(widened(node, 2), x, axis, block)
    element = node.int("output_dtype", 0)
    target = node.dtype(element) if element else scale.dtype.name
    return cast(x * cast(_spread(scale, x, axis, block), "f32"), target)


@rule("MatMulInteger")
def _matmul_integer(node: Node) -> Item:
    a, b = cast(node.value(0), "i32"), cast(node.value(1), "i32")
    if node.has(2):
        zero = cast(node.value(2), "i32")
        a = a - (hg.expand_dims(zero, axis=-1) if zero.ndim == 1 and zero.size > 1 else zero)
    if node.has(3):
        b = b - cast(node.value(3), "i32")
    return hg.matmul(a, b)


def _requantized(node: Node, y: hg.Value, scale: hg.Value, zero: int) -> Item:
    element = element_of(node.item(zero))
    limits = _limits(node, element)
    if limits is None:
        return converted(node, y / scale, element)
    found = hg.round(y / scale) + widened(node, zero)
    return converted(node, hg.clip(found, *limits), element)


@rule("QLinearMatMul")
def _quantized_matmul(node: Node) -> Item:
    a, b = widened(node, 0), widened(node, 3)
    a = (a - _rows(widened(node, 2))) * _rows(widened(node, 1))
    b = (b - widened(node, 5)) * widened(node, 4)
    return _requantized(node, hg.matmul(a, b), widened(node, 6), 7)


def _rows(v: hg.Value) -> hg.Value:
    return hg.expand_dims(v, axis=-1) if v.ndim == 1 and v.size > 1 else v


@rule("QLinearConv")
def _quantized_conv(node: Node) -> Item:
    x = widened(node, 0) - hg.reshape(widened(node, 2), ())
    weights = widened(node, 3)
    weights = weights - by_output(widened(node, 5), weights.ndim)
    window = window_of(node, x.shape[2:], weights.shape[2:])
    found = convolve(x, weights, window, groups_of(node, x, weights))
    if node.has(8):
        found = found + hg.reshape(widened(node, 8), along(1, found.ndim))
    scale = widened(node, 4) * hg.reshape(widened(node, 1), ())
    scale = hg.reshape(scale, along(1, found.ndim)) if scale.ndim else scale
    return _requantized(node, found * scale, hg.reshape(widened(node, 6), ()), 7)
