"""Small GGUF models for tests: random weights, and vocabularies that are learned from a few lines.

The same arguments give the same bytes. Nothing that such a model writes makes sense, but all its
parts do: the names and shapes of tensors, the entries, and a tokenizer that takes any text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

import heliograph as hg

#: The text from which the vocabularies are learned.
TEXT = """
The daemon serves graphs to many clients. A client sends a graph once, and runs it many times; each
run brings new inputs and takes outputs back. The quick brown fox jumps over the lazy dog. It's said
that we'll see 12 or 345 of them by 2026, don't you think? Wie schön, daß wir hier sind: Übung macht
den Meister. Où est la bibliothèque ? Привет, мир и все люди! 你好,世界。今日は良い天気です。
def add(first, second):
    return first + second  # the sum of both
for (int i = 0; i < 10; i++) { printf("%d\\n", values[i]); }
"""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_CHAT = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
MERGES = 300


@dataclass(frozen=True)
class Vocabulary:
    """The entries `tokenizer.ggml.*` of a file."""

    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str = "default"
    #: Token numbers by role, as "bos".
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, number in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
        for name in ("add_bos", "add_eos"):
            if (value := getattr(self, name)) is not None:
                writer.add_bool(f"tokenizer.ggml.{name}_token", value)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)


def learned(words: list[list[str]], merges: int) -> list[tuple[str, str]]:
    """The most frequent pairs of neighbours, joined one after the other; of equals the first."""
    counts = Counter(tuple(word) for word in words)
    found: list[tuple[str, str]] = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        found.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, count in counts.items():
            parts: list[str] = []
            for part in word:
                if parts and (parts[-1], part) == best:
                    parts[-1] += part
                else:
                    parts.append(part)
            joined[tuple(parts)] += count
        counts = joined
    return found


def spm() -> Vocabulary:
    """SentencePiece's, as of Llama 2 and Gemma: "▁" for a space, scores, and a token for each
    byte."""
    spaced = "▁" + TEXT.replace(" ", "▁")
    words = [list(word) for word in re.findall(r"▁*[^▁]*", spaced) if word]
    pairs = learned(words, MERGES)
    pieces = list(dict.fromkeys([a + b for a, b in pairs] + sorted(set(spaced))))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return Vocabulary("llama", tokens, types, scores, ids=ids, add_bos=True, add_eos=False)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in the vocabularies of GPT-2's kind: itself where it is
    visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def bpe(pre: str = "qwen2") -> Vocabulary:
    """GPT-2's kind, as of Llama 3 and Qwen: merges of bytes."""
    letters = byte_letters()
    words = [
        [letters[byte] for byte in word.encode()]
        for word in re.findall(r"'\w+| ?[^\W\d_]+| ?\d| ?[^\s\w]+|\s+(?!\S)|\s+", TEXT)
    ]
    pairs = learned(words, MERGES)
    pieces = list(dict.fromkeys([*letters, *(a + b for a, b in pairs)]))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return Vocabulary(
        "gpt2",
        pieces + special + ["<think>"],
        [NORMAL] * len(pieces) + [CONTROL] * 3 + [USER],
        merges=[f"{a} {b}" for a, b in pairs],
        pre=pre,
        ids={"bos": len(pieces), "eos": len(pieces) + 2, "padding": len(pieces)},
        add_bos=False,
    )


def wordpiece() -> Vocabulary:
    """BERT's: whole words with "▁" before them, and parts of words without."""
    words = Counter(re.findall(r"[a-z]+|[^\W\d_]|\d|[^\w\s]", TEXT.lower()))
    letters = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz0123456789"))
    whole = list(dict.fromkeys([*words, *letters]))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ends = ["ing", "ed", "s", "er", "ly"]
    tokens = special + ["▁" + word for word in whole] + list(dict.fromkeys(ends + letters))
    ids = {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "eos": 3, "seperator": 3, "mask": 4}
    return Vocabulary("bert", tokens, [CONTROL] * 5 + [NORMAL] * (len(tokens) - 5), pre="jina-v2-en", ids=ids)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `row`, a head's elements, need not be width / heads."""

    architecture: str
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    row: int = 16
    hidden: int = 128
    context: int = 256
    eps: float = 1e-5
    rope_base: float = 10000.0
    #: Whether a matrix of its own makes the logits, not the embedding's.
    has_output: bool = True
    #: A window of attention in most layers; 0: none.
    window: int = 0
    #: Experts of a layer, and those that a token takes; 0: none.
    experts: int = 0
    used: int = 0


SHAPES = {
    "llama": Shape("llama"),
    "qwen2": Shape("qwen2", eps=1e-6, rope_base=1e6),
    "qwen3": Shape("qwen3", row=32, eps=1e-6, rope_base=1e6, has_output=False),
    "gemma3": Shape(
        "gemma3", layers=7, row=32, kv_heads=1, eps=1e-6, rope_base=1e6, has_output=False, window=16
    ),
}
VOCABULARIES = {"spm": spm, "bpe": bpe, "wordpiece": wordpiece}
_FILE_TYPES = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_M", "mxfp4": "MOSTLY_MXFP4_MOE"}
#: Types whose blocks take long to make: a model has some of them, in any order.
_SLOW, _POOL = ("iq1", "iq2", "iq3"), 64


