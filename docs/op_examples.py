"""An example of each op, for the pages that `op_pages.py` writes.

`f32`, `i32` and the like make constants of a graph. `count(2, 3)` has the elements 0, 1, 2 and so
on as f32; `ramp(2, 3)` has them divided by their number, so that they are below 1.
"""

from __future__ import annotations

#: The operand of ops of one float, where it has a range.
_OPERANDS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log1p", "log2", "log10"), "f32([0.25, 1, 8])"),
    **dict.fromkeys(("acos", "asin", "atanh"), "f32([-0.5, 0, 0.5])"),
    "acosh": "f32([1, 2, 3])",
    **dict.fromkeys(("isnan", "isinf", "isfinite"), "f32([1, np.inf, np.nan])"),
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "f32([-1.5, 0.5, 2.7])"),
    "logical_not": "true([True, False])",
    "bitwise_invert": "i32([0, 1, -8])",
}
_OF_ONE = [
    "neg",
    "abs",
    "sgn",
    "sqr",
    "sqrt",
    "rsqrt",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "relu",
    "elu",
    "silu",
    "gelu",
    "gelu_erf",
    "gelu_quick",
    "softplus",
    "hardswish",
    "hardsigmoid",
    "step",
    "floor",
    "ceil",
    "round",
    "trunc",
    "logical_not",
    "isnan",
    "isinf",
    "isfinite",
    "log2",
    "log10",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "signbit",
    "bitwise_invert",
]
_OF_TWO = [
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "floor_divide",
    "remainder",
    "maximum",
    "minimum",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "atan2",
    "hypot",
    "logaddexp",
    "copysign",
    "nextafter",
]
_OF_TRUTHS = ["logical_and", "logical_or", "logical_xor"]
_OF_INTEGERS = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]
_REDUCTIONS = ["reduce_sum", "reduce_mean", "reduce_prod", "reduce_max", "reduce_min"]
_GATES = ["reglu", "geglu", "geglu_erf", "geglu_quick", "swiglu", "swiglu_oai"]
_OF_ROWS = [
    "norm",
    "rms_norm",
    "l2_norm",
    "soft_max",
    "sum_rows",
    "mean",
    "cumsum",
    "cumprod",
    "argmax",
    "argsort",
]

