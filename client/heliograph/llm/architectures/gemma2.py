"""Gemma 2: norms before and after each part, capped scores, and a window in every other layer."""

from __future__ import annotations

import heliograph as hg
from heliograph.llm.configuration import Configuration, Fields, Rope, decoder
from heliograph.llm.decoding_step import Step

#: Halves of a head are pairs.
ROPE_MODE = 2
#: The model of 27 billion parameters, by its layers: its scores have another factor.
LARGEST_LAYERS = 46


def configure(fields: Fields) -> Configuration:
    """Embeddings grow by the root of the width."""
    return decoder(
        fields,
        ROPE_MODE,
        window=fields.size("attention.sliding_window", 4096),
        score_cap=fields.real("attn_logit_softcapping", 50.0),
        logit_cap=fields.real("final_logit_softcapping", 30.0),
        embedding_scale=fields.size("embedding_length") ** 0.5,
        score_scale=score_scale(fields, LARGEST_LAYERS),
    )


def score_scale(fields: Fields, largest: int) -> float:
    """Return the factor of scores, which the largest model has of its width; 0: that of keys."""
    if fields.size("block_count") != largest:
        return 0.0
    return float((fields.size("embedding_length") / fields.size("attention.head_count")) ** -0.5)


def block(step: Step, layer: int, x: hg.Value) -> hg.Value:
    """Even layers see a window."""
    return normed_block(step, layer, x, step.config.window if layer % 2 == 0 else 0)


def normed_block(step: Step, layer: int, x: hg.Value, window: int, rope: Rope | None = None) -> hg.Value:
    """Attention, then a feed-forward layer gated by gelu, with norms before and after both."""
    name = f"blk.{layer}"
    attended = step.attention(layer, step.norm(f"{name}.attn_norm", x), window=window, rope=rope)
    x = x + step.norm(f"{name}.post_attention_norm", attended)
    made = step.gated(name, step.norm(f"{name}.ffn_norm", x), "geglu")
    return x + step.norm(f"{name}.post_ffw_norm", made)
