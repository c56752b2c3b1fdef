"""Rules of conversions between element types, narrow ones too."""

from __future__ import annotations

from functools import cache

import numpy as np
from onnx import TensorProto

import heliograph as hg
from heliograph.lowerings import narrow_floats
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import NARROW, Coded, Item, element_of, encode
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

_UNSIGNED_ZERO = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)


@cache
def format_of(element: int) -> narrow_floats.Format:
    """Return the format of a narrow float."""
    codes = 16 if element == TensorProto.FLOAT4E2M1 else 256
    with np.errstate(invalid="ignore"):
        values = np.arange(codes, dtype=np.uint8).view(NARROW[element].numpy).astype(np.float32)
    is_scale = element == TensorProto.FLOAT8E8M0
    return narrow_floats.Format(values, 0 if is_scale else codes // 2, element in _UNSIGNED_ZERO)


def widened(node: Node, place: int, dtype: str = "f32") -> hg.Value:
    """Return an input of any element type as a data type."""
    item = node.item(place)
    if isinstance(item, (Coded, np.ndarray)) and (element := element_of(item)) in NARROW:
        codes = item.codes if isinstance(item, Coded) else node.graph.constant(encode(item))
        if NARROW[element].bits:
            return cast(codes, dtype)
        return narrow_floats.from_codes(codes, format_of(element), dtype)
    return cast(node.value(place), dtype)


def converted(node: Node, x: hg.Value, element: int, *, saturate: bool = True) -> Item:
    """Return a value as an element type."""
    narrow = NARROW.get(element)
    if narrow is None:
        return _plain(x, node.dtype(element))
    if narrow.bits:
        return Coded(narrow_floats.wrap_integer(x, narrow.bits, signed=narrow.storage == "i8"), element)
    if element == TensorProto.FLOAT8E8M0:
        rounding = node.string("round_mode", "up")
        return Coded(narrow_floats.to_exponents(x, rounding=rounding, saturate=saturate), element)
    return Coded(narrow_floats.to_codes(x, format_of(element), saturate=saturate), element)


def _plain(x: hg.Value, dtype: str) -> hg.Value:
    # Floats become small integers by way of i32, so that what does not fit wraps around.
    if x.dtype.is_float and dtype in ("i8", "u8", "i16", "u16"):
        x = hg.astype(x, "i32")
    return cast(x, dtype)


@rule("Cast", "CastLike")
def _convert(node: Node) -> Item:
    """Convert to the type of an attribute, or of another tensor."""
    item = node.item(0)
    element = node.int("to") if node.op == "Cast" else element_of(node.item(1))
    source = element_of(item)
    if source == element:
        return item
    through = "f32" if source in NARROW and not NARROW[source].bits else NARROW_INTEGERS.get(source, "")
    x = widened(node, 0, through) if through else node.value(0)
    return converted(node, x, element, saturate=bool(node.int("saturate", 1)))


#: The data types that narrow integers are converted through.
NARROW_INTEGERS = {element: one.storage for element, one in NARROW.items() if one.bits}


@rule("BitCast")
def _reinterpret(node: Node) -> Item:
    """Keep the bits."""
    x, target = node.value(0), node.dtype(node.int("to"))
    if "bool" in (x.dtype.name, target):
        # A truth has the byte 0 or 1.
        return cast(x, target)
    return x if x.dtype.name == target else hg.ops.bitcast(x, dtype=target)