#: Expressions by op.
EXAMPLES: dict[str, str] = {
    **{op: f"hg.ops.{op}({_OPERANDS.get(op, 'f32([-1, 0.5, 2])')})" for op in _OF_ONE},
    **{op: f"hg.ops.{op}(f32([7, -7, 2]), f32([2, 2, 2]))" for op in _OF_TWO},
    "pow": "hg.ops.pow(f32([2, 9, 5]), f32([3, 0.5, 0]))",
    **{op: f"hg.ops.{op}(true([True, True, False]), true([True, False, False]))" for op in _OF_TRUTHS},
    **{op: f"hg.ops.{op}(i32([12, 10, -8]), i32([10, 2, 1]))" for op in _OF_INTEGERS},
    **{op: f"hg.ops.{op}(f32([[1, 2, 3], [4, 5, 6]]), axes=(1,))" for op in _REDUCTIONS},
    **{op: f"hg.ops.{op}(f32([[1, -2, 3, 4]]))" for op in _GATES},
    **{op: f"hg.ops.{op}(f32([[3, 1, 2], [0, 5, 4]]))" for op in _OF_ROWS},
    # elementwise
    "scale": "hg.ops.scale(f32([1, 2, 3]), scale=10.0, bias=1.0)",
    "clamp": "hg.ops.clamp(f32([-3, 0.5, 3]), min=-1.0, max=1.0)",
    "leaky_relu": "hg.ops.leaky_relu(f32([-2, 3]), slope=0.1)",
    "cast": "hg.ops.cast(f32([-1.5, 2.7]), dtype='i32')",
    "bitcast": "hg.ops.bitcast(f32([1, -2]), dtype='i32')",
    "xielu": "hg.ops.xielu(f32([-1, 1]), alpha_n=0.8, alpha_p=0.8)",
    "swiglu_clamp": "hg.ops.swiglu_clamp(f32([[1, 9, 3, 4]]), limit=2.0)",
    "where": "hg.ops.where(true([True, False]), f32([1, 2]), f32([10, 20]))",
    "add1": "hg.ops.add1(f32([1, 2, 3]), f32([10]))",
    "relu_back": "hg.ops.relu_back(f32([1, 1, 1]), f32([-1, 0, 1]))",
    "silu_back": "hg.ops.silu_back(f32([1, 1, 1]), f32([-1, 0, 1]))",
    # moves and views
    "cpy": "hg.ops.cpy(f32([[1, 2], [3, 4]]), i32([0, 0, 0, 0]))",
    "cont": "hg.ops.cont(hg.ops.permute(count(2, 3), axes=(1, 0)))",
    "concat": "hg.ops.concat(f32([[1], [2]]), f32([[3, 4], [5, 6]]), axis=1)",
    "reshape": "hg.ops.reshape(count(6), shape=(2, -1))",
    "permute": "hg.ops.permute(count(2, 3), axes=(1, 0))",
    "broadcast_to": "hg.ops.broadcast_to(f32([[1], [2]]), shape=(2, 3))",
    "slice": "hg.ops.slice(count(3, 4), start=(1, 0), stop=(3, 4), step=(1, 2))",
    "repeat": "hg.ops.repeat(f32([1, 2]), shape=(2, 4))",
    "repeat_back": "hg.ops.repeat_back(count(2, 4), shape=(2,))",
    "acc": "hg.ops.acc(f32([1, 1, 1, 1]), f32([5, 6]), start=(1,))",
    "set": "hg.ops.set(f32([1, 1, 1, 1]), f32([5, 6]), start=(0,), step=(2,))",
    "diag": "hg.ops.diag(f32([1, 2]))",
    "diag_mask_inf": "hg.ops.diag_mask_inf(f32([[1, 2], [3, 4]]))",
    "diag_mask_zero": "hg.ops.diag_mask_zero(f32([[1, 2], [3, 4]]))",
    "tri": "hg.ops.tri(f32([[1, 2], [3, 4]]), type=1)",
    "pad": "hg.ops.pad(f32([1, 2]), left=(1,), right=(2,))",
    "pad_reflect_1d": "hg.ops.pad_reflect_1d(f32([1, 2, 3]), left=1, right=2)",
    "roll": "hg.ops.roll(f32([1, 2, 3, 4]), shifts=(1,))",
    "win_part": "hg.ops.win_part(count(2, 3, 1), window=2)",
    "win_unpart": "hg.ops.win_unpart(count(2, 2, 2, 1), height=2, width=3)",
    "get_rel_pos": "hg.ops.get_rel_pos(f32([[10], [20], [30]]))",
    "add_rel_pos": "hg.ops.add_rel_pos(count(1, 2, 4), ramp(1, 2, 1, 2), ramp(1, 2, 1, 2))",
    "philox": "hg.ops.philox(i64(7), i64(0), shape=(3,), dtype='f32')",
    # gathers
    "get_rows": "hg.ops.get_rows(count(3, 2), i32([2, 0]))",
    "get_rows_back": "hg.ops.get_rows_back(f32([[1, 2], [3, 4]]), i32([2, 2]), rows=3)",
    "set_rows": "hg.ops.set_rows(count(3, 2), f32([[9, 9]]), i32([1]))",
    "add_rows": "hg.ops.add_rows(count(3, 2), f32([[1, 1], [1, 1]]), i32([1, 1]))",
    "mul_rows": "hg.ops.mul_rows(count(3, 2), f32([[2, 2], [5, 5]]), i32([1, 1]))",
    "max_rows": "hg.ops.max_rows(count(3, 2), f32([[9, 0]]), i32([1]))",
    "min_rows": "hg.ops.min_rows(count(3, 2), f32([[9, 0]]), i32([1]))",
    "add_id": "hg.ops.add_id(f32([[1, 1], [1, 1]]), f32([[10, 20], [30, 40]]), i32([1, 0]))",
    # reductions and searches
    "sum": "hg.ops.sum(f32([[1, 2], [3, 4]]))",
    "count_equal": "hg.ops.count_equal(i32([1, 2, 3]), i32([1, 0, 3]))",
    "top_k": "hg.ops.top_k(f32([3, 1, 2]), k=2)",
    "searchsorted": "hg.ops.searchsorted(f32([1, 2, 4]), f32([0, 2, 9]))",
    # products
    "matmul": "hg.ops.matmul(f32([[1, 2], [3, 4]]), f32([[1], [10]]))",
    "mul_mat": "hg.ops.mul_mat(f32([[1, 0], [1, 1], [2, 3]]), f32([[10, 20]]))",
    "mul_mat_id": "hg.ops.mul_mat_id(count(2, 2, 2), f32([[[1, 1]]]), i32([[1]]))",
    "out_prod": "hg.ops.out_prod(f32([[1, 2]]), f32([[10, 20]]))",
    "solve_tri": "hg.ops.solve_tri(f32([[2, 0], [1, 4]]), f32([[2], [9]]))",
    # rows
    "group_norm": "hg.ops.group_norm(count(2, 1, 2), groups=1)",
    "rope": "hg.ops.rope(f32([[[1, 0, 1, 0]]]), i32([1]), n_dims=4)",
    "rope_back": "hg.ops.rope_back(f32([[[1, 0, 1, 0]]]), i32([1]), n_dims=4)",
    "timestep_embedding": "hg.ops.timestep_embedding(f32([0, 1]), dim=4)",
    "rms_norm_back": "hg.ops.rms_norm_back(f32([[1, 0]]), f32([[3, 4]]))",
    "soft_max_back": "hg.ops.soft_max_back(f32([[1, 0]]), f32([[0.25, 0.75]]))",
    "cross_entropy_loss": "hg.ops.cross_entropy_loss(f32([[2, 0]]), f32([[1, 0]]))",
    "cross_entropy_loss_back": "hg.ops.cross_entropy_loss_back(f32(1), f32([[2, 0]]), f32([[1, 0]]))",
    "opt_step_sgd": "hg.ops.opt_step_sgd(f32([1, 2]), f32([10, 20]), f32([0.1, 0]))",
    "opt_step_adamw": (
        "hg.ops.opt_step_adamw(f32([1]), f32([2]), f32([0]), f32([0]), "
        "f32([0.1, 0.9, 0.99, 1e-8, 0, 10, 100]))"
    ),
    "dsv4_hc_comb": "hg.ops.dsv4_hc_comb(ramp(1, 8), f32([1, 1, 1]), ramp(8), eps=1e-6, iterations=4)",
    "dsv4_hc_pre": "hg.ops.dsv4_hc_pre(count(1, 2, 3), f32([[1, 10]]))",
    "dsv4_hc_post": "hg.ops.dsv4_hc_post(f32([[1, 2]]), count(1, 2, 2), f32([[1, 10]]))",
    # attention and recurrences
    "flash_attn_ext": "hg.ops.flash_attn_ext(ramp(1, 1, 1, 2), ramp(1, 1, 3, 2), count(1, 1, 3, 2))",
    "flash_attn_paged": (
        "hg.ops.flash_attn_paged(ramp(1, 1, 1, 2), ramp(3, 1, 1, 2), count(3, 1, 1, 2), "
        "f32([[0, 0]]), i32([[2, 0]]))"
    ),
    "lightning_indexer": (
        "hg.ops.lightning_indexer(ramp(1, 1, 2, 2), ramp(1, 3, 1, 2), f32([[[[1, 2]]]]), "
        "f32([[[[0, 0, 0]]]]))"
    ),
    "ssm_conv": "hg.ops.ssm_conv(count(1, 1, 4), f32([[1, 10]]))",
    "ssm_scan": (
        "hg.ops.ssm_scan(ramp(1, 1, 1, 2), f32([[[[1]]]]), f32([[[0.5]]]), f32([[-1]]), "
        "f32([[[[1, 2]]]]), f32([[[[1, 1]]]]), i32([0]))"
    ),
    "rwkv_wkv6": (
        "hg.ops.rwkv_wkv6(f32([[[1, 2]]]), f32([[[3, 4]]]), f32([[[1, 1]]]), f32([[1, 1]]), "
        "f32([[[0.5, 0.5]]]), f32([[0, 0, 0, 0]]))"
    ),
    "rwkv_wkv7": (
        "hg.ops.rwkv_wkv7(f32([[[1, 1]]]), f32([[[1, 1]]]), f32([[[1, 2]]]), f32([[[3, 4]]]), "
        "f32([[[0, 0]]]), f32([[[0, 0]]]), f32([[0, 0, 0, 0]]))"
    ),
    "gated_linear_attn": (
        "hg.ops.gated_linear_attn(f32([[[1, 2]]]), f32([[[3, 4]]]), f32([[[1, 1]]]), f32([[[1, 1]]]), "
        "f32([[0, 0, 0, 0]]))"
    ),
    "gated_delta_net": (
        "hg.ops.gated_delta_net(f32([[[[1, 1]]]]), f32([[[[1, 0]]]]), f32([[[[3, 4]]]]), f32([[[[0]]]]), "
        "f32([[[[1]]]]), f32([[[[0, 0], [0, 0]]]]))"
    ),
    # windows
    "im2col": "hg.ops.im2col(count(1, 1, 2), count(1, 1, 4))",
    "im2col_back": "hg.ops.im2col_back(f32([[[1, 1], [1, 1], [1, 1]]]), count(1, 1, 2), shape=(1, 1, 4))",
    "im2col_3d": "hg.ops.im2col_3d(count(1, 1, 1, 2), count(1, 1, 1, 3), channels=1)",
    "conv_2d": "hg.ops.conv_2d(f32([[[[1, 10]]]]), count(1, 1, 2, 3))",
    "conv_2d_dw": "hg.ops.conv_2d_dw(f32([[[[1]]], [[[10]]]]), count(1, 2, 1, 2))",
    "conv_3d": "hg.ops.conv_3d(f32([[[[1, 10]]]]), count(1, 1, 2, 3), channels=1)",
    "conv_transpose_1d": "hg.ops.conv_transpose_1d(f32([[[1, 10]]]), f32([[1, 2]]), stride=2)",
    "conv_transpose_2d": "hg.ops.conv_transpose_2d(f32([[[[1, 10]]]]), f32([[[[1, 2]]]]))",
    "col2im_1d": "hg.ops.col2im_1d(f32([[1, 2], [3, 4]]), channels=1)",
    "pool_1d": "hg.ops.pool_1d(f32([1, 5, 2, 4]), kernel=(2,), stride=(2,))",
    "pool_2d": "hg.ops.pool_2d(count(2, 4), kernel=(2, 2), stride=(2, 2), average=True)",
    "pool_2d_back": "hg.ops.pool_2d_back(f32([[1, 2]]), count(1, 4), kernel=(1, 2), stride=(1, 2))",
    "upscale": "hg.ops.upscale(f32([[1, 3]]), shape=(1, 4), mode=1)",
    # sources and variables
    "fill": "hg.ops.fill(shape=(2,), value=7.0, dtype='f32', graph=g)",
    "arange": "hg.ops.arange(start=0.0, stop=1.0, step=0.25, graph=g)",
    "assign": "hg.ops.assign(g.variable('v', (2,), 'f32'), f32([1, 2]))",
}

