"""BERT and models of its form, which embed texts: each token sees all others.

`bert` has embeddings of positions and one gelu; `nomic-bert` rotates queries and keys, and gates
its feed-forward layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.llm.configuration import Configuration, Fields, rope
from heliograph.llm.decoding_step import Weights
from heliograph.llm.products import multiply

ops = hg.ops

#: Halves of a head are pairs.
ROPE_MODE = 2


def configure(fields: Fields) -> Configuration:
    """The epsilon is that of layer norms."""
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    size = max(width // heads, 1)
    return Configuration(
        architecture=fields.architecture,
        width=width,
        layers=fields.size("block_count"),
        heads=heads,
        kv_heads=heads,
        key_size=size,
        value_size=size,
        hidden=fields.size("feed_forward_length"),
        vocabulary=fields.rows_of("token_embd.weight"),
        context=fields.size("context_length"),
        epsilon=fields.real("attention.layer_norm_epsilon"),
        rope=rope(fields, ROPE_MODE, size),
    )


@dataclass
class Encoding:
    """A graph under construction that embeds b texts of n tokens, with padding behind them."""

    graph: hg.Graph
    config: Configuration
    weights: Weights
    batch: int
    length: int

    def rows(self, tokens: hg.Value, bias: hg.Value) -> hg.Value:
        """Return the rows after the last layer, f32 [b * n, w], of tokens i32 [b * n].

        `bias`, f32 [b, 1, n, n], is added to scores: -inf for padding.
        """
        x = ops.get_rows(self._weight("token_embd.weight"), tokens)
        if "token_types.weight" in self.weights:
            x = x + hg.astype(self._weight("token_types.weight")[:1], "f32")
        places = np.tile(np.arange(self.length, dtype=np.int32), self.batch)
        if "position_embd.weight" in self.weights:
            x = x + ops.get_rows(self._weight("position_embd.weight"), self.graph.constant(places))
        x = self._norm("token_embd_norm", x)
        for layer in range(self.config.layers):
            with self.graph.scope(f"layer{layer}"):
                x = self._block(f"blk.{layer}", x, bias, places)
        return x

    def _block(self, name: str, x: hg.Value, bias: hg.Value, places: Any) -> hg.Value:
        x = self._norm(f"{name}.attn_output_norm", x + self._attention(name, x, bias, places))
        inner = self._product(f"{name}.ffn_up", x)
        if f"{name}.ffn_gate.weight" in self.weights:
            inner = ops.swiglu(self._product(f"{name}.ffn_gate", x), inner)
        else:
            inner = ops.gelu_erf(inner)
        return self._norm(f"{name}.layer_output_norm", x + self._product(f"{name}.ffn_down", inner))

    def _attention(self, name: str, x: hg.Value, bias: hg.Value, places: Any) -> hg.Value:
        width, size = self.config.width, self.config.key_size
        if f"{name}.attn_qkv.weight" in self.weights:
            joined = self._product(f"{name}.attn_qkv", x)
            parts = [joined[:, begin : begin + width] for begin in range(0, 3 * width, width)]
        else:
            parts = [self._product(f"{name}.attn_{one}", x) for one in "qkv"]
        heads = [hg.reshape(one, (x.shape[0], self.config.heads, size)) for one in parts]
        if "position_embd.weight" not in self.weights:
            positions = self.graph.constant(places)
            heads[:2] = [self.config.rope.rotate(one, positions, None) for one in heads[:2]]
        shape = (self.batch, self.length, self.config.heads, size)
        q, k, v = (hg.permute_dims(hg.reshape(one, shape), (0, 2, 1, 3)) for one in heads)
        attended = ops.flash_attn_ext(q, k, v, bias, scale=self.config.scale)
        return self._product(f"{name}.attn_output", hg.reshape(attended, (x.shape[0], width)))

    def _product(self, name: str, x: hg.Value) -> hg.Value:
        y = multiply(self._weight(f"{name}.weight"), x, rounds_rows=self.config.rounds_rows)
        if f"{name}.scale" in self.weights:
            # Files with weights in nvfp4 have such.
            y = y * self._weight(f"{name}.scale")
        return y + self._weight(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def _norm(self, name: str, x: hg.Value) -> hg.Value:
        y = ops.norm(x, eps=self.config.epsilon)
        return y * self._weight(f"{name}.weight") + self._weight(f"{name}.bias")

    def _weight(self, name: str) -> hg.Value:
        found = self.graph.find(name)
        return found[0] if found else self.weights.add(self.graph, name)