def write_model(
    path: Path,
    architecture: str = "llama",
    stored: str = "f32",
    vocabulary: str | Vocabulary = "",
    *,
    seed: int = 1,
    chat_template: str | None = "",
    entries: dict[str, Any] | None = None,
    part_tensors: int = 0,
    outer: str = "",
    **sizes: Any,
) -> Path:
    """Write a model. `sizes` are fields of Shape; `chat_template` None leaves it out. `entries` are
    further ones, and None for a value leaves one out that is there. With `part_tensors` the model
    is split into files of so many tensors, of which the first has none; its path is returned. `outer`
    is the type of the matrices outside of layers, where it is another one."""
    shape = replace(SHAPES[architecture], **sizes)
    if not vocabulary:
        vocabulary = "bpe" if architecture.startswith("qwen") else "spm"
    words = VOCABULARIES[vocabulary]() if isinstance(vocabulary, str) else vocabulary
    if chat_template == "":
        chat_template = CHATML if words.kind == "gpt2" else PLAIN_CHAT
    writer = GGUFWriter(
        path, architecture, split_max_tensors=part_tensors, small_first_shard=bool(part_tensors)
    )
    write_entries(writer, shape, stored, words)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (entries or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        if value is not None:
            _ADD[type(value)](writer, key, value)
    _Tensors(writer, stored, outer or stored, np.random.default_rng(seed)).write(shape, len(words.tokens))
    save(writer)
    return sorted(path.parent.glob(f"{path.stem}-?????-of-*.gguf"))[0] if part_tensors else path


_ADD = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def write_entries(writer: GGUFWriter, shape: Shape, stored: str, words: Vocabulary) -> None:
    """Write the sizes of a model, and its vocabulary."""
    writer.add_name(f"random {shape.architecture}")
    writer.add_file_type(LlamaFileType[_FILE_TYPES.get(stored, f"MOSTLY_{stored.upper()}")])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(len(words.tokens))
    if shape.architecture == "llama":
        writer.add_rope_dimension_count(shape.row)
    if shape.row * shape.heads != shape.width:
        writer.add_key_length(shape.row)
        writer.add_value_length(shape.row)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.hidden)
    writer.add_quantization_version(2)
    words.write(writer)


def tensors(shape: Shape, words: int) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Yield names, shapes, and the deviation of a matrix's elements, with which values keep one
    size in all layers; None for a norm or a bias."""
    width, queries, keys = shape.width, shape.heads * shape.row, shape.kv_heads * shape.row
    yield "token_embd.weight", (words, width), 1.0
    yield "output_norm.weight", (width,), None
    if shape.has_output:
        yield "output.weight", (words, width), 3 * width**-0.5
    experts, suffix = ((shape.experts,), "_exps.weight") if shape.experts else ((), ".weight")
    norms = [("attn_norm", width), ("ffn_norm", width)]
    if shape.architecture.startswith(("qwen3", "gemma3")):
        norms += [("attn_q_norm", shape.row), ("attn_k_norm", shape.row)]
    if shape.architecture == "gemma3":
        norms += [("post_attention_norm", width), ("post_ffw_norm", width)]
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        for name, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            yield f"{prefix}{name}.weight", (rows, width), 1.5 * width**-0.5
            if shape.architecture == "qwen2":
                yield f"{prefix}{name}.bias", (rows,), None
        yield f"{prefix}attn_output.weight", (width, queries), queries**-0.5
        if experts:
            yield f"{prefix}ffn_gate_inp.weight", (*experts, width), width**-0.5
        for name in ("ffn_gate", "ffn_up"):
            yield f"{prefix}{name}{suffix}", (*experts, shape.hidden, width), width**-0.5
        yield f"{prefix}ffn_down{suffix}", (*experts, width, shape.hidden), shape.hidden**-0.5
        for name, count in norms:
            yield f"{prefix}{name}.weight", (count,), None


def save(writer: GGUFWriter) -> None:
    """Write the file, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class _Tensors:
    """Writes the tensors of a model."""

    writer: GGUFWriter
    stored: str
    outer: str
    rng: np.random.Generator

    def write(self, shape: Shape, words: int) -> None:
        for name, sizes, deviation in tensors(shape, words):
            if deviation is not None:
                self._matrix(name, self.rng.standard_normal(sizes, np.float32) * np.float32(deviation))
            else:
                low, high = (-0.1, 0.1) if name.endswith(".bias") else (0.5, 1.5)
                self.writer.add_tensor(name, self.rng.uniform(low, high, sizes).astype(np.float32))

    def _matrix(self, name: str, found: np.ndarray[Any, Any]) -> None:
        stored = self.stored if name.startswith("blk.") else self.outer
        if stored == "f32":
            self.writer.add_tensor(name, found)
        elif stored == "f16":
            self.writer.add_tensor(name, found.astype(np.float16))
        elif stored.startswith(_SLOW):
            self._some_blocks(name, found)
        else:
            self._stored(name, hg.quantize(found, stored), stored)

    def _some_blocks(self, name: str, found: np.ndarray[Any, Any]) -> None:
        """Write a matrix of few blocks in any order; those of tokens in q8_0, so that all rows
        differ."""
        if not name.startswith("blk."):
            self._stored(name, hg.quantize(found, "q8_0"), "q8_0")
            return
        pool = hg.quantize(found.reshape(-1, 256)[:_POOL], self.stored)
        rows = pool[self.rng.integers(0, len(pool), (len(found), found.shape[1] // 256))]
        self._stored(name, rows.reshape(len(found), -1), self.stored)

    def _stored(self, name: str, blocks: np.ndarray[Any, Any], stored: str) -> None:
        self.writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[stored.upper()])
