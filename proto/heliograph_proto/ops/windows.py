"""Rows and rules of vision ops: windows over the last dimensions, and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.products import accumulated
from heliograph_proto.ops.row import EXACT, PRODUCT_TOLERANCE, Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    LARGEST,
    PLAIN,
    WEIGHTS,
    Attributes,
    Types,
    require_kind,
    require_rank,
    require_within,
)
from heliograph_proto.types import F32, DType, TensorType


def steps(attributes: Attributes, name: str, count: int, default: int) -> tuple[int, ...]:
    """Return an attribute with one number per dimension; if empty, the default for each."""
    given: tuple[int, ...] = tuple(attributes.get(name, ())) or (default,) * count
    if len(given) != count:
        raise InvalidGraphError(f"{name} is {given}; {count} numbers needed, one for each dimension")
    for value in given:
        require_within(name, value, default)
    return given


def window_sizes(attributes: Attributes, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """Return the number of windows along each dimension. Raises if none fits."""
    count = len(sizes)
    stride, dilation = steps(attributes, "stride", count, 1), steps(attributes, "dilation", count, 1)
    padding = steps(attributes, "padding", count, 0)
    found = []
    for size, width, step, pad, spread in zip(sizes, kernel, stride, padding, dilation, strict=True):
        reach = spread * (width - 1) + 1
        if size < 1 or width < 1 or size + 2 * pad < reach:
            raise InvalidGraphError(f"a window of {reach} does not fit in {size} with {pad} on each side")
        found.append((size + 2 * pad - reach) // step + 1)
    return tuple(found)


def _require_dimensions(types: Types, *allowed: int) -> None:
    ranks = {found.ndim for found in types}
    if len(ranks) > 1 or not ranks <= set(allowed):
        named, needed = " and ".join(map(str, types)), " or ".join(map(str, allowed))
        raise InvalidGraphError(f"operands are {named}; {needed} dimensions needed")


def _require_channels(kernel: int, data: int, types: Types) -> None:
    if kernel != data:
        raise InvalidGraphError(f"kernel {types[0]} and data {types[1]}: {kernel} and {data} channels")


def im2col(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [oc, c, *k] and data [n, c, *sizes] give [n, *windows, c * k]; one or two sizes.

    Only the kernel's shape matters, so it may be blocks.
    """
    kernel, data = types
    require_kind([kernel], WEIGHTS)
    require_kind([data], FLOATS)
    _require_dimensions(types, 3, 4)
    _require_channels(kernel.shape[1], data.shape[1], types)
    windows = window_sizes(attributes, data.shape[2:], kernel.shape[2:])
    return TensorType(_float(attributes), (data.shape[0], *windows, math.prod(kernel.shape[1:])))


