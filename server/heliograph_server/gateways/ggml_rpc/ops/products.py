"""Rules of matrix products and attention."""

from __future__ import annotations

from heliograph_proto.quantization import ROUNDED_ROWS
from heliograph_proto.types import DTYPES
from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rows import fitted_mask
from heliograph_server.gateways.ggml_rpc.ops.rule import F32, Call, Rule, plain

Q8_0 = DTYPES["q8_0"]


def _rounded(call: Call, rows: Value) -> Value:
    """Return the rows of a product, in the type in which they are multiplied."""
    is_rounded = call.rounds_rows and call.dtype(0).name in ROUNDED_ROWS and call.dtype(1) is F32
    return call.builder.cast(rows, Q8_0) if is_rounded else rows


def _mul_mat(call: Call) -> Value:
    # Several matrices of blocks are rare, and their rows stay as they are.
    is_matrix = all(size == 1 for size in call.shape(0)[:-2])
    return call.node("mul_mat", call[0], _rounded(call, call[1]) if is_matrix else call[1])


def _mul_mat_id(call: Call) -> Value:
    ids = call.builder.reshape(call[2], call.shape(2)[-2:])
    return call.node("mul_mat_id", call.of_rank(0, 3), _rounded(call, call.of_rank(1, 3)), ids)


def _attention(call: Call) -> Value:
    q, mask, sinks = call[0], call.optional(3), call.optional(4)
    batch, heads, rows, _ = call.shape(0)
    if mask is not None:
        mask = fitted_mask(call, mask, (batch, heads, rows, call.shape(1)[-2]))
    elif sinks is not None:
        mask = call.node("fill", shape=(1, 1, rows, call.shape(1)[-2]), value=0.0, dtype=F32)
    if sinks is not None:
        sinks = call.builder.flat(sinks)
    return call.node(
        "flash_attn_ext", q, call[1], call[2], mask, sinks,
        scale=call.real(0), max_bias=call.real(1), logit_softcap=call.real(2),
    )  # fmt: skip


RULES: dict[str, Rule] = {
    "mul_mat": Rule(_mul_mat, 2, frozenset((0, 1))),
    "mul_mat_id": Rule(_mul_mat_id, 3),
    "out_prod": plain("out_prod", 2),
    "flash_attn_ext": Rule(_attention, 3),
    "solve_tri": plain("solve_tri", 2),
    "lightning_indexer": plain("lightning_indexer", 4),
}
