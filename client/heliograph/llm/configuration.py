"""The sizes of a language model, from the metadata of its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph_proto.gguf import GgufHeader

#: The most of each size, so that no file makes this process take what it does not have.
MOST = {
    "block_count": 1024,
    "embedding_length": 2**20,
    "feed_forward_length": 2**22,
    "attention.head_count": 2**14,
    "attention.head_count_kv": 2**14,
    "attention.key_length": 2**16,
    "attention.value_length": 2**16,
    "context_length": 2**31 - 1,
    "expert_count": 2**14,
    "expert_used_count": 2**10,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding, in the terms of `hg.ops.rope`."""

    dimensions: int
    #: 0 pairs neighbours, 2 pairs halves.
    mode: int
    base: float = 10000.0
    scale: float = 1.0
    #: YaRN's share of extrapolation, and the magnitude of the rotated elements.
    extrapolation: float = 0.0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: The context that the model was trained with first; 0 where no scaling needs it.
    original_context: int = 0

    def rotate(self, x: hg.Value, positions: hg.Value, factors: hg.Value | None) -> hg.Value:
        """Return x [n, heads, size] rotated by positions [n]."""
        operands = (x, positions) if factors is None else (x, positions, factors)
        return hg.ops.rope(
            *operands,
            n_dims=self.dimensions,
            mode=self.mode,
            n_ctx_orig=self.original_context,
            freq_base=self.base,
            freq_scale=self.scale,
            ext_factor=self.extrapolation,
            attn_factor=self.magnitude,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )


@dataclass(frozen=True, slots=True)
class Configuration:
    """The sizes of a decoder. Attention's heads share keys and values in equal groups."""

    architecture: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    hidden: int
    vocabulary: int
    #: The longest context that the model was made for.
    context: int
    epsilon: float
    rope: Rope
    #: The keys that a token of a layer with a window sees, itself included; 0: all.
    window: int = 0
    #: Scores and logits x become c * tanh(x / c); 0: they stay.
    score_cap: float = 0.0
    logit_cap: float = 0.0
    #: The factor of scores; 0: one over the root of the size of keys.
    score_scale: float = 0.0
    #: The factor of embeddings.
    embedding_scale: float = 1.0
    experts: int = 0
    experts_used: int = 0
    #: The embedding of layers with a window, where it is another one.
    local_rope: Rope | None = None
    #: Whether rows are rounded to q8_0 before products with blocks.
    rounds_rows: bool = False

    @property
    def scale(self) -> float:
        """The factor of attention's scores."""
        return self.score_scale or self.key_size**-0.5


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata of a file, whose keys begin with the architecture's name."""

    header: GgufHeader

    @property
    def name(self) -> str:
        """The file's name."""
        return self.header.name

    @property
    def architecture(self) -> str:
        """The architecture's name."""
        return self.header.architecture

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on, or the default. Raises InvalidModelError."""
        found = self._find(key, default)
        if isinstance(found, np.ndarray) and found.size and found.dtype.kind in "iu":
            found = self._same(key, found)
        is_whole = isinstance(found, (int, np.integer)) and not isinstance(found, bool)
        most = MOST.get(key, 2**31 - 1)
        if found is default or (is_whole and 1 <= found <= most):
            return int(found)
        raise self.invalid(f"{self.architecture}.{key} is {found!r:.40}", f"a number from 1 to {most}")

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number, or the default. Raises InvalidModelError."""
        found = self._find(key, default)
        if isinstance(found, (int, float, np.number)) and np.isfinite(found):
            return float(found)
        raise self.invalid(f"{self.architecture}.{key} is {found!r:.40}", "a finite number")

    def word(self, key: str, default: str) -> str:
        """A text, or the default."""
        return str(self.header.metadata.get(f"{self.architecture}.{key}", default))

    def rows_of(self, tensor: str) -> int:
        """The rows of a matrix. Raises InvalidModelError if the file lacks it."""
        shapes = [one.shape for one in self.header.tensors if one.name == tensor]
        if not shapes or len(shapes[0]) != 2:
            raise self.invalid(f"it has no matrix {tensor!r}")
        return shapes[0][0]

    def invalid(self, why: str, wanted: str = "") -> hg.InvalidModelError:
        """Return the error for a file that is no model of its architecture."""
        expected = f"; it should be {wanted}" if wanted else ""
        return hg.InvalidModelError(
            f"{self.name} is no valid {self.architecture} model: {why}{expected}",
            advice="convert the model to GGUF again",
        )

    def _find(self, key: str, default: Any) -> Any:
        found = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise self.invalid(f"its metadata lack {self.architecture}.{key}")
        return found

    def _same(self, key: str, found: Any) -> Any:
        """The one number of all layers."""
        if (found != found[0]).any():
            raise hg.UnsupportedError(
                f"{self.name}: layers differ in {self.architecture}.{key}",
                advice="models whose layers have one size are supported",
            )
        return int(found[0])


def decoder(fields: Fields, mode: int, **more: Any) -> Configuration:
    """Return the configuration that all decoders have, and `more` of it. `mode`: that of `Rope`."""
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    key_size = fields.size("attention.key_length", max(width // heads, 1))
    known: dict[str, Any] = {
        "architecture": fields.architecture,
        "width": width,
        "layers": fields.size("block_count"),
        "heads": heads,
        "kv_heads": fields.size("attention.head_count_kv", heads),
        "key_size": key_size,
        "value_size": fields.size("attention.value_length", key_size),
        "hidden": fields.size("feed_forward_length"),
        "vocabulary": fields.rows_of("token_embd.weight"),
        "context": fields.size("context_length"),
        "epsilon": fields.real("attention.layer_norm_rms_epsilon"),
        "rope": rope(fields, mode, key_size),
    }
    made = Configuration(**{**known, **more})
    if made.heads % made.kv_heads:
        raise fields.invalid(f"{made.heads} heads cannot share {made.kv_heads} of keys")
    return made


def rope(fields: Fields, mode: int, key_size: int) -> Rope:
    """Return the embedding of positions that the metadata describe. Raises UnsupportedError."""
    kind = fields.word("rope.scaling.type", "none")
    factor = fields.real("rope.scaling.factor", 1.0) or 1.0
    trained = fields.size("context_length")
    made: dict[str, Any] = {
        "dimensions": fields.size("rope.dimension_count", key_size),
        "mode": mode,
        "base": fields.real("rope.freq_base", 10000.0),
        "magnitude": fields.real("rope.scaling.attn_factor", 1.0),
    }
    if kind == "linear":
        return Rope(**made, scale=1 / factor)
    if kind == "yarn":
        return Rope(
            **made,
            scale=1 / factor,
            extrapolation=1.0,
            beta_fast=fields.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.real("rope.scaling.yarn_beta_slow", 1.0),
            original_context=fields.size("rope.scaling.original_context_length", trained),
        )
    if kind in ("none", "longrope", ""):
        return Rope(**made, original_context=fields.size("rope.scaling.original_context_length", trained))
    raise hg.UnsupportedError(
        f"{fields.name}: positions are scaled by {kind!r}", advice="none, linear, yarn and longrope are known"
    )
