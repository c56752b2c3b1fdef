"""gpt-oss: experts with biases in each layer, a sink for each head, and a window in every other
layer."""

from __future__ import annotations

import heliograph as hg
from heliograph.llm.configuration import Configuration, Fields, decoder
from heliograph.llm.decoding_step import Step

ops = hg.ops

#: Halves of a head are pairs.
ROPE_MODE = 2


def configure(fields: Fields) -> Configuration:
    """The size of a feed-forward layer is that of an expert."""
    return decoder(
        fields,
        ROPE_MODE,
        hidden=fields.size("expert_feed_forward_length"),
        window=fields.size("attention.sliding_window"),
        experts=fields.size("expert_count"),
        experts_used=fields.size("expert_used_count"),
    )


def block(step: Step, layer: int, x: hg.Value) -> hg.Value:
    """Even layers see a window. The norm after attention is that of the experts' rows."""
    name = f"blk.{layer}"
    window = step.config.window if layer % 2 == 0 else 0
    x = x + step.attention(layer, step.norm(f"{name}.attn_norm", x), window=window)
    return x + experts(step, name, step.norm(f"{name}.post_attention_norm", x))


def experts(step: Step, name: str, x: hg.Value) -> hg.Value:
    """Apply the experts with the largest scores of a router, weighted by the softmax of these: [n,
    w] from [n, w]."""
    scores = step.product(f"{name}.ffn_gate_inp", x)
    chosen = ops.top_k(scores, k=step.config.experts_used)
    weights = ops.soft_max(hg.take_along_axis(scores, hg.astype(chosen, "i64"), axis=-1))

    def product(part: str, rows: hg.Value) -> hg.Value:
        made = step.product_of_experts(f"{name}.{part}_exps", rows, chosen)
        return ops.add_id(made, step.weight(f"{name}.{part}_exps.bias"), chosen)

    rows = hg.reshape(x, (step.tokens, 1, x.shape[1]))
    inner = ops.swiglu_oai(product("ffn_gate", rows), product("ffn_up", rows))
    return hg.sum(product("ffn_down", inner) * hg.expand_dims(weights, axis=2), axis=1)
