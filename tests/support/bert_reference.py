"""A BERT encoder written directly in NumPy, in float64: the independent reference of the model's tests.

It shares no code with the product: neither graph, nor op definitions, nor error function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * weight + bias


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def embed(weights: dict[str, Array], ids: Array, mask: Array, heads: int, layers: int, eps: float) -> Array:
    """Unit vectors [B, H] for token numbers [B, T] and a mask [B, T] of ones and zeros."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def dense(name: str, x: Array) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    batch, length = ids.shape
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][:length]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    size = x.shape[-1] // heads

    def split(y: Array) -> Array:
        return y.reshape(batch, length, heads, size).transpose(0, 2, 1, 3)

    for layer in range(layers):
        p = f"encoder.layer.{layer}."
        q, k, v = (split(dense(f"{p}attention.self.{name}", x)) for name in ("query", "key", "value"))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(size)
        scores = np.where(mask[:, None, None, :] > 0, scores, -np.inf)
        attended = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = norm(f"{p}attention.output.LayerNorm", dense(f"{p}attention.output.dense", attended) + x)
        inner = dense(f"{p}intermediate.dense", x)
        inner = 0.5 * inner * (1 + _erf(inner / math.sqrt(2)))
        x = norm(f"{p}output.LayerNorm", dense(f"{p}output.dense", inner) + x)
    pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
