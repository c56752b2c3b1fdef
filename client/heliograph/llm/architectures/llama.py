"""Llama, and models of its form: Mistral, and with experts Mixtral."""

from __future__ import annotations

import heliograph as hg
from heliograph.llm.configuration import Configuration, Fields, decoder
from heliograph.llm.decoding_step import Step

#: Neighbours are a pair: the conversion to GGUF orders the rows of queries and keys so.
ROPE_MODE = 0


def configure(fields: Fields) -> Configuration:
    """With `expert_count`, a router selects experts for each token."""
    experts = fields.size("expert_count", 0)
    return decoder(
        fields,
        ROPE_MODE,
        window=fields.size("attention.sliding_window", 0),
        experts=experts,
        experts_used=fields.size("expert_used_count", 0 if not experts else None),
    )


def block(step: Step, layer: int, x: hg.Value) -> hg.Value:
    """Attention, then a gated feed-forward layer, each of normed rows and added to them."""
    name, config = f"blk.{layer}", step.config
    x = x + step.attention(layer, step.norm(f"{name}.attn_norm", x), window=config.window)
    rows = step.norm(f"{name}.ffn_norm", x)
    return x + (step.experts(name, rows) if config.experts else step.gated(name, rows))
