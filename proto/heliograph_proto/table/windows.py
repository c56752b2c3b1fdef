"""Rows: the ops of vision."""

from __future__ import annotations

from heliograph_proto.rules import windows
from heliograph_proto.table.row import EXACT, PRODUCT_TOLERANCE, Attribute, Op
from heliograph_proto.types import F32

_STEPS = tuple(Attribute(name, "integers", ()) for name in ("stride", "padding", "dilation"))
_POOL = (Attribute("kernel", "integers"), *_STEPS[:2], Attribute("average", "boolean", False))
_STRIDE = Attribute("stride", "integer", 1)
_DTYPE = Attribute("dtype", "dtype", F32)

ROWS: tuple[Op, ...] = (
    Op(
        "im2col", ("kernel", "data"), "window", windows.im2col,
        "The windows of data [n, c, h, w] that a kernel [oc, c, kh, kw] sees, as rows [n, oh, ow, c kh kw]; "
        "or of one dimension.", (*_STEPS, _DTYPE), tolerance=1e-6,
    ),
    Op(
        "im2col_3d", ("kernel", "data"), "window", windows.im2col_3d,
        "As im2col of data [n channels, d, h, w] and a kernel [oc channels, kd, kh, kw]: [n od, oh, ow, k].",
        (Attribute("channels", "integer"), *_STEPS, _DTYPE), tolerance=1e-6,
    ),
    Op(
        "conv_2d", ("kernel", "data"), "window", windows.conv_2d,
        "The convolution, [n, oc, oh, ow], of data [n, c, h, w] with a kernel [oc, c, kh, kw], in f32.",
        _STEPS, tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_2d_dw", ("kernel", "data"), "window", windows.conv_2d_dw,
        "The convolution of each channel of data [n, c, h, w] with its own kernel [c, 1, kh, kw], in f32.",
        _STEPS, tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_transpose_1d", ("kernel", "data"), "window", windows.conv_transpose_1d,
        "The transposed convolution, [oc, (l - 1) stride + k], of data [c, l] with a kernel [c, oc, k].",
        (_STRIDE,), tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "conv_transpose_2d", ("kernel", "data"), "window", windows.conv_transpose_2d,
        "The transposed convolution of data [n, c, h, w] with a kernel [c, oc, kh, kw], in f32.",
        (_STRIDE,), tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        "pool_1d", ("x",), "window", windows.pool_1d,
        "The largest element of each window of `kernel` in a row, or its mean, f32; padding does not count.",
        _POOL, tolerance=1e-6,
    ),
    Op(
        "pool_2d", ("x",), "window", windows.pool_2d,
        "The largest element of each window of x [.., h, w], or its mean, f32; the mean counts padding as 0.",
        _POOL, tolerance=1e-6,
    ),
    Op(
        "upscale", ("x",), "window", windows.upscale,
        "x [.., h, w] at another `shape`: `mode` 0 the nearest element before; in h and w 1 linear, 2 cubic; "
        "linear and antialiased: a triangle over all elements that become one.",
        (Attribute("shape", "integers"), Attribute("mode", "integer", 0),
         Attribute("align_corners", "boolean", False), Attribute("antialias", "boolean", False)),
        tolerance=1e-6,
    ),
    Op(
        "pad", ("x",), "move", windows.pad,
        "x between zeros, `left` and `right` along each dimension; or, circular, between copies of itself.",
        (Attribute("left", "integers"), Attribute("right", "integers"),
         Attribute("circular", "boolean", False)), tolerance=EXACT,
    ),
    Op(
        "pad_reflect_1d", ("x",), "move", windows.pad_reflect_1d,
        "Rows between their mirror images, without the edge itself.",
        (Attribute("left", "integer"), Attribute("right", "integer")), tolerance=EXACT,
    ),
    Op(
        "roll", ("x",), "move", windows.roll,
        "x moved by `shifts` along each dimension; what leaves at one end enters at the other.",
        (Attribute("shifts", "integers"),), tolerance=EXACT,
    ),
)  # fmt: skip