_SAME = "any; the result has the same"
_BROADCAST = "any that broadcast as in NumPy"
#: Shapes where the rule of the row has no words for them, by the name of the rule.
SHAPES: dict[str, str] = {
    "same": _SAME,
    "to_bool": _SAME,
    "scale": _SAME,
    "clamp": _SAME,
    "xielu": _SAME,
    "cast": _SAME,
    "bitcast": _SAME,
    "same_floats": "equal ones; the result has the same",
    "mixed": _BROADCAST,
    "binary": _BROADCAST,
    "comparison": _BROADCAST,
    "where": _BROADCAST,
    "reduction": "any, to that without `axes`, or with `keepdims` with 1 in their places",
    "block": "a tensor, and a block of its rank that lies in it; the result has the tensor's",
    "rows_with_eps": "[.., n]; the result has the same",
    "rms_norm_back": "[.., n], equal ones; the result has the same",
    "soft_max_back": "[.., n], equal ones; the result has the same",
    "cumsum": "[.., n]; the result has the same",
    "last_axis_index": "[.., n] to [..]",
    "cpy": "any, and a target with as many elements; the result has the target's",
    "fill": "`shape`",
    "arange": "[n], by the attributes",
    "philox": "two numbers, to `shape`",
    "assign": "equal ones; the result has the same",
    "swiglu_clamp": "[.., 2 n] to [.., n], or two equal ones",
    "swiglu_oai": "[.., 2 n] to [.., n], or two equal ones",
    "combined_rows": "[.., n, d], rows [.., r, d] and indices [.., r]; the result has the first",
    "set_rows": "[.., n, d], rows [.., r, d] and indices [.., r]; the result has the first",
    "soft_max": "[.., n], a mask that broadcasts to it, sinks [heads]; the result has the first",
    "diag_mask": "[.., n, m]; the result has the same",
    "tri": "[.., n, n]; the result has the same",
    "add1": "any, and one element; the result has the first",
    "add_id": "[.., t, used, n], biases [e, n] and ids [.., t, used]; the result has the first",
    "rope": "x [.., tokens, heads, d], positions [tokens] or [4, tokens], factors [pairs]; to that of x",
    "concat": "equal but for `axis`, whose sizes add up",
    "reshape": "any to `shape`, of as many elements; one size may be -1",
    "permute": "any, to its sizes in the order `axes`",
    "slice_": "any, to as many elements as the slices have",
    "get_rows": "rows [.., n, d] and indices [.., r] give [.., r, d]",
    "count_equal": "equal ones, to a scalar",
    "searchsorted": "[n] and any; the result has the second",
    "opt_step_sgd": "equal ones, and two numbers; the result has the first",
    "opt_step_adamw": "four equal ones, and seven numbers, to [3, *shape]",
    "group_norm": "[.., channels, h, w]; the result has the same",
    "roll": _SAME,
}  # fmt: skip
