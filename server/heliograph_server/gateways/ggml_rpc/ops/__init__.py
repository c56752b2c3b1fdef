"""The rule of each of ggml's ops, by its number on the wire."""

from __future__ import annotations

from heliograph_server.gateways.ggml_rpc.ops import (
    elementwise,
    moves,
    products,
    recurrent,
    rows,
    training,
    windows,
)
from heliograph_server.gateways.ggml_rpc.ops.rule import Call, Rule

#: ggml's ops in the order of their numbers.
NAMES = [
    "none",
    "dup",
    "add",
    "add_id",
    "add1",
    "acc",
    "sub",
    "mul",
    "div",
    "sqr",
    "sqrt",
    "log",
    "sin",
    "cos",
    "sum",
    "sum_rows",
    "cumsum",
    "mean",
    "argmax",
    "count_equal",
    "repeat",
    "repeat_back",
    "concat",
    "silu_back",
    "norm",
    "rms_norm",
    "rms_norm_back",
    "group_norm",
    "l2_norm",
    "mul_mat",
    "mul_mat_id",
    "out_prod",
    "scale",
    "set",
    "cpy",
    "cont",
    "reshape",
    "view",
    "permute",
    "transpose",
    "get_rows",
    "get_rows_back",
    "set_rows",
    "diag",
    "diag_mask_inf",
    "diag_mask_zero",
    "soft_max",
    "soft_max_back",
    "rope",
    "rope_back",
    "clamp",
    "conv_transpose_1d",
    "im2col",
    "im2col_back",
    "im2col_3d",
    "col2im_1d",
    "conv_2d",
    "conv_3d",
    "conv_2d_dw",
    "conv_transpose_2d",
    "pool_1d",
    "pool_2d",
    "pool_2d_back",
    "upscale",
    "pad",
    "pad_reflect_1d",
    "roll",
    "arange",
    "timestep_embedding",
    "argsort",
    "top_k",
    "leaky_relu",
    "tri",
    "fill",
    "flash_attn_ext",
    "flash_attn_back",
    "ssm_conv",
    "ssm_scan",
    "win_part",
    "win_unpart",
    "get_rel_pos",
    "add_rel_pos",
    "rwkv_wkv6",
    "gated_linear_attn",
    "rwkv_wkv7",
    "solve_tri",
    "gated_delta_net",
    "lightning_indexer",
    "dsv4_hc_comb",
    "dsv4_hc_pre",
    "dsv4_hc_post",
    "unary",
    "map_custom1",
    "map_custom2",
    "map_custom3",
    "custom",
    "cross_entropy_loss",
    "cross_entropy_loss_back",
    "opt_step_adamw",
    "opt_step_sgd",
    "glu",
]
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
#: Ops that compute nothing: their result is memory of another tensor.
VIEWS = frozenset(_NUMBERS[name] for name in ("none", "reshape", "view", "permute", "transpose"))
RULES: dict[int, Rule] = {
    _NUMBERS[name]: rule
    for module in (elementwise, moves, products, recurrent, rows, training, windows)
    for name, rule in module.RULES.items()
}

#: Ops whose results are sums over their sources, which may have no elements.
SUMS = frozenset({"mul_mat", "out_prod", "conv_2d", "conv_3d"})


def zeros(call: Call) -> int:
    """Return the result of such an op without elements to sum."""
    return call.node("fill", shape=call.want.shape, value=0.0, dtype=call.want.dtype)


__all__ = ["NAMES", "RULES", "SUMS", "VIEWS", "Call", "Rule", "zeros"]
