"""Our ops and ggml's: how ggml makes each, and the data types for which its CPU backend computes it.

`node_of` gives the node, or raises NotTaken with the reason for which ggml has no such case. ggml ends the
process where it meets what it does not take, so its conditions are asked for here first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers import ggml_makers as make
from peers import ggml_makers_rest as rest
from peers import ggml_pairs as pairs
from peers.ggml import MAX_DIMENSIONS, Tensor
from peers.ggml_call import BLOCKS, EVERY, FLOATS, INDICES, Call, Maker, NotTaken


@dataclass(frozen=True)
class Counterpart:
    """How ggml makes one of our ops."""

    make: Maker
    #: For each operand the types that ggml takes; the last ones stand for further operands too.
    takes: tuple[str, ...] = ("f32",)
    #: Whether it takes operands of these types, with a result of this one, together.
    together: Callable[[Sequence[str], str], bool] = pairs.any_together


def node_of(call: Call, op: str) -> Tensor:
    """ggml's node for one of ours. Raises NotTaken, or KeyError where ggml has no such op."""
    counterpart = COUNTERPARTS[op]
    for place in range(len(call)):
        if call.type(place) not in counterpart.takes[min(place, len(counterpart.takes) - 1)].split():
            raise NotTaken(f"ggml does not take {call.type(place)} as operand {place}")
    types, result = [call.type(place) for place in range(len(call))], call.result.dtype.name
    if not counterpart.together(types, result):
        raise NotTaken(f"ggml does not take {' with '.join(types)} for {result}")
    return made(counterpart, call)


def made(counterpart: Counterpart, call: Call) -> Tensor:
    """ggml's node, of whatever data types. Raises NotTaken for shapes and attributes that it lacks."""
    shapes = [*map(call.shape, range(len(call))), call.result.shape]
    if any(len(shape) > MAX_DIMENSIONS for shape in shapes):
        raise NotTaken(f"ggml has {MAX_DIMENSIONS} dimensions")
    if any(0 in shape for shape in shapes):
        raise NotTaken("ggml promises nothing of empty tensors")
    return counterpart.make(call)


