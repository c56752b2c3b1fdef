"""Rules of ops on windows: convolutions, pooling, resampling."""

from __future__ import annotations

from typing import Any

from heliograph_server.gateways.ggml_rpc.buffers import RefusedError
from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import F32, Call, Rule, plain

#: Bits beside the mode of resampling.
ALIGN_CORNERS, ANTIALIAS = 1 << 8, 1 << 9


def _steps(call: Call, count: int) -> dict[str, tuple[int, ...]]:
    """Stride, padding and dilation, for each of `count` dimensions."""
    names = ("stride", "padding", "dilation")
    return {name: call.integers(count * place, count) for place, name in enumerate(names)}


def convolution(op: str) -> Rule:
    def make(call: Call) -> Value:
        steps = _steps(call, 2)
        return call.node(op, call[0], _with_room(call, steps), **steps)

    return Rule(make, 2)


def _with_room(call: Call, steps: dict[str, tuple[int, ...]]) -> Value:
    """Return the data, with zeros behind it where the last windows pass its end: ggml's sizes of
    results round towards zero, so a window may not fit."""
    right = [0, 0]
    for place in range(2):
        kernel, size, windows = (
            shape[2 + place] for shape in (call.shape(0), call.shape(1), call.want.shape)
        )
        stride, padding, dilation = (steps[name][place] for name in ("stride", "padding", "dilation"))
        right[place] = max(0, (windows - 1) * stride + dilation * (kernel - 1) + 1 - size - 2 * padding)
    return call.node("pad", call[1], left=(0,) * 4, right=(0, 0, *right)) if any(right) else call[1]


def im2col(op: str) -> Rule:
    """In one or two dimensions; the first operand's shape, or the second's, is that of a kernel."""

    def make(call: Call) -> Value:
        steps, attributes = _steps(call, 2), dict[str, Any]()
        is_plane = call.integer(6) == 1
        if op == "im2col":
            attributes["dtype"] = call.want.dtype
        else:
            attributes["shape"] = call.want.shape if is_plane else call.want.shape[1:]
        if is_plane:
            return call.node(op, call[0], call[1], **steps, **attributes)
        line = {name: found[1:] for name, found in steps.items()}
        return call.node(op, call.of_rank(0, 3), call.of_rank(1, 3), **line, **attributes)

    return Rule(make, 2)


def _im2col_3d(call: Call) -> Value:
    """Of the kernel its three sizes matter; here it has one row of channels."""
    channels = call.integer(9)
    kernel = call.node("fill", shape=(channels, *call.shape(0)[1:]), value=0.0, dtype=F32)
    steps = _steps(call, 3)
    return call.node("im2col_3d", kernel, call[1], channels=channels, dtype=call.want.dtype, **steps)


def _conv_3d(call: Call) -> Value:
    return call.node("conv_3d", call[0], call[1], channels=call.integer(9), **_steps(call, 3))


def _is_mean(call: Call) -> bool:
    if call.integer(0) not in (0, 1):
        raise RefusedError(f"pooling of kind {call.integer(0)} is unknown here")
    return call.integer(0) == 1


def _pool_1d(call: Call) -> Value:
    kernel, stride, padding = (call.integers(place, 1) for place in (1, 2, 3))
    return call.node(
        "pool_1d", call[0], kernel=kernel, stride=stride, padding=padding, average=_is_mean(call)
    )


def _pool_2d(op: str, count: int) -> Rule:
    def make(call: Call) -> Value:
        kernel, stride, padding = (call.integers(place, 2) for place in (1, 3, 5))
        sources = [call[place] for place in range(count)]
        return call.node(op, *sources, kernel=kernel, stride=stride, padding=padding, average=_is_mean(call))

    return Rule(make, count)


def _upscale(call: Call) -> Value:
    mode = call.integer(0)
    return call.node(
        "upscale", call[0], shape=call.want.shape, mode=mode & 0xFF,
        align_corners=bool(mode & ALIGN_CORNERS), antialias=bool(mode & ANTIALIAS),
    )  # fmt: skip


def _win_unpart(call: Call) -> Value:
    height, width = call.want.shape[1:3]
    return call.node("win_unpart", call[0], height=height, width=width)


RULES: dict[str, Rule] = {
    "conv_2d": convolution("conv_2d"),
    "conv_2d_dw": convolution("conv_2d_dw"),
    "conv_3d": Rule(_conv_3d, 2),
    "conv_transpose_1d": plain("conv_transpose_1d", ranks=(3, 2), stride="i0"),
    "conv_transpose_2d": plain("conv_transpose_2d", 2, stride="i0"),
    "im2col": im2col("im2col"),
    "im2col_back": im2col("im2col_back"),
    "im2col_3d": Rule(_im2col_3d, 2),
    "col2im_1d": plain("col2im_1d", ranks=(2,), stride="i0", channels="i1", padding="i2"),
    "pool_1d": Rule(_pool_1d, 1),
    "pool_2d": _pool_2d("pool_2d", 1),
    "pool_2d_back": _pool_2d("pool_2d_back", 2),
    "upscale": Rule(_upscale, 1),
    "win_part": plain("win_part", ranks=(3,), window="i2"),
    "win_unpart": Rule(_win_unpart, 1),
    "get_rel_pos": plain("get_rel_pos", ranks=(2,)),
    "add_rel_pos": plain("add_rel_pos", ranks=(3, 4, 4)),
    "ssm_conv": plain("ssm_conv", ranks=(3, 2)),
}
