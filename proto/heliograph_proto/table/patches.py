"""Rows: vision's rarer ops, and the gradients of windows."""

from __future__ import annotations

from heliograph_proto.rules import patches
from heliograph_proto.table.row import EXACT, PRODUCT_TOLERANCE, Attribute, Op

_STEPS = tuple(Attribute(name, "integers", ()) for name in ("stride", "padding", "dilation"))
_CHANNELS = Attribute("channels", "integer")

ROWS: tuple[Op, ...] = (
    Op(
        "conv_3d", ("kernel", "data"), "window", patches.conv_3d,
        "The convolution, [n oc, od, oh, ow], of data [n channels, d, h, w] with a kernel "
        "[oc channels, kd, kh, kw], in f32.",
        (_CHANNELS, *_STEPS), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "col2im_1d", ("x",), "window", patches.col2im_1d,
        "Signals [channels, (t - 1) stride + k - 2 padding], the sum of the columns [t, channels k], each "
        "`stride` further on, without `padding` at both ends.",
        (_CHANNELS, Attribute("stride", "integer", 1), Attribute("padding", "integer", 0)), (), 1e-6,
    ),
    Op(
        "win_part", ("x",), "move", patches.win_part,
        "x [h, w, c] cut into square windows, [windows, window, window, c], with zeros at the far ends.",
        (Attribute("window", "integer"),), (), EXACT,
    ),
    Op(
        "win_unpart", ("x",), "move", patches.win_unpart,
        "Windows [windows, window, window, c] put together to [height, width, c], without what is too much.",
        (Attribute("height", "integer"), Attribute("width", "integer")), (), EXACT,
    ),
    Op(
        "get_rel_pos", ("x",), "move", patches.get_rel_pos,
        "[n, n, c], where element [i, j] is row n - 1 + i - j of x [2 n - 1, c].", (), (), EXACT,
    ),
    Op(
        "add_rel_pos", ("x", "columns", "rows"), "move", patches.add_rel_pos,
        "x [b, h w, k k], seen as [b, h, w, k, k], plus rows [b, h, w, k, 1] and columns [b, h, w, 1, k].",
        (), (0,), 1e-6,
    ),
    Op(
        "im2col_back", ("gradient", "kernel"), "window", patches.im2col_back,
        "The gradient of im2col with respect to data of `shape`: the sum of what windows give it, in f32.",
        (Attribute("shape", "integers"), *_STEPS), (), 1e-6,
    ),
    Op(
        "pool_2d_back", ("gradient", "x"), "window", patches.pool_2d_back,
        "The gradient of pool_2d at x: to the first largest element of each window, or its mean, in f32.",
        (Attribute("kernel", "integers"), *_STEPS[:2], Attribute("average", "boolean", False)), (), 1e-6,
    ),
)  # fmt: skip
