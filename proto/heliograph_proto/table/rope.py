"""Rows: rotary position embedding and timestep embedding."""

from __future__ import annotations

from heliograph_proto.rules import rope
from heliograph_proto.table.row import Attribute, Op

#: ggml's, for angles that are computed in f32.
ANGLE_TOLERANCE = 1e-3

ROWS: tuple[Op, ...] = (
    Op(
        "rope", ("x", "positions", "factors?"), "rows", rope.rope,
        "Rotary position embedding of x [.., tokens, heads, d] by positions [tokens], in ggml's `mode`: 0 "
        "pairs of neighbours, 2 of halves (NeoX), 8, 24, 40 with positions [4, tokens] and `sections` "
        "(M-RoPE, vision, interleaved); frequencies are divided by factors; with `ext_factor` as in YaRN. "
        "The `n_dims` elements that turn begin at `offset`.",
        (
            Attribute("n_dims", "integer"), Attribute("mode", "integer", rope.NORMAL),
            Attribute("sections", "integers", ()), Attribute("n_ctx_orig", "integer", 0),
            Attribute("freq_base", "real", 10000.0), Attribute("freq_scale", "real", 1.0),
            Attribute("ext_factor", "real", 0.0), Attribute("attn_factor", "real", 1.0),
            Attribute("beta_fast", "real", 32.0), Attribute("beta_slow", "real", 1.0),
            Attribute("offset", "integer", 0),
        ),
        (0,), ANGLE_TOLERANCE,
    ),
    Op(
        "timestep_embedding", ("timesteps",), "rows", rope.timestep_embedding,
        "For each timestep `dim` numbers, f32: cosines, then sines of it times falling frequencies from 1 to "
        "almost 1 / max_period; an odd last one is 0.",
        (Attribute("dim", "integer"), Attribute("max_period", "integer", 10000)), (), 1e-6,
    ),
)  # fmt: skip
