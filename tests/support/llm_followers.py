"""Models whose likeliest next token is a known one, so that of two the share that agrees is known.

Their layers add nothing, and cost what layers cost. The row of the output matrix of the token that
follows is the embedding of the token before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import Vocabulary

import heliograph as hg

#: Tokens below this one follow themselves, such as those that end an answer, and none leads to them.
FIRST = 300


def followers(words: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Return the token after each, in one circle."""
    circle = FIRST + np.random.default_rng(seed).permutation(words - FIRST)
    found = np.arange(words)
    found[circle] = np.roll(circle, -1)
    return found


def mistaken(following: np.ndarray[Any, Any], share: float, seed: int = 2) -> np.ndarray[Any, Any]:
    """Return other tokens after a share of them."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(len(following)) < share
    wrong[:FIRST] = False
    found = following.copy()
    # Each of these has the follower of the next one: a permutation again.
    found[wrong] = np.roll(following[wrong], 1)
    return found


def write_follower(
    path: Path,
    words: Vocabulary,
    following: np.ndarray[Any, Any],
    *,
    stored: str = "f32",
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 128,
    context: int = 256,
) -> Path:
    """Write a model with the form of Llama."""
    writer, rng, count = GGUFWriter(path, "llama"), np.random.default_rng(width), len(words.tokens)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    words.write(writer)

    def add(name: str, values: np.ndarray[Any, Any]) -> None:
        if stored == "f32":
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = GGMLQuantizationType[stored.upper()]
            writer.add_tensor(f"{name}.weight", hg.quantize(values, stored), raw_dtype=kind)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

    embedding = rng.standard_normal((count, width), np.float32)
    output = np.empty_like(embedding)
    output[following] = embedding
    add("token_embd", embedding)
    add("output", output)
    keys = width // heads * kv_heads
    for layer in range(layers):
        p = f"blk.{layer}."
        for name, rows in (("attn_q", width), ("attn_k", keys), ("attn_v", keys)):
            add(p + name, matrix(rows, width))
        add(p + "attn_output", np.zeros((width, width), np.float32))
        add(p + "ffn_gate", matrix(hidden, width))
        add(p + "ffn_up", matrix(hidden, width))
        add(p + "ffn_down", np.zeros((width, hidden), np.float32))
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{p}{norm}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
