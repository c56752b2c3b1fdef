"""Models whose likeliest next token is a known one, so that of two the share that agrees is known.

Their layers add nothing, and cost what layers cost. The row of the output matrix of the token that
follows is the embedding of the token before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import SHAPES, Shape, Vocabulary, save, tensors, write_entries

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
    shape: Shape = SHAPES["llama"],
    *,
    stored: str = "f32",
) -> Path:
    """Write a model with the form of Llama."""
    writer, rng, count = GGUFWriter(path, "llama"), np.random.default_rng(shape.width), len(words.tokens)
    write_entries(writer, shape, stored, words)
    embedding = rng.standard_normal((count, shape.width), np.float32)
    output = np.empty_like(embedding)
    output[following] = embedding
    known = {"token_embd.weight": embedding, "output.weight": output}
    for name, sizes, deviation in tensors(shape, count):
        if deviation is None:
            writer.add_tensor(name, np.ones(sizes, np.float32))
            continue
        if name in known:
            values = known[name]
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            values = np.zeros(sizes, np.float32)
        else:
            values = rng.standard_normal(sizes, np.float32) * np.float32(deviation)
        if stored == "f32":
            writer.add_tensor(name, values)
        else:
            kind = GGMLQuantizationType[stored.upper()]
            writer.add_tensor(name, hg.quantize(values, stored), raw_dtype=kind)
    save(writer)
    return path
