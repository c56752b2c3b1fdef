"""GGUF files of benchmarks, shaped as known models, with random weights that are soon written.

`LLM_SHAPE` names the one that benchmarks of language models take: "small" by default.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gguf_files import Shape, Vocabulary, save, spm, tensors, write_entries

WORDS, CONTEXT = 32_000, 1024
#: Elements and bytes of a block of q4_0, and the deviation of its elements, in multiples of its
#: scale.
BLOCK, BLOCK_BYTES, DEVIATION = 32, 18, 4.6


SHAPES = {
    "small": Shape("llama", 1024, 6, 16, 4, 64, 2816, CONTEXT),
    "tinyllama": Shape("llama", 2048, 22, 32, 4, 64, 5632, CONTEXT),
    "qwen3-0.6b": Shape("qwen3", 1024, 28, 16, 8, 128, 3072, CONTEXT, has_output=False),
    "moe": Shape("qwen3moe", 2048, 12, 32, 4, 64, 2816, CONTEXT, experts=8, used=2),
}


def chosen() -> Shape:
    """The shape that LLM_SHAPE names."""
    return SHAPES[os.environ.get("LLM_SHAPE", "small")]


def words() -> Vocabulary:
    """A vocabulary of as many words as TinyLlama's."""
    known = spm()
    more = WORDS - len(known.tokens)
    return replace(
        known,
        tokens=[*known.tokens, *(f"▁word{number}" for number in range(more))],
        types=[*known.types, *[1] * more],
        scores=[*known.scores, *(-1e4 - number for number in range(more))],
    )


def write(path: Path, shape: Shape, stored: str = "q4_0") -> Path:
    """Write a model whose matrices are q4_0, or f16: the blocks of one pool of random bytes serve
    all."""
    writer = GGUFWriter(path, shape.architecture)
    write_entries(writer, shape, stored, words())
    random = np.random.default_rng(1)
    halves = random.standard_normal(2**22, np.float32)
    pool = random.integers(0, 256, 2**24, np.uint8)
    for name, sizes, deviation in tensors(shape, WORDS):
        if deviation is None:
            writer.add_tensor(name, np.ones(sizes, np.float32))
        elif "ffn_gate_inp" in name:
            values = random.standard_normal(sizes, np.float32) * np.float32(deviation)
            writer.add_tensor(name, values)
        elif stored == "f16":
            values = np.resize(np.roll(halves, random.integers(len(halves))), sizes) * deviation
            writer.add_tensor(name, values.astype(np.float16))
        else:
            # Equal tensors would lie in memory once, and be read from the processor's caches.
            own = np.roll(pool, random.integers(len(pool)))
            size = math.prod(sizes) // BLOCK * BLOCK_BYTES
            blocks = np.resize(own, size).reshape(-1, BLOCK_BYTES)
            blocks[:, :2] = np.array([deviation / DEVIATION], np.float16).view(np.uint8)
            rows = blocks.reshape(*sizes[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType.Q4_0)
    save(writer)
    return path