def im2col_3d(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [oc * c, *k] and data [n * c, d, h, w] give [n * od, oh, ow, c * k], as im2col."""
    kernel, data = types
    require_kind([kernel], WEIGHTS)
    require_kind([data], FLOATS)
    _require_dimensions(types, 4)
    channels = attributes["channels"]
    require_within("channels", channels, 1)
    if kernel.shape[0] % channels or data.shape[0] % channels:
        raise InvalidGraphError(f"kernel {kernel} and data {data} do not have {channels} channels")
    depth, *rest = window_sizes(attributes, data.shape[1:], kernel.shape[1:])
    rows = data.shape[0] // channels * depth
    return TensorType(_float(attributes), (rows, *rest, channels * math.prod(kernel.shape[1:])))


def _float(attributes: Attributes) -> DType:
    found: DType = attributes["dtype"]
    if not found.is_float:
        raise InvalidGraphError(f"dtype is {found}; a float is needed")
    return found


def conv_2d(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [oc, c / groups, kh, kw] and data [n, c, h, w] give [n, oc, oh, ow]."""
    kernel, data = types
    dtype = accumulated(types)
    _require_dimensions(types, 4)
    groups = attributes["groups"]
    require_within("groups", groups, 1)
    if kernel.shape[0] % groups:
        raise InvalidGraphError(f"kernel {kernel}: {kernel.shape[0]} channels are not {groups} equal groups")
    _require_channels(kernel.shape[1] * groups, data.shape[1], types)
    windows = window_sizes(attributes, data.shape[2:], kernel.shape[2:])
    return TensorType(dtype, (data.shape[0], kernel.shape[0], *windows))


def conv_2d_dw(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [c, 1, kh, kw] and data [n, c, h, w] give [n, c, oh, ow]."""
    kernel, data = types
    dtype = accumulated(types)
    _require_dimensions(types, 4)
    _require_channels(kernel.shape[0], data.shape[1], types)
    if kernel.shape[1] != 1:
        raise InvalidGraphError(f"kernel {kernel}: dimension 1 must be 1, a kernel for each channel")
    windows = window_sizes(attributes, data.shape[2:], kernel.shape[2:])
    return TensorType(dtype, (*data.shape[:2], *windows))


def conv_transpose_1d(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [c, oc, k] and data [c, l] give [oc, (l - 1) * stride + k]."""
    kernel, data = types
    dtype = accumulated(types)
    if (kernel.ndim, data.ndim) != (3, 2):
        raise InvalidGraphError(f"operands are {kernel} and {data}; [c, oc, k] and [c, l] needed")
    _require_channels(kernel.shape[0], data.shape[0], types)
    return TensorType(dtype, (kernel.shape[1], *_spread(attributes, data.shape[1:], kernel.shape[2:])))


def conv_transpose_2d(types: Types, attributes: Attributes) -> TensorType:
    """Kernel [c, oc, kh, kw] and data [n, c, h, w] give [n, oc, (h - 1) * stride + kh, ...]."""
    kernel, data = types
    dtype = accumulated(types)
    _require_dimensions(types, 4)
    _require_channels(kernel.shape[0], data.shape[1], types)
    sizes = _spread(attributes, data.shape[2:], kernel.shape[2:])
    return TensorType(dtype, (data.shape[0], kernel.shape[1], *sizes))


def _spread(attributes: Attributes, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    require_within("stride", attributes["stride"], 1)
    if min(*sizes, *kernel) < 1:
        raise InvalidGraphError(f"a kernel {tuple(kernel)} over {tuple(sizes)}: no size may be 0")
    pairs = zip(sizes, kernel, strict=True)
    return tuple((size - 1) * attributes["stride"] + width for size, width in pairs)


def pool_1d(types: Types, attributes: Attributes) -> TensorType:
    """[.., n] to [.., windows], f32; f64 stays."""
    return _pool(types, attributes, 1)


def pool_2d(types: Types, attributes: Attributes) -> TensorType:
    """[.., h, w] to [.., oh, ow], f32; f64 stays."""
    return _pool(types, attributes, 2)


def _pool(types: Types, attributes: Attributes, count: int) -> TensorType:
    (x,) = types
    dtype = accumulated(types)
    require_rank(x, count)
    kernel = attributes["kernel"]
    if len(kernel) != count:
        raise InvalidGraphError(f"kernel is {kernel}; {count} numbers needed")
    for width in kernel:
        require_within("kernel", width, 1)
    sizes = window_sizes(attributes, x.shape[-count:], kernel)
    return TensorType(dtype, (*x.shape[:-count], *sizes))


def upscale(types: Types, attributes: Attributes) -> TensorType:
    """[.., h, w] to `shape`, of as many dimensions."""
    (x,) = types
    require_kind(types, FLOATS)
    require_rank(x, 2)
    shape = tuple(attributes["shape"])
    require_within("mode", attributes["mode"], 0, 2)
    if attributes["antialias"] and attributes["mode"] != 1:
        raise InvalidGraphError(f"antialias with mode {attributes['mode']}; it belongs to mode 1")
    if len(shape) != x.ndim or min(*shape, *x.shape) < 1 or max(shape) > LARGEST:
        raise InvalidGraphError(f"upscale of {x} to {shape}: as many sizes needed, from 1 to {LARGEST}")
    return TensorType(x.dtype, shape)


def pad(types: Types, attributes: Attributes) -> TensorType:
    """Each dimension grows by its numbers in `left` and `right`."""
    (x,) = types
    require_kind(types, PLAIN)
    sizes = []
    for name in ("left", "right"):
        if len(attributes[name]) != x.ndim:
            raise InvalidGraphError(
                f"{name} is {attributes[name]}; a number for each dimension of {x} needed"
            )
        for value in attributes[name]:
            require_within(name, value, 0)
    for size, left, right in zip(x.shape, attributes["left"], attributes["right"], strict=True):
        if attributes["circular"] and not size and left + right:
            raise InvalidGraphError(f"a circular pad of {x}: it has an empty dimension")
        sizes.append(left + size + right)
    return TensorType(x.dtype, tuple(sizes))


def pad_reflect_1d(types: Types, attributes: Attributes) -> TensorType:
    """Rows grow on both sides, by fewer elements than they have."""
    (x,) = types
    require_kind(types, PLAIN)
    require_rank(x, 1)
    for name in ("left", "right"):
        require_within(name, attributes[name], 0, min(LARGEST, x.shape[-1] - 1))
    return TensorType(x.dtype, (*x.shape[:-1], attributes["left"] + x.shape[-1] + attributes["right"]))


def roll(types: Types, attributes: Attributes) -> TensorType:
    """A shift for each dimension, of any size and sign."""
    (x,) = types
    require_kind(types, PLAIN)
    if len(attributes["shifts"]) != x.ndim:
        raise InvalidGraphError(f"shifts are {attributes['shifts']}; one for each dimension of {x} needed")
    return x


_STEPS = tuple(Attribute(name, "integers", ()) for name in ("stride", "padding", "dilation"))
_POOL = (Attribute("kernel", "integers"), *_STEPS[:2], Attribute("average", "boolean", False))
_STRIDE = Attribute("stride", "integer", 1)
_DTYPE = Attribute("dtype", "dtype", F32)

ROWS: tuple[Op, ...] = (
    Op(
        "im2col", ("kernel", "data"), "window", im2col,
        "The windows of data [n, c, h, w] for a kernel [oc, c, kh, kw], as rows [n, oh, ow, c kh kw]; also "
        "in one dimension.", (*_STEPS, _DTYPE), tolerance=1e-6,
    ),
    Op(
        "im2col_3d", ("kernel", "data"), "window", im2col_3d,
        "As im2col, of data [n channels, d, h, w] and a kernel [oc channels, kd, kh, kw]: [n od, oh, ow, k].",
        (Attribute("channels", "integer"), *_STEPS, _DTYPE), tolerance=1e-6,
    ),
    Op(
        "conv_2d", ("kernel", "data"), "window", conv_2d,
        "The convolution, [n, oc, oh, ow], of data [n, c, h, w] with a kernel [oc, c / groups, kh, kw], in "
        "f32; each of `groups` equal parts of oc reads its own part of c.",
        (*_STEPS, Attribute("groups", "integer", 1)), tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_2d_dw", ("kernel", "data"), "window", conv_2d_dw,
        "The convolution of each channel of data [n, c, h, w] with its own kernel [c, 1, kh, kw], in f32.",
        _STEPS, tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_transpose_1d", ("kernel", "data"), "window", conv_transpose_1d,
        "The transposed convolution, [oc, (l - 1) stride + k], of data [c, l] with a kernel [c, oc, k].",
        (_STRIDE,), tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_transpose_2d", ("kernel", "data"), "window", conv_transpose_2d,
        "The transposed convolution of data [n, c, h, w] with a kernel [c, oc, kh, kw], in f32.",
        (_STRIDE,), tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "pool_1d", ("x",), "window", pool_1d,
        "The largest element of each window of `kernel` in a row, or its mean, f32; padding does not count.",
        _POOL, tolerance=1e-6,
    ),
    Op(
        "pool_2d", ("x",), "window", pool_2d,
        "The largest element of each window of x [.., h, w], or its mean, f32; the mean counts padding as 0.",
        _POOL, tolerance=1e-6,
    ),
    Op(
        "upscale", ("x",), "window", upscale,
        "x [.., h, w] resampled to `shape`: `mode` 0 takes the nearest element before; in h and w, 1 is "
        "linear and 2 cubic; linear with antialias weights all elements that become one by a triangle.",
        (Attribute("shape", "integers"), Attribute("mode", "integer", 0),
         Attribute("align_corners", "boolean", False), Attribute("antialias", "boolean", False)),
        tolerance=1e-6,
    ),
    Op(
        "pad", ("x",), "move", pad,
        "x padded by `left` and `right` along each dimension, with zeros or, if circular, copies of itself.",
        (Attribute("left", "integers"), Attribute("right", "integers"),
         Attribute("circular", "boolean", False)), tolerance=EXACT,
    ),
    Op(
        "pad_reflect_1d", ("x",), "move", pad_reflect_1d,
        "Rows padded with their mirror images, without the edge element.",
        (Attribute("left", "integer"), Attribute("right", "integer")), tolerance=EXACT,
    ),
    Op(
        "roll", ("x",), "move", roll,
        "x shifted cyclically by `shifts` along each dimension.",
        (Attribute("shifts", "integers"),), tolerance=EXACT,
    ),
)  # fmt: skip
