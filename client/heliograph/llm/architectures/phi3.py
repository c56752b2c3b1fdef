"""Phi 3 and 4: one matrix makes queries, keys and values, and one both halves of the feed-forward
layer."""

from __future__ import annotations

import heliograph as hg
from heliograph.llm.configuration import Configuration, Fields, decoder
from heliograph.llm.decoding_step import Step

#: Halves of a head are pairs.
ROPE_MODE = 2


def configure(fields: Fields) -> Configuration:
    """Some models see a window."""
    return decoder(fields, ROPE_MODE, window=fields.size("attention.sliding_window", 0))


def block(step: Step, layer: int, x: hg.Value) -> hg.Value:
    """Llama's block. Caches beyond the original context take other factors of positions."""
    name, config = f"blk.{layer}", step.config
    is_long = step.cache.context > config.rope.original_context
    attended = step.attention(
        layer,
        step.norm(f"{name}.attn_norm", x),
        window=config.window,
        factors=f"rope_factors_{'long' if is_long else 'short'}.weight",
    )
    x = x + attended
    return x + step.gated(name, step.norm(f"{name}.ffn_norm", x))