UNARY = (
    "abs sgn neg step tanh elu relu sigmoid gelu gelu_quick silu hardswish hardsigmoid exp expm1 softplus "
    "gelu_erf floor ceil round trunc sqr sqrt log sin cos"
)
COUNTERPARTS: dict[str, Counterpart] = {
    **{name: Counterpart(make.plain(name), (FLOATS,)) for name in UNARY.split()},
    **{name: Counterpart(make.binary(name), (FLOATS,), pairs.alike_or_f32) for name in ("sub", "mul", "div")},
    "add": Counterpart(make.binary("add"), (f"{FLOATS} {BLOCKS}", FLOATS), pairs.alike_or_f32),
    **{
        name: Counterpart(make.gated(name), (FLOATS,))
        for name in ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick")
    },
    "swiglu_oai": Counterpart(make.gated_with("swiglu_oai", "alpha", "limit")),
    "swiglu_clamp": Counterpart(make.gated_with("swiglu_clamp", "limit"), ("f32 f16",)),
    "xielu": Counterpart(make.plain("xielu", "alpha_n", "alpha_p", "beta", "eps"), (FLOATS,)),
    "scale": Counterpart(make.plain("scale_bias", "scale", "bias"), ("f32 bf16",)),
    "clamp": Counterpart(make.plain("clamp", "min", "max"), ("f32 f16",)),
    "leaky_relu": Counterpart(
        lambda call: call.node("leaky_relu", call.leaf(), call["slope"], False), ("f32 f16",)
    ),
    "cast": Counterpart(make.cast, (EVERY,), pairs.converted),
    "cpy": Counterpart(make.cpy, (EVERY,), pairs.converted),
    "arange": Counterpart(make.arange),
    "fill": Counterpart(make.fill, together=pairs.filled),
    "norm": Counterpart(make.plain("norm", "eps")),
    "rms_norm": Counterpart(make.plain("rms_norm", "eps")),
    "l2_norm": Counterpart(make.plain("l2_norm", "eps")),
    "group_norm": Counterpart(make.group_norm),
    "soft_max": Counterpart(make.soft_max, ("f32", "f32 f16", "f32")),
    "flash_attn_ext": Counterpart(
        make.flash_attn_ext, ("f32 f16", f"{FLOATS} {BLOCKS}", f"{FLOATS} {BLOCKS}", "f32 f16", "f32")
    ),
    "argmax": Counterpart(make.argmax),
    "argsort": Counterpart(make.argsort),
    "top_k": Counterpart(make.plain("top_k", "k")),
    "sum": Counterpart(make.plain("sum"), (FLOATS,)),
    "sum_rows": Counterpart(make.plain("sum_rows")),
    "mean": Counterpart(make.plain("mean")),
    "cumsum": Counterpart(make.plain("cumsum")),
    "count_equal": Counterpart(make.count_equal, ("i32",)),
    "mul_mat": Counterpart(make.mul_mat, (f"{FLOATS} {BLOCKS}", f"{FLOATS} q8_0"), pairs.multiplied),
    "mul_mat_id": Counterpart(
        make.mul_mat_id, (f"{FLOATS} {BLOCKS}", f"{FLOATS} q8_0", INDICES), pairs.multiplied
    ),
    "out_prod": Counterpart(make.plain("out_prod"), (f"f32 f16 {BLOCKS}", "f32")),
    "get_rows": Counterpart(make.get_rows, (f"{FLOATS} i32 {BLOCKS}", INDICES)),
    "set_rows": Counterpart(make.set_rows, (f"{FLOATS} i32 {BLOCKS}", "f32 f16", INDICES), pairs.set_in),
    "add1": Counterpart(make.plain("add1"), (f"{FLOATS} {BLOCKS}", FLOATS), pairs.alike_or_f32),
    "add_id": Counterpart(make.add_id, ("f32", "f32", INDICES)),
    "acc": Counterpart(make.block("acc")),
    "set": Counterpart(make.block("set"), ("f32 i32",), pairs.alike),
    "diag": Counterpart(make.plain("diag")),
    "diag_mask_inf": Counterpart(make.plain("diag_mask_inf", "n_past")),
    "diag_mask_zero": Counterpart(make.plain("diag_mask_zero", "n_past")),
    "tri": Counterpart(make.plain("tri", "type")),
    "repeat": Counterpart(make.repeat, ("f32 f16 bf16 i32 i16",)),
    "broadcast_to": Counterpart(make.repeat, ("f32 f16 bf16 i32 i16",)),
    "cont": Counterpart(make.plain("cont"), (EVERY,)),
    "concat": Counterpart(make.concat, (EVERY,), pairs.alike),
    "permute": Counterpart(make.permute, (EVERY,)),
    "pad": Counterpart(make.pad),
    "pad_reflect_1d": Counterpart(make.plain("pad_reflect_1d", "left", "right")),
    "roll": Counterpart(make.roll),
    "rope": Counterpart(make.rope, ("f32 f16", "i32", "f32")),
    "timestep_embedding": Counterpart(make.plain("timestep_embedding", "dim", "max_period")),
    "im2col": Counterpart(make.im2col, (f"{FLOATS} f64 {BLOCKS}", "f32 f16"), pairs.windowed),
    "im2col_3d": Counterpart(make.im2col_3d, (f"{FLOATS} f64 {BLOCKS}", "f32"), pairs.windowed),
    "conv_2d": Counterpart(make.convolution("conv_2d_direct"), ("f32 f16", "f32")),
    "conv_2d_dw": Counterpart(make.convolution("conv_2d_dw_direct"), ("f32 f16", "f32")),
    "conv_transpose_1d": Counterpart(make.conv_transpose_1d, ("f32 f16", "f32")),
    "conv_transpose_2d": Counterpart(make.conv_transpose_2d, ("f32 f16", "f32")),
    "pool_1d": Counterpart(make.pool_1d, ("f32 f16",)),
    "pool_2d": Counterpart(make.pool_2d, ("f32 f16",)),
    "upscale": Counterpart(make.upscale),
    "repeat_back": Counterpart(rest.repeat_back),
    "silu_back": Counterpart(make.plain("silu_back"), ("f32 f16",)),
    "rms_norm_back": Counterpart(make.plain("rms_norm_back", "eps")),
    "soft_max_back": Counterpart(rest.soft_max_back),
    "rope_back": Counterpart(make.rope_back, ("f32 f16", "i32", "f32")),
    "get_rows_back": Counterpart(rest.get_rows_back, ("f32 f16", INDICES)),
    "cross_entropy_loss": Counterpart(make.plain("cross_entropy_loss")),
    "cross_entropy_loss_back": Counterpart(make.plain("cross_entropy_loss_back")),
    "opt_step_adamw": Counterpart(rest.opt_step_adamw),
    "opt_step_sgd": Counterpart(rest.opt_step_sgd),
    "im2col_back": Counterpart(rest.im2col_back, ("f32", "f32 f16")),
    "pool_2d_back": Counterpart(rest.pool_2d_back),
    "ssm_conv": Counterpart(make.plain("ssm_conv")),
    "ssm_scan": Counterpart(rest.ssm_scan, (*("f32",) * 6, INDICES)),
    "rwkv_wkv6": Counterpart(make.plain("rwkv_wkv6")),
    "rwkv_wkv7": Counterpart(rest.rwkv_wkv7),
    "gated_linear_attn": Counterpart(make.plain("gated_linear_attn", "scale")),
    "gated_delta_net": Counterpart(rest.gated_delta_net),
    "solve_tri": Counterpart(rest.solve_tri),
    "conv_3d": Counterpart(rest.conv_3d, ("f32 f16", "f32")),
    "col2im_1d": Counterpart(rest.col2im_1d, (FLOATS,)),
    "win_part": Counterpart(make.plain("win_part", "window")),
    "win_unpart": Counterpart(rest.win_unpart),
    "get_rel_pos": Counterpart(rest.get_rel_pos, ("f16",)),
    "add_rel_pos": Counterpart(make.plain("add_rel_pos")),
    "lightning_indexer": Counterpart(rest.lightning_indexer, ("f32", f"{FLOATS} {BLOCKS}", "f32", "f32 f16")),
    "dsv4_hc_comb": Counterpart(rest.dsv4_hc_comb),
    "dsv4_hc_pre": Counterpart(rest.dsv4_hc_pre),
    "dsv4_hc_post": Counterpart(rest.dsv4_hc_post),
}
