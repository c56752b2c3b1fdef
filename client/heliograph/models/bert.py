"""A BERT encoder as a compute graph.

After "BERT: Pre-training of Deep Bidirectional Transformers" (Devlin et al., 2019), with the names
of weights that Hugging Face's checkpoints use. Shapes: B sentences of T tokens, hidden size H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph import Graph, Value

#: Added to the attention scores of padding tokens.
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes of an encoder, as config.json names them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    layer_norm_eps: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


Weights = Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]


def weight_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that the encoder reads, and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    dense = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}."
        for name, shape in dense.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (hidden,)
    return shapes


def join_attention_weights(weights: Weights, config: BertConfig) -> dict[str, Any]:
    """The weights with query, key and value of each layer joined in one matrix for one product."""
    joined = dict(weights)
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}.attention.self."
        for kind in ("weight", "bias"):
            parts = [joined.pop(f"{prefix}{name}.{kind}") for name in ("query", "key", "value")]
            joined[f"{prefix}{kind}"] = np.concatenate(parts)
    return {name: frozen(array) for name, array in joined.items()}


def frozen(array: Any) -> Any:
    """A read-only copy, so that one digest of it serves the graphs of all shapes."""
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


class BertEncoder:
    """Builds graphs of one encoder for any batch and length. `weights`: from
    `join_attention_weights`."""

    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    def sentence_embeddings(self, batch: int, length: int) -> Graph:
        """A graph from `ids` (i32 [B, T]) and `mask` (f32 [B, T], 1 for tokens, 0 for padding) to
        `embedding` (f32 [B, H]): the mean over a sentence's tokens, at unit length, which is that
        of their sum; 0 for a sentence of padding."""
        graph = hg.Graph()
        ids = graph.input("ids", (batch, length), "i32")
        mask = graph.input("mask", (batch, length), "f32")
        hidden = self._hidden(graph, ids, mask)
        # The sum over a sentence's tokens is a matrix product with its mask, in f32 whatever the
        # weights are.
        ones = hg.astype(mask, hidden.dtype).reshape((batch, 1, length))
        total = hg.ops.mul_mat(hidden.mT, ones).reshape((batch, self.config.hidden_size))
        graph.output("embedding", hg.ops.l2_norm(total, eps=1e-12))
        return graph

    def _hidden(self, graph: Graph, ids: Value, mask: Value) -> Value:
        """The last layer's hidden states, [B, T, H]."""
        batch, length = ids.shape
        bias = hg.ops.scale(mask, scale=-MASKED, bias=MASKED).reshape((batch, 1, 1, length))
        x = self._embed(graph, ids)
        for layer in range(self.config.num_hidden_layers):
            with graph.scope(f"layer{layer}"):
                x = self._layer(graph, f"encoder.layer.{layer}.", x, bias)
        return x

    def _embed(self, graph: Graph, ids: Value) -> Value:
        words = self._weight(graph, "embeddings.word_embeddings.weight")
        positions = self._weight(graph, "embeddings.position_embeddings.weight")
        types = self._weight(graph, "embeddings.token_type_embeddings.weight")
        x = hg.take(words, ids, axis=0) + types[0] + positions[: ids.shape[1]]
        return self._norm(graph, "embeddings.LayerNorm", x)

    def _layer(self, graph: Graph, prefix: str, x: Value, bias: Value) -> Value:
        attended = self._attention(graph, prefix, x, bias)
        attended = self._dense(graph, f"{prefix}attention.output.dense", attended)
        x = self._norm(graph, f"{prefix}attention.output.LayerNorm", attended + x)
        inner = hg.gelu(self._dense(graph, f"{prefix}intermediate.dense", x))
        inner = self._dense(graph, f"{prefix}output.dense", inner)
        return self._norm(graph, f"{prefix}output.LayerNorm", inner + x)

    def _attention(self, graph: Graph, prefix: str, x: Value, bias: Value) -> Value:
        batch, length, hidden = x.shape
        heads, size = self.config.num_attention_heads, self.config.head_size
        joined = self._dense(graph, f"{prefix}attention.self", x).reshape((batch, length, 3, heads, size))
        query, key, value = (hg.permute_dims(joined[:, :, i], (0, 2, 1, 3)) for i in range(3))
        # A view whose rows are one, made here so that layers elsewhere are sent that one.
        rows = hg.broadcast_to(bias, (batch, 1, length, length))
        attended = hg.ops.flash_attn_ext(query, key, value, rows, scale=size**-0.5)
        return hg.astype(attended.reshape((batch, length, hidden)), x.dtype)

    def _dense(self, graph: Graph, name: str, x: Value) -> Value:
        return x @ self._weight(graph, f"{name}.weight").mT + self._weight(graph, f"{name}.bias")

    def _norm(self, graph: Graph, name: str, x: Value) -> Value:
        weight, bias = (self._weight(graph, f"{name}.{kind}") for kind in ("weight", "bias"))
        return hg.layer_norm(x, weight, bias, eps=self.config.layer_norm_eps)

    def _weight(self, graph: Graph, name: str) -> Value:
        return graph.weight(name, self.weights[name])
