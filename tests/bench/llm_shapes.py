"""GGUF files of benchmarks, shaped as known models, with random weights that are soon written.

`LLM_SHAPE` names the one that benchmarks of language models take: "small" by default.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gguf_files import Vocabulary, spm

WORDS = 32_000
#: Elements and bytes of a block of q4_0, and the deviation of its elements, in multiples of its
#: scale.
BLOCK, BLOCK_BYTES, DEVIATION = 32, 18, 4.6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    architecture: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    row: int
    hidden: int
    experts: int = 0
    used: int = 0
    context: int = 1024
    has_output: bool = True


SHAPES = {
    "small": Shape("llama", 1024, 6, 16, 4, 64, 2816),
    "tinyllama": Shape("llama", 2048, 22, 32, 4, 64, 5632),
    "qwen3-0.6b": Shape("qwen3", 1024, 28, 16, 8, 128, 3072, has_output=False),
    "moe": Shape("qwen3moe", 2048, 12, 32, 4, 64, 2816, experts=8, used=2),
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


def write(path: Path, shape: Shape) -> Path:
    """Write a model whose matrices are q4_0."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.row)
    writer.add_value_length(shape.row)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(WORDS)
    if shape.architecture == "llama":
        writer.add_rope_dimension_count(shape.row)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.hidden)
    words().write(writer)
    _Tensors(writer).write(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Tensors:
    """Writes the tensors; the blocks of one pool of random bytes serve all of them."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer
        self._pool = np.random.default_rng(1).integers(0, 256, 2**24, np.uint8)

    def write(self, shape: Shape) -> None:
        width, queries, keys = shape.width, shape.heads * shape.row, shape.kv_heads * shape.row
        self._matrix("token_embd", (WORDS, width), 1.0)
        self._norm("output_norm", width)
        if shape.has_output:
            self._matrix("output", (WORDS, width), 3 * width**-0.5)
        experts = (shape.experts,) if shape.experts else ()
        suffix = "_exps" if shape.experts else ""
        for layer in range(shape.layers):
            prefix = f"blk.{layer}."
            for name, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
                self._matrix(prefix + name, (rows, width), 1.5 * width**-0.5)
            self._matrix(prefix + "attn_output", (width, queries), queries**-0.5)
            if experts:
                router = np.random.default_rng(layer).normal(size=(shape.experts, width)).astype(np.float32)
                self._writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router * np.float32(width**-0.5))
            for name in ("ffn_gate", "ffn_up"):
                self._matrix(prefix + name + suffix, (*experts, shape.hidden, width), width**-0.5)
            self._matrix(prefix + "ffn_down" + suffix, (*experts, width, shape.hidden), shape.hidden**-0.5)
            for name in ("attn_norm", "ffn_norm"):
                self._norm(prefix + name, width)
            if shape.architecture.startswith("qwen3"):
                for name in ("attn_q_norm", "attn_k_norm"):
                    self._norm(prefix + name, shape.row)

    def _matrix(self, name: str, shape: tuple[int, ...], deviation: float) -> None:
        blocks = np.prod(shape[:-1], dtype=int) * (shape[-1] // BLOCK)
        data = np.resize(self._pool, blocks * BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
        data[:, :2] = np.array([deviation / DEVIATION], np.float16).view(np.uint8)
        rows = data.reshape(*shape[:-1], -1)
        self._writer.add_tensor(f"{name}.weight", rows, raw_dtype=GGMLQuantizationType.Q4_0)

    def _norm(self, name: str, count: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(count, np.float32))
