"""Rows and rules of further vision ops: volumes, signals, attention windows, gradients."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops import windows as rules
from heliograph_proto.ops.products import accumulated
from heliograph_proto.ops.row import EXACT, PRODUCT_TOLERANCE, Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    PLAIN,
    Attributes,
    Types,
    require_kind,
    require_one_dtype,
    require_within,
)
from heliograph_proto.types import TensorType


def conv_3d(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [oc channels, kd, kh, kw] and data [n channels, d, h, w] give [n oc, od, oh, ow]."""
    kernel, data = types
    dtype = accumulated(types)
    channels = attributes["channels"]
    require_within("channels", channels, 1)
    if not kernel.ndim == data.ndim == 4:
        raise InvalidGraphError(f"operands are {kernel} and {data}; four dimensions needed")
    if kernel.shape[0] % channels or data.shape[0] % channels:
        raise InvalidGraphError(f"kernel {kernel} and data {data} do not have {channels} channels")
    sizes = rules.window_sizes(attributes, data.shape[1:], kernel.shape[1:])
    return TensorType(dtype, (data.shape[0] // channels * (kernel.shape[0] // channels), *sizes))


def col2im_1d(types: Types, attributes: Attributes) -> TensorType:
    """Columns [t, channels k] give [channels, (t - 1) stride + k - 2 padding]."""
    (x,) = types
    require_kind(types, FLOATS)
    channels, stride, padding = (attributes[name] for name in ("channels", "stride", "padding"))
    require_within("channels", channels, 1)
    require_within("stride", stride, 1)
    require_within("padding", padding, 0)
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] < 1 or x.shape[1] % channels:
        raise InvalidGraphError(f"columns are {x}; [t, {channels} k] needed, and at least one")
    length = (x.shape[0] - 1) * stride + x.shape[1] // channels - 2 * padding
    if length < 1:
        raise InvalidGraphError(f"columns {x} with stride {stride}: a padding of {padding} leaves nothing")
    return TensorType(x.dtype, (channels, length))


def win_part(types: Types, attributes: Attributes) -> TensorType:
    """[h, w, c] gives [windows, window, window, c]."""
    (x,) = types
    require_kind(types, PLAIN)
    if x.ndim != 3:
        raise InvalidGraphError(f"operand {x}; [h, w, c] needed")
    window = attributes["window"]
    require_within("window", window, 1)
    count = -(-x.shape[0] // window) * -(-x.shape[1] // window)
    return TensorType(x.dtype, (count, window, window, x.shape[2]))


def win_unpart(types: Types, attributes: Attributes) -> TensorType:
    """[windows, window, window, c] gives [height, width, c]."""
    (x,) = types
    require_kind(types, PLAIN)
    height, width = attributes["height"], attributes["width"]
    require_within("height", height, 0)
    require_within("width", width, 0)
    if x.ndim != 4 or x.shape[1] != x.shape[2] or x.shape[1] < 1:
        raise InvalidGraphError(f"operand {x}; [windows, window, window, c] needed")
    window = x.shape[1]
    count = -(-height // window) * -(-width // window)
    if count != x.shape[0]:
        raise InvalidGraphError(f"{x} to {height} x {width}: {count} windows of {window} needed")
    return TensorType(x.dtype, (height, width, x.shape[3]))


def get_rel_pos(types: Types, attributes: Attributes) -> TensorType:
    """[2 n - 1, c] gives [n, n, c]."""
    (x,) = types
    require_kind(types, PLAIN)
    if x.ndim != 2 or x.shape[0] % 2 == 0:
        raise InvalidGraphError(f"operand {x}; [2 n - 1, c] needed")
    size = (x.shape[0] + 1) // 2
    return TensorType(x.dtype, (size, size, x.shape[1]))


def add_rel_pos(types: Types, attributes: Attributes) -> TensorType:
    """Scores [b, h w, k k], columns and rows [b, h, w, k]."""
    x, columns, rows = types
    require_kind(types, FLOATS)
    require_one_dtype(types)
    if columns.shape != rows.shape or columns.ndim != 4:
        raise InvalidGraphError(f"columns {columns} and rows {rows}; [b, h, w, k] of both needed")
    batch, height, width, size = columns.shape
    if x.shape != (batch, height * width, size * size):
        raise InvalidGraphError(f"scores {x}; {[batch, height * width, size * size]} needed")
    return x


def im2col_back(types: Types, attributes: Attributes) -> TensorType:
    """Gradients [n, *windows, c k] and the kernel [oc, c, *k] give data of `shape` [n, c,
    *sizes]."""
    gradient, kernel = types
    dtype = accumulated(types)
    shape = tuple(attributes["shape"])
    for size in shape:
        require_within("shape", size, 0)
    data = TensorType(dtype, shape)
    forward = rules.im2col((kernel, data), {**attributes, "dtype": dtype})
    if forward.shape != gradient.shape:
        raise InvalidGraphError(f"gradient {gradient}: im2col of {shape} gives {[*forward.shape]}")
    return data


def pool_2d_back(types: Types, attributes: Attributes) -> TensorType:
    """Gradients [.., oh, ow] of pool_2d and its operand x [.., h, w] give x's shape."""
    gradient, x = types
    dtype = accumulated(types)
    forward = rules.pool_2d((x,), attributes)
    if forward.shape != gradient.shape:
        raise InvalidGraphError(f"gradient {gradient}: pool_2d of {x} gives {[*forward.shape]}")
    return TensorType(dtype, x.shape)


_STEPS = tuple(Attribute(name, "integers", ()) for name in ("stride", "padding", "dilation"))
_CHANNELS = Attribute("channels", "integer")

ROWS: tuple[Op, ...] = (
    Op(
        "conv_3d", ("kernel", "data"), "window", conv_3d,
        "The convolution, [n oc, od, oh, ow], of data [n channels, d, h, w] with a kernel "
        "[oc channels, kd, kh, kw], in f32.",
        (_CHANNELS, *_STEPS), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "col2im_1d", ("x",), "window", col2im_1d,
        "Signals [channels, (t - 1) stride + k - 2 padding], the sum of the columns [t, channels k], each "
        "shifted by `stride`, without `padding` at both ends.",
        (_CHANNELS, Attribute("stride", "integer", 1), Attribute("padding", "integer", 0)), (), 1e-6,
    ),
    Op(
        "win_part", ("x",), "move", win_part,
        "x [h, w, c] cut into square windows, [windows, window, window, c], zero-padded at the far ends.",
        (Attribute("window", "integer"),), (), EXACT,
    ),
    Op(
        "win_unpart", ("x",), "move", win_unpart,
        "Windows [windows, window, window, c] joined to [height, width, c], without the padding.",
        (Attribute("height", "integer"), Attribute("width", "integer")), (), EXACT,
    ),
    Op(
        "get_rel_pos", ("x",), "move", get_rel_pos,
        "[n, n, c], where element [i, j] is row n - 1 + i - j of x [2 n - 1, c].", (), (), EXACT,
    ),
    Op(
        "add_rel_pos", ("x", "columns", "rows"), "move", add_rel_pos,
        "x [b, h w, k k], seen as [b, h, w, k, k], plus rows [b, h, w, k, 1] and columns [b, h, w, 1, k].",
        (), (0,), 1e-6,
    ),
    Op(
        "im2col_back", ("gradient", "kernel"), "window", im2col_back,
        "The gradient of im2col with respect to data of `shape`: the sum over windows, in f32.",
        (Attribute("shape", "integers"), *_STEPS), (), 1e-6,
    ),
    Op(
        "pool_2d_back", ("gradient", "x"), "window", pool_2d_back,
        "The gradient of pool_2d at x, in f32: for each window's first largest element, or its mean.",
        (Attribute("kernel", "integers"), *_STEPS[:2], Attribute("average", "boolean", False)), (), 1e-6,
    ),
)  # fmt: skip
