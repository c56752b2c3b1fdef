"""How ggml makes our ops of training, of recurrent models, of vision's rarer kinds, and DeepSeek's."""

from __future__ import annotations

import ctypes

from peers.ggml import MAX_DIMENSIONS, Tensor, library, reversed_shape
from peers.ggml_call import Call, NotTaken
from peers.ggml_makers import plain, steps

#: The mixes of four streams.
DEEPSEEK_MIXES = 24
#: The most elements that ggml's CPU takes in one step.
LANES = 64
FourSizes = ctypes.c_int64 * MAX_DIMENSIONS


# Training


def repeat_back(call: Call) -> Tensor:
    return call.node("repeat_back", call.leaf(), call.graph.weight("f32", call["shape"]))


def soft_max_back(call: Call) -> Tensor:
    return call.node("soft_max_ext_back", call.leaf(0), call.leaf(1), call["scale"], 0.0)


def get_rows_back(call: Call) -> Tensor:
    if len(call.shape()) > 2:
        raise NotTaken("gradients of more than one table")
    like = call.graph.weight("f32", call.result.shape)
    return call.node("get_rows_back", call.leaf(0), call.leaf(1, "i32"), like)


def opt_step_sgd(call: Call) -> Tensor:
    return call.node("opt_step_sgd", _parameter(call.leaf(0)), call.leaf(1), call.leaf(2))


def opt_step_adamw(call: Call) -> Tensor:
    """ggml writes the moments where they are; they are read after the step, since it comes before."""
    rank, shape = len(call.shape()), (1, *call.shape())
    weights, gradient, m, v = (call.leaf(place, shape=shape) for place in range(4))
    step = call.node("opt_step_adamw", _parameter(weights), gradient, m, v, call.leaf(4))
    return call.node("concat", call.node("concat", step, m, rank), v, rank)


def _parameter(weights: Tensor) -> Tensor:
    """ggml's optimizers step where a tensor is marked so."""
    library().ggml_set_param(weights.address)
    return weights


def im2col_back(call: Call) -> Tensor:
    plane, sizes = len(call.shape(1)) == 4, FourSizes(*reversed_shape(call["shape"]))
    numbers = steps(call, 2) if plane else [n for one in steps(call, 1) for n in (one, 0)]
    return call.node("im2col_back", call.leaf(0), call.leaf(1), sizes, *numbers, plane)


def pool_2d_back(call: Call) -> Tensor:
    kernel, (s0, s1, p0, p1) = reversed(call["kernel"]), steps(call, 2, ("stride", "padding"))
    return call.node(
        "pool_2d_back",
        call.leaf(0),
        call.leaf(1),
        int(call["average"]),
        *kernel,
        s0,
        s1,
        float(p0),
        float(p1),
    )


# Recurrent models


def _require_tokens(call: Call, tokens: int) -> None:
    if tokens < call["snapshots"]:
        raise NotTaken("ggml writes no snapshots from before the first token")


def rwkv_wkv7(call: Call) -> Tensor:
    if call.shape()[2] % LANES:
        raise NotTaken("ggml reads and writes past the end of heads of other widths")
    return plain("rwkv_wkv7")(call)


def ssm_scan(call: Call) -> Tensor:
    _require_tokens(call, call.shape(1)[1])
    return call.node("ssm_scan", *map(call.leaf, range(6)), call.leaf(6, "i32"), call["snapshots"])


def gated_delta_net(call: Call) -> Tensor:
    _require_tokens(call, call.shape(2)[1])
    return plain("gated_delta_net", "snapshots")(call)


def solve_tri(call: Call) -> Tensor:
    return call.node("solve_tri", call.leaf(0), call.leaf(1), True, True, False)


# Vision


def conv_3d(call: Call) -> Tensor:
    counts = [call.shape(place)[0] // call["channels"] for place in (1, 0)]
    return call.node("conv_3d_direct", call.leaf(0), call.leaf(1), *steps(call, 3), call["channels"], *counts)


def col2im_1d(call: Call) -> Tensor:
    return plain("col2im_1d", "stride", "channels", "padding")(call)


def win_unpart(call: Call) -> Tensor:
    return call.node("win_unpart", call.leaf(), call["width"], call["height"], call.shape()[1])


def get_rel_pos(call: Call) -> Tensor:
    return call.node("get_rel_pos", call.leaf(), *call.result.shape[:2])


# DeepSeek


def lightning_indexer(call: Call) -> Tensor:
    return call.node("lightning_indexer", call.leaf(0), call.leaf(1), call.leaf(2), call.leaf(3, "f16"))


def dsv4_hc_pre(call: Call) -> Tensor:
    x, weights = call.leaf(0), call.leaf(1)
    if call["gated"]:
        return call.node("dsv4_hc_pre_gated", x, weights, call["scale"])
    if call["scale"] != 1:
        raise NotTaken("ggml scales what is gated alone")
    return call.node("dsv4_hc_pre", x, weights)


def dsv4_hc_post(call: Call) -> Tensor:
    return call.node("dsv4_hc_post", *map(call.leaf, range(3)), call.optional(3))


def dsv4_hc_comb(call: Call) -> Tensor:
    if call.shape()[1] != DEEPSEEK_MIXES:
        raise NotTaken("ggml has four streams")
    return plain("dsv4_hc_comb", "eps", "iterations")(call)
