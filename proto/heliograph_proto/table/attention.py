"""Rows: softmax with ALiBi and sinks, attention, and group norm."""

from __future__ import annotations

from heliograph_proto.rules import attention
from heliograph_proto.table.row import PRODUCT_TOLERANCE, Attribute, Op

_SCALE = Attribute("scale", "real", 1.0)
_MAX_BIAS = Attribute("max_bias", "real", 0.0)

ROWS: tuple[Op, ...] = (
    Op(
        "soft_max", ("x", "mask?", "sinks?"), "rows", attention.soft_max,
        "exp(y - max(y)) / sum, for each row of y = x * scale + slope * mask; slopes are 1, or with max_bias "
        "ALiBi's of the heads, axis -3, each of which may have a sink, one more score.",
        (_SCALE, _MAX_BIAS), (0,), 1e-6,
    ),
    Op(
        "flash_attn_ext", ("q", "k", "v", "mask?", "sinks?"), "attention", attention.flash_attn_ext,
        "Attention, [b, m, h, dv], of q [b, h, m, d], k [b, kv, n, d] and v [b, kv, n, dv], where heads "
        "share keys as in mul_mat, with soft_max's mask, slopes and sinks; with a cap, scores are cap * "
        "tanh(score / cap). A row that is hidden whole gives 0. k and v may be blocks.",
        (_SCALE, _MAX_BIAS, Attribute("logit_softcap", "real", 0.0)), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "group_norm", ("x",), "rows", attention.group_norm,
        "(x - mean) / sqrt(variance + eps) over each of the groups of channels of x [.., channels, h, w].",
        (Attribute("groups", "integer"), Attribute("eps", "real", 1e-5)), (0,), 1e-6,
    ),
)  # fmt: skip
