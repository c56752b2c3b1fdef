"""Rows: DeepSeek's lightning indexer, and the mixes of its hyper-connections."""

from __future__ import annotations

from heliograph_proto.rules import deepseek
from heliograph_proto.table.row import PRODUCT_TOLERANCE, Attribute, Op

ROWS: tuple[Op, ...] = (
    Op(
        "lightning_indexer", ("q", "k", "weights", "mask"), "attention", deepseek.lightning_indexer,
        "Scores [s, 1, t, n], in f32: the sum over heads of relu(q k) times the head's weight, plus a mask; "
        "of q [s, t, h, d], k [s, n, 1, d], weights [s, 1, t, h], mask [s', 1, t, n], which repeats. k may "
        "be blocks.",
        (), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "dsv4_hc_comb", ("mixes", "scale", "base"), "rows", deepseek.dsv4_hc_comb,
        "What each of hc streams gives to each, [t, from, to], in f32: the last hc hc elements of mixes * "
        "scale[2] + base, soft_max by rows plus eps, columns made to add up to 1, rows, columns, ...",
        (Attribute("eps", "real"), Attribute("iterations", "integer")), (), 1e-6,
    ),
    Op(
        "dsv4_hc_pre", ("x", "weights"), "rows", deepseek.dsv4_hc_pre,
        "`scale` times the sum over hc of x [t, hc, n] times weights [t, hc], in f32; with `gated` times the "
        "sigmoid of weights [t, hc, n].",
        (Attribute("scale", "real", 1.0), Attribute("gated", "boolean", False)), (), 1e-6,
    ),
    Op(
        "dsv4_hc_post", ("x", "residual", "post", "comb?"), "rows", deepseek.dsv4_hc_post,
        "x [t, n] times post [t, hc], plus the residual's streams [t, hc, n], which comb [t, from, to] mixes "
        "where it is given, in f32.",
        (), (), 1e-6,
    ),
)  # fmt: skip
