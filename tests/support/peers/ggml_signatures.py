"""The functions of ggml's C API that the peer calls, and their types, one letter each.

The first letter is the result's; parameters follow. `t` tensor, `c` context, `p` any other pointer or a
number of its size, `i` int32 or an enum, `u` uint32, `l` int64, `z` size_t, `f` float, `b` bool, `s` string,
`n` four int32 by address, `-` nothing.
"""

from __future__ import annotations

import ctypes

FourInts = ctypes.c_int32 * 4

LETTERS: dict[str, type | None] = {
    "t": ctypes.c_void_p,
    "c": ctypes.c_void_p,
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
    "b": ctypes.c_bool,
    "s": ctypes.c_char_p,
    "n": ctypes.POINTER(ctypes.c_int32),
    "-": None,
}

#: Makers of nodes whose parameters are the context and one tensor.
UNARY = (
    "abs argmax cont cos cumsum diag dup elu exp expm1 floor ceil gelu gelu_erf gelu_quick hardsigmoid "
    "hardswish log mean neg relu round sgn sigmoid silu sin soft_max softplus sqr sqrt step sum sum_rows "
    "tanh transpose trunc reglu geglu swiglu geglu_erf geglu_quick reglu_swapped geglu_swapped "
    "swiglu_swapped geglu_erf_swapped geglu_quick_swapped"
)
#: Makers of nodes whose parameters are the context and two tensors.
BINARY = (
    "add add1 sub mul div count_equal cpy get_rows mul_mat out_prod repeat repeat_back reshape silu_back "
    "reglu_split geglu_split swiglu_split geglu_erf_split geglu_quick_split ssm_conv "
    "cross_entropy_loss"
)
#: Other makers of nodes.
NODES: dict[str, str] = {
    "acc": "tcttzzzz",
    "add_cast": "tctti",
    "add_id": "tcttt",
    "add_rel_pos": "tcttt",
    "arange": "tcfff",
    "argsort": "tcti",
    "cast": "tcti",
    "clamp": "tctff",
    "col2im_1d": "tctiii",
    "concat": "tctti",
    "conv_2d_direct": "tcttiiiiii",
    "conv_2d_dw_direct": "tcttiiiiii",
    "conv_3d_direct": "tcttiiiiiiiiiiii",
    "conv_transpose_1d": "tcttiii",
    "conv_transpose_2d_p0": "tctti",
    "cross_entropy_loss_back": "tcttt",
    "diag_mask_inf": "tcti",
    "dsv4_hc_comb": "tctttfi",
    "dsv4_hc_post": "tctttt",
    "dsv4_hc_pre": "tctt",
    "dsv4_hc_pre_gated": "tcttf",
    "diag_mask_zero": "tcti",
    "fill": "tctf",
    "flash_attn_ext": "tcttttfff",
    "gated_delta_net": "tcttttttl",
    "gated_linear_attn": "tctttttf",
    "get_rel_pos": "tctii",
    "get_rows_back": "tcttt",
    "group_norm": "tctif",
    "im2col": "tcttiiiiiibi",
    "im2col_back": "tcttpiiiiiib",
    "im2col_3d": "tcttliiiiiiiiii",
    "interpolate": "tctllllu",
    "l2_norm": "tctf",
    "leaky_relu": "tctfb",
    "lightning_indexer": "tctttt",
    "mul_mat_id": "tcttt",
    "norm": "tctf",
    "opt_step_adamw": "tcttttt",
    "opt_step_sgd": "tcttt",
    "pad_ext": "tctiiiiiiii",
    "pad_ext_circular": "tctiiiiiiii",
    "pad_reflect_1d": "tctii",
    "permute": "tctiiii",
    "pool_1d": "tctiiii",
    "pool_2d": "tctiiiiiff",
    "pool_2d_back": "tcttiiiiiff",
    "rms_norm": "tctf",
    "rms_norm_back": "tcttf",
    "roll": "tctiiii",
    "rope_ext": "tctttiiiffffff",
    "rope_ext_back": "tctttiiiffffff",
    "rope_multi": "tctttiniiffffff",
    "rope_multi_back": "tctttiniiffffff",
    "rope_set_offset": "tti",
    "rwkv_wkv6": "tctttttt",
    "rwkv_wkv7": "tcttttttt",
    "scale_bias": "tctff",
    "set": "tcttzzzz",
    "set_rows": "tcttt",
    "soft_max_ext": "tcttff",
    "soft_max_ext_back": "tcttff",
    "solve_tri": "tcttbbb",
    "ssm_scan": "tctttttttl",
    "swiglu_clamp": "tcttf",
    "swiglu_oai": "tcttff",
    "timestep_embedding": "tctii",
    "top_k": "tcti",
    "tri": "tcti",
    "view_1d": "tctlz",
    "view_2d": "tctllzz",
    "view_3d": "tctlllzzz",
    "view_4d": "tctllllzzzz",
    "win_part": "tcti",
    "win_unpart": "tctiii",
    "xielu": "tctffff",
}
NODES |= dict.fromkeys(UNARY.split(), "tct") | dict.fromkeys(BINARY.split(), "tctt")

#: Everything that is not a maker of nodes.
REST: dict[str, str] = {
    "backend_alloc_ctx_tensors_from_buft": "pcp",
    "backend_buffer_free": "-p",
    "backend_cpu_buffer_type": "p",
    "backend_cpu_init": "p",
    "backend_cpu_set_n_threads": "-pi",
    "backend_free": "-p",
    "backend_graph_compute": "ipp",
    "backend_supports_op": "bpt",
    "backend_tensor_get": "-tpzz",
    "backend_tensor_set": "-tpzz",
    "blck_size": "li",
    "build_forward_expand": "-pt",
    "flash_attn_ext_add_sinks": "-tt",
    "free": "-c",
    "gallocr_alloc_graph": "bpp",
    "gallocr_free": "-p",
    "gallocr_get_buffer_size": "zpi",
    "gallocr_new": "pp",
    "gallocr_reserve": "bpp",
    "glu_op_name": "si",
    "graph_n_nodes": "ip",
    "graph_node": "tpi",
    "graph_overhead_custom": "zzb",
    "is_contiguous": "bt",
    "nbytes": "zt",
    "quantize_chunk": "zipplllp",
    "nelements": "lt",
    "new_graph_custom": "pczb",
    "new_tensor": "tciip",
    "op_desc": "st",
    "op_name": "si",
    "set_input": "-t",
    "set_output": "-t",
    "set_param": "-t",
    "soft_max_add_sinks": "-tt",
    "tensor_overhead": "z",
    "type_name": "si",
    "type_size": "zi",
    "unary_op_name": "si",
    "version": "s",
}
SIGNATURES: dict[str, str] = NODES | REST
