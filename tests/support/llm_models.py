"""GGUF models of further architectures for tests, and a decoder in NumPy that reads any of them.

The decoder follows the papers: all tokens at once, no cache, in f64. It shares nothing with
`heliograph.llm`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_files import save, spm, wordpiece

import heliograph as hg
from heliograph_proto.quantization import ROUNDED_ROWS

Array = np.ndarray[Any, Any]

#: Sizes and entries of each architecture beyond those of `gguf_files`, small.
ENTRIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "rope.freq_base": 10000.0,
    },
    "phi3": {"rope.dimension_count": 16, "attention.sliding_window": 10},
    "mixtral": {"expert_count": 4, "expert_used_count": 2, "rope.dimension_count": 16},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gpt-oss": {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "attention.sliding_window": 7,
        "rope.freq_base": 1000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
}
WIDTH, HEADS, KV_HEADS, ROW, HIDDEN, LAYERS, CONTEXT, EPSILON = 64, 4, 2, 16, 96, 3, 128, 1e-5


def write_other(
    path: Path,
    kind: str,
    *,
    seed: int = 1,
    dtype: Any = np.float32,
    entries: dict[str, Any] | None = None,
    experts: GGMLQuantizationType | None = None,
    scales: bool = False,
) -> Path:
    """Write a model of a kind of ENTRIES, or with the form of Llama for "mixtral". Its experts may
    be blocks, and its matrices may have scales."""
    name = "llama" if kind == "mixtral" else kind
    writer, words = GGUFWriter(path, name), spm()
    sizes: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": ROW,
        "attention.value_length": ROW,
        "attention.layer_norm_rms_epsilon": EPSILON,
        **ENTRIES[kind],
        **(entries or {}),
    }
    for key, value in sizes.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{name}.{key}", value)
    words.write(writer)
    rng = np.random.default_rng(seed)
    for tensor, shape in _shapes(kind, sizes, len(words.tokens)).items():
        made = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.standard_normal(shape)
        made *= 1.0 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        if experts is not None and tensor.endswith("_exps.weight"):
            writer.add_tensor(tensor, quantize(made.astype(np.float32), experts), raw_dtype=experts)
        else:
            writer.add_tensor(tensor, made.astype(dtype if len(shape) > 1 else np.float32))
        is_matrix = len(shape) > 1 and tensor.endswith(".weight") and tensor != "token_embd.weight"
        if scales and is_matrix:
            count = shape[0] if len(shape) == 3 else 1
            found = rng.uniform(0.5, 2, count).astype(np.float32)
            writer.add_tensor(f"{tensor.removesuffix('.weight')}.scale", found)
    save(writer)
    return path


def _shapes(kind: str, sizes: dict[str, Any], words: int) -> dict[str, tuple[int, ...]]:
    queries, keys, hidden = HEADS * ROW, KV_HEADS * ROW, sizes.get("expert_feed_forward_length", HIDDEN)
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (words, WIDTH), "output_norm.weight": (WIDTH,)}
    if kind != "gemma2":
        found["output.weight"] = (words, WIDTH)
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        if kind == "phi3":
            parts |= {"attn_qkv": (queries + 2 * keys, WIDTH), "ffn_up": (2 * hidden, WIDTH)}
        else:
            parts |= {"attn_q": (queries, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
        if count := sizes.get("expert_count", 0):
            parts |= {"ffn_gate_inp": (count, WIDTH), "ffn_gate_exps": (count, hidden, WIDTH)}
            parts |= {"ffn_up_exps": (count, hidden, WIDTH), "ffn_down_exps": (count, WIDTH, hidden)}
        else:
            parts["ffn_down"] = (WIDTH, hidden)
        if kind == "gemma2":
            parts |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
            parts |= {"ffn_gate": (hidden, WIDTH), "ffn_up": (hidden, WIDTH)}
        if kind == "qwen3moe":
            parts |= {"attn_q_norm": (ROW,), "attn_k_norm": (ROW,)}
        parts["attn_output"] = (WIDTH, queries)
        if kind == "gpt-oss":
            parts["post_attention_norm"] = parts.pop("ffn_norm")
            biased = [part for part, shape in parts.items() if len(shape) > 1]
            found |= {f"blk.{layer}.{part}.bias": (*parts[part][:-2], parts[part][-2]) for part in biased}
            parts["attn_sinks"] = (HEADS,)
        found |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    if kind == "phi3":
        for length in ("short", "long"):
            found[f"rope_factors_{length}.weight"] = (ROW // 2,)
    return found


class NumpyModel:
    """A decoder that computes all logits at once, in f64; with `rounds_rows`, from rows in q8_0 where
    a CPU multiplies integers."""

    def __init__(self, path: Path, context: int = 0, *, rounds_rows: bool = False) -> None:
        reader = GGUFReader(path)
        self.rounding = {
            one.name for one in reader.tensors if rounds_rows and one.tensor_type.name.lower() in ROUNDED_ROWS
        }
        self.fields = {key: one.contents() for key, one in reader.fields.items()}
        self.name: str = self.fields["general.architecture"]
        self.tensors = {
            one.name: dequantize(one.data, one.tensor_type).astype(np.float64) for one in reader.tensors
        }
        for name in [one for one in self.tensors if one.endswith(".scale")]:
            scaled = f"{name.removesuffix('.scale')}.weight"
            scale = self.tensors[name].reshape(-1, *[1] * (self.tensors[scaled].ndim - 1))
            self.tensors[scaled] = self.tensors[scaled] * scale
        self.heads = self.get("attention.head_count")
        self.kv_heads = self.get("attention.head_count_kv")
        self.width = self.get("embedding_length")
        self.row = self.get("attention.key_length", self.width // self.heads)
        self.context = context or self.get("context_length")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.name}.{key}", default)

    def logits(self, tokens: list[int]) -> Array:
        x = self.tensors["token_embd.weight"][tokens]
        if self.name.startswith("gemma"):
            x = x * self.width**0.5
        for layer in range(self.get("block_count")):
            x = self._block(layer, x)
        output = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        y = self._rounded(output, self._norm("output_norm", x)) @ self.tensors[output].T
        cap = self.get("final_logit_softcapping")
        return cap * np.tanh(y / cap) if cap else y

    def _block(self, layer: int, x: Array) -> Array:
        p, has_post = f"blk.{layer}.", self.name.startswith("gemma")
        is_oss = self.name == "gpt-oss"
        y = self._attention(layer, self._norm(p + "attn_norm", x))
        x = x + (self._norm(p + "post_attention_norm", y) if has_post else y)
        h = self._norm(p + ("post_attention_norm" if is_oss else "ffn_norm"), x)
        y = self._experts(p, h) if p + "ffn_gate_inp.weight" in self.tensors else self._gated(p, h)
        return x + (self._norm(p + "post_ffw_norm", y) if has_post else y)

    def _norm(self, name: str, x: Array) -> Array:
        eps = self.get("attention.layer_norm_rms_epsilon")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.tensors[name + ".weight"]

    def _dense(self, name: str, x: Array) -> Array:
        rows = self._rounded(name + ".weight", x)
        return rows @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0.0)

    def _rounded(self, tensor: str, x: Array) -> Array:
        if tensor not in self.rounding:
            return x
        kind = GGMLQuantizationType.Q8_0
        return dequantize(quantize(x.astype(np.float32), kind), kind).astype(np.float64)

    def _attention(self, layer: int, x: Array) -> Array:
        p, n = f"blk.{layer}.", len(x)
        if p + "attn_qkv.weight" in self.tensors:
            cuts = [self.heads * self.row, (self.heads + self.kv_heads) * self.row]
            q, k, v = np.split(self._dense(p + "attn_qkv", x), cuts, axis=1)
        else:
            q, k, v = (self._dense(f"{p}attn_{one}", x) for one in "qkv")
        q, k, v = (one.reshape(n, -1, self.row) for one in (q, k, v))
        if p + "attn_q_norm.weight" in self.tensors:
            q, k = self._norm(p + "attn_q_norm", q), self._norm(p + "attn_k_norm", k)
        window, is_local = self._window(layer)
        q, k = self._rotated(q, is_local), self._rotated(k, is_local)
        k, v = (np.repeat(one, self.heads // self.kv_heads, axis=1) for one in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * self.row**-0.5
        if cap := self.get("attn_logit_softcapping"):
            scores = cap * np.tanh(scores / cap)
        distance = np.arange(n)[:, None] - np.arange(n)
        scores[:, (distance < 0) | (distance >= (window or n))] = -np.inf
        # A sink is the score of one more key, without a value.
        sinks = self.tensors.get(p + "attn_sinks.weight", np.full(self.heads, -np.inf))
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (self.heads, n, 1))], -1)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances = (chances / chances.sum(-1, keepdims=True))[..., :-1]
        return self._dense(p + "attn_output", np.einsum("hij,jhd->ihd", chances, v).reshape(n, -1))

    def _window(self, layer: int) -> tuple[int, bool]:
        window = self.get("attention.sliding_window", 0)
        period = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}.get(self.name, 0)
        is_local = bool(period) and (layer + 1) % period != 0
        return (window if is_local or not period else 0), is_local and self.name == "gemma3"

    def _rotated(self, x: Array, is_local: bool) -> Array:
        size = self.get("rope.dimension_count", self.row)
        base = 10000.0 if is_local else self.get("rope.freq_base", 10000.0)
        pairs = np.arange(size // 2)
        rates, gain = base ** (-2.0 * pairs / size), 1.0
        for name in ("rope_freqs", f"rope_factors_{self._length()}"):
            rates = rates / self.tensors.get(name + ".weight", 1.0)
        kind, factor = self.get("rope.scaling.type"), self.get("rope.scaling.factor", 1.0)
        if kind == "linear" and not is_local:
            rates = rates / factor
        if kind == "yarn":
            original = self.get("rope.scaling.original_context_length")
            low, high = (
                size * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32.0, 1.0)
            )
            low, high = max(np.floor(low), 0), min(np.ceil(high), size - 1)
            kept = 1 - np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
            rates, gain = rates / factor * (1 - kept) + rates * kept, 1 + 0.1 * np.log(factor)
        angles = np.arange(len(x))[:, None, None] * rates
        if self.name == "llama":
            a, b = x[..., 0:size:2], x[..., 1:size:2]
        else:
            a, b = x[..., : size // 2], x[..., size // 2 : size]
        turned = (a * np.cos(angles) - b * np.sin(angles)), (a * np.sin(angles) + b * np.cos(angles))
        made = (
            np.stack(turned, -1).reshape(*x.shape[:2], size)
            if self.name == "llama"
            else np.concatenate(turned, -1)
        )
        return np.concatenate([made * gain, x[..., size:]], axis=-1)

    def _length(self) -> str:
        return "long" if self.context > self.get("rope.scaling.original_context_length", 2**31) else "short"

    def _gated(self, p: str, x: Array) -> Array:
        up = self._dense(p + "ffn_up", x)
        if p + "ffn_gate.weight" in self.tensors:
            gate = self._dense(p + "ffn_gate", x)
        else:
            gate, up = np.split(up, 2, axis=1)
        return self._dense(p + "ffn_down", self._active(gate) * up)

    def _active(self, x: Array) -> Array:
        if self.name.startswith("gemma"):
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    def _inner(self, gate: Array, up: Array) -> Array:
        if self.name != "gpt-oss":
            return self._active(gate) * up
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    def _experts(self, p: str, x: Array) -> Array:
        scores = self._dense(p + "ffn_gate_inp", x)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        found = np.zeros_like(x)
        for row, chance in enumerate(chances):
            chosen = np.argsort(-chance)[: self.get("expert_used_count")]
            gate, up, down = (
                self.tensors[f"{p}ffn_{one}_exps.weight"][chosen] for one in ("gate", "up", "down")
            )
            gate_bias, up_bias, down_bias = (
                self.tensors.get(f"{p}ffn_{one}_exps.bias", np.zeros((len(chances[0]), 1)))[chosen]
                for one in ("gate", "up", "down")
            )
            mine = self._rounded(f"{p}ffn_up_exps.weight", x[row])
            inner = self._inner(gate @ mine + gate_bias, up @ mine + up_bias)
            inner = self._rounded(f"{p}ffn_down_exps.weight", inner)
            shares = chance[chosen] / chance[chosen].sum()
            found[row] = shares @ (np.einsum("ewh,eh->ew", down, inner) + down_bias)
        return found


def error_of(found: Array, expected: Array) -> float:
    """The normalised mean squared error."""
    return float(((found - expected) ** 2).mean() / (expected**2).mean())


def write_encoder(
    path: Path,
    name: str,
    *,
    pooling: int = 1,
    seed: int = 1,
    stored: GGMLQuantizationType = GGMLQuantizationType.F32,
    scales: bool = False,
) -> Path:
    """Write a model that embeds: "bert" or "nomic-bert". The matrices of layers may be blocks, where
    their rows are whole ones, and may have scales."""
    writer, words = GGUFWriter(path, name), wordpiece()
    for key, value in {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "pooling_type": pooling,
    }.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_epsilon", EPSILON)
    writer.add_float32(f"{name}.rope.freq_base", 1000.0)
    writer.add_bool(f"{name}.attention.causal", False)
    writer.add_token_type_count(2)
    words.write(writer)
    rng, is_bert = np.random.default_rng(seed), name == "bert"
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(words.tokens), WIDTH), "token_types": (2, WIDTH)}
    norms = ["token_embd_norm"]
    if is_bert:
        shapes["position_embd"] = (CONTEXT, WIDTH)
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        norms += [p + "attn_output_norm", p + "layer_output_norm"]
        shapes |= {
            p + "attn_output": (WIDTH, WIDTH),
            p + "ffn_up": (HIDDEN, WIDTH),
            p + "ffn_down": (WIDTH, HIDDEN),
        }
        if is_bert:
            shapes |= {f"{p}attn_{one}": (WIDTH, WIDTH) for one in "qkv"}
        else:
            shapes |= {p + "attn_qkv": (3 * WIDTH, WIDTH), p + "ffn_gate": (HIDDEN, WIDTH)}
    for tensor, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5
        is_blocks = stored != GGMLQuantizationType.F32 and shape[-1] % GGML_QUANT_SIZES[stored][0] == 0
        if is_blocks and tensor.startswith("blk"):
            values = hg.quantize(values, stored.name.lower())
        writer.add_tensor(f"{tensor}.weight", values, raw_dtype=stored if values.dtype == np.uint8 else None)
        if scales and tensor.startswith("blk"):
            writer.add_tensor(f"{tensor}.scale", rng.uniform(0.5, 2, 1).astype(np.float32))
        if is_bert and tensor.startswith("blk"):
            writer.add_tensor(f"{tensor}.bias", rng.uniform(-0.1, 0.1, shape[0]).astype(np.float32))
    for tensor in norms:
        writer.add_tensor(f"{tensor}.weight", rng.uniform(0.5, 1.5, WIDTH).astype(np.float32))
        writer.add_tensor(f"{tensor}.bias", rng.uniform(-0.1, 0.1, WIDTH).astype(np.float32))
    save(writer)
    return path


class NumpyEncoder(NumpyModel):
    """An encoder that embeds one text, in f64."""

    def embedding(self, tokens: list[int]) -> Array:
        t, n = self.tensors, len(tokens)
        x = t["token_embd.weight"][tokens] + t["token_types.weight"][0]
        has_positions = "position_embd.weight" in t
        if has_positions:
            x = x + t["position_embd.weight"][:n]
        x = self._norm("token_embd_norm", x)
        for layer in range(self.get("block_count")):
            p = f"blk.{layer}."
            if has_positions:
                q, k, v = (self._dense(f"{p}attn_{one}", x) for one in "qkv")
            else:
                q, k, v = np.split(self._dense(p + "attn_qkv", x), 3, axis=1)
            q, k, v = (one.reshape(n, self.heads, self.row) for one in (q, k, v))
            if not has_positions:
                q, k = self._rotated(q, False), self._rotated(k, False)
            scores = np.einsum("ihd,jhd->hij", q, k) * self.row**-0.5
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            chances /= chances.sum(-1, keepdims=True)
            attended = np.einsum("hij,jhd->ihd", chances, v).reshape(n, -1)
            x = self._norm(p + "attn_output_norm", x + self._dense(p + "attn_output", attended))
            up = self._dense(p + "ffn_up", x)
            if has_positions:
                inner = up * 0.5 * (1 + np.vectorize(math.erf)(up / 2**0.5))
            else:
                gate = self._dense(p + "ffn_gate", x)
                inner = gate / (1 + np.exp(-gate)) * up
            x = self._norm(p + "layer_output_norm", x + self._dense(p + "ffn_down", inner))
        pooled = {1: x.mean(0), 2: x[0], 3: x[-1]}[self.get("pooling_type")]
        return pooled / np.linalg.norm(pooled)

    def _norm(self, name: str, x: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
        return scaled * self.tensors[name + ".weight"] + self.tensors[name + ".bias"]
