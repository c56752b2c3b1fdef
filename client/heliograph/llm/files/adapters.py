"""LoRA adapters: files with pairs of thin matrices, whose products are added to a model's matrices.

The product of a matrix W with x becomes W x + s * (alpha / rank) * B (A x), with the scale s of
each adapter. Scales are an input of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph.llm.files.weights import File, LocalWeights, ServerFileWeights, open_file, unsupported
from heliograph.llm.products import multiply, multiply_chosen

ops = hg.ops

#: The most adapters of a model: each token pays for all of them.
MOST = 16
#: The input with a scale of each adapter, for all tokens or for each of them.
SCALES = "adapter_scales"
#: A token's embedding is a row of A, so both matrices lie the other way round.
EMBEDDING = "token_embd.weight"
_ADVICE = "convert the adapter again, for the model that it was trained for"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter to load with a model: `hg.llm.load(session, file, adapters=[...])`."""

    #: A path, or a file on the server: `session.server_weights("adapter.gguf")`.
    file: str | Path | hg.ServerWeights
    #: The factor of what the adapter adds; 0: it changes nothing.
    scale: float = 1.0
    #: The default is the file's name without ".gguf".
    name: str = ""


#: An adapter, or its file.
AdapterArgument: TypeAlias = str | Path | hg.ServerWeights | Adapter


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter's matrices, which fit the model."""

    name: str
    weights: LocalWeights | ServerFileWeights
    #: alpha / rank by the name of the model's tensor.
    factors: Mapping[str, float]


@dataclass
class Adaptation:
    """The adapters of a graph under construction."""

    loras: Sequence[Lora]
    #: f32 [1, adapters], or [n, adapters] for n tokens.
    scales: hg.Value
    #: As in the model's configuration.
    rounds_rows: bool
    _columns: dict[tuple[int, float], hg.Value] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Raises InvalidModelError for a pair that no product of the whole graph has."""
        for lora in self.loras:
            if unused := sorted(set(lora.factors) - self._used):
                raise hg.InvalidModelError(
                    f"{lora.name} changes {unused[0]!r:.80}, which is no matrix of a product", advice=_ADVICE
                )

    def product(self, tensor: str, y: hg.Value, x: hg.Value) -> hg.Value:
        """Return the product y of a model's matrix and rows x with those of the adapters added."""
        for number, lora in self._having(tensor):
            inner = self._multiply(self._matrix(number, lora, tensor, "a"), x)
            scaled = inner * self._column(number, lora, tensor)
            y = y + self._multiply(self._matrix(number, lora, tensor, "b"), scaled)
        return y

    def experts(self, tensor: str, y: hg.Value, x: hg.Value, chosen: hg.Value) -> hg.Value:
        """As `product`, for the experts that each token chose: [n, used, m]."""
        for number, lora in self._having(tensor):
            inner = self._multiply(self._matrix(number, lora, tensor, "a"), x, chosen)
            scaled = inner * hg.expand_dims(self._column(number, lora, tensor), axis=2)
            y = y + self._multiply(self._matrix(number, lora, tensor, "b"), scaled, chosen)
        return y

    def embedding(self, x: hg.Value, tokens: hg.Value) -> hg.Value:
        """Return the embeddings x of tokens with those of the adapters added."""
        for number, lora in self._having(EMBEDDING):
            rows = ops.get_rows(self._matrix(number, lora, EMBEDDING, "a"), tokens)
            scaled = rows * self._column(number, lora, EMBEDDING)
            x = x + self._multiply(self._matrix(number, lora, EMBEDDING, "b"), scaled)
        return x

    def _multiply(self, matrix: hg.Value, x: hg.Value, *chosen: hg.Value) -> hg.Value:
        product = multiply_chosen if chosen else multiply
        return product(matrix, x, *chosen, rounds_rows=self.rounds_rows)

    def _having(self, tensor: str) -> list[tuple[int, Lora]]:
        self._used.add(tensor)
        return [(number, lora) for number, lora in enumerate(self.loras) if tensor in lora.factors]

    def _matrix(self, number: int, lora: Lora, tensor: str, which: str) -> hg.Value:
        with self.scales.graph.scope(f"adapter{number}"):
            return lora.weights.add(self.scales.graph, f"{tensor}.lora_{which}")

    def _column(self, number: int, lora: Lora, tensor: str) -> hg.Value:
        """The factors of all tokens, or of each, [., 1]."""
        key = number, lora.factors[tensor]
        if key not in self._columns:
            self._columns[key] = self.scales[:, number : number + 1] * key[1]
        return self._columns[key]


def adapt(graph: hg.Graph, loras: Sequence[Lora], rows: int = 1, *, rounds_rows: bool) -> Adaptation | None:
    """Add the input of scales to a graph: one row for all tokens, or one for each. None: the model
    has no adapters."""
    if not loras:
        return None
    return Adaptation(loras, graph.input(SCALES, (rows, len(loras)), "f32"), rounds_rows)


@dataclass(slots=True)
class Scales:
    """The adapters of a model by name, and their scales."""

    loras: tuple[Lora, ...] = ()
    values: list[float] = field(default_factory=list)

    @property
    def by_name(self) -> dict[str, float]:
        """The scale of each adapter."""
        return {lora.name: value for lora, value in zip(self.loras, self.values, strict=True)}

    def set(self, name: str, scale: float) -> None:
        """Set the scale of an adapter. Raises InvalidArgumentError."""
        self.values[self.place(name)] = checked_scale(scale)

    def place(self, name: str) -> int:
        """Return the number of an adapter. Raises InvalidArgumentError."""
        names = [lora.name for lora in self.loras]
        if name not in names:
            raise hg.InvalidArgumentError(
                f"the model has no adapter {name!r:.80}", advice=f"it has {', '.join(names) or 'none'}"
            )
        return names.index(name)

    def row(self) -> np.ndarray[Any, Any]:
        """Return the scales, f32 [1, adapters]."""
        return np.array([self.values], np.float32)

    def only(self, name: str) -> Scales:
        """Return the adapters with those scales 0 that have another name."""
        return Scales(
            self.loras,
            [value * (lora.name == name) for lora, value in zip(self.loras, self.values, strict=True)],
        )

    def silent(self) -> Scales:
        """Return the adapters with scales 0."""
        return self.only("")


def checked_scale(scale: object) -> float:
    """Return a scale. Raises InvalidArgumentError."""
    if not isinstance(scale, Real) or isinstance(scale, bool) or not isfinite(np.float32(scale)):
        raise hg.InvalidArgumentError(
            f"the scale of an adapter is {scale!r:.40}", advice="a finite number, 1 as it was trained"
        )
    return float(scale)


def open_adapters(model: File, given: Sequence[AdapterArgument]) -> Scales:
    """Read the headers of adapters, and check that they fit the model.

    Raises InvalidModelError, UnsupportedError and InvalidArgumentError.
    """
    if not isinstance(given, (list, tuple)) or len(given) > MOST:
        raise hg.InvalidArgumentError(
            f"adapters is {given!r:.80}", advice=f"a list of up to {MOST} files or hg.llm.Adapter"
        )
    found = Scales()
    for one in given:
        adapter = one if isinstance(one, Adapter) else Adapter(one)
        lora = _open(model, adapter)
        if lora.name in found.by_name:
            raise hg.InvalidArgumentError(
                f"two adapters are named {lora.name!r:.80}", advice="name one: hg.llm.Adapter(file, name=...)"
            )
        found.loras += (lora,)
        found.values.append(checked_scale(adapter.scale))
    return found


def _open(model: File, adapter: Adapter) -> Lora:
    opened = open_file(adapter.file)
    header, wanted = opened.header, model.header.architecture
    kind = header.value("general.type", str, "model"), header.value("adapter.type", str, "lora")
    if kind != ("adapter", "lora"):
        raise hg.InvalidModelError(
            f"{header.name} is no LoRA adapter: its general.type is {kind[0]!r:.40}, its adapter.type "
            f"{kind[1]!r:.40}",
            advice="llama.cpp's convert_lora_to_gguf.py makes one",
        )
    if header.architecture != wanted:
        raise hg.InvalidModelError(
            f"{header.name} is an adapter for the architecture {header.architecture!r:.40}, "
            f"{model.header.name} is {wanted!r}",
            advice="take the model that the adapter was trained for",
        )
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise hg.UnsupportedError(
            f"{header.name} is an activated LoRA, which applies from some token on",
            advice="adapters that apply to all tokens are supported",
        )
    alpha = header.value("adapter.lora.alpha", float, 0.0)
    if not isfinite(alpha):
        raise hg.InvalidModelError(f"{header.name}: adapter.lora.alpha is {alpha}", advice=_ADVICE)
    ranks = _ranks(model, opened)
    factors = {tensor: alpha / rank if alpha else 1.0 for tensor, rank in ranks.items()}
    return Lora(adapter.name or header.name.removesuffix(".gguf"), opened.weights, factors)


def _ranks(model: File, adapter: File) -> dict[str, int]:
    """Return the rank of each pair by the tensor that it changes. Raises InvalidModelError, which
    names a tensor that does not fit."""
    name, shapes, own = adapter.header.name, model.weights.shapes, adapter.weights.shapes
    tensors: dict[str, None] = {}
    for one in adapter.header.tensors:
        if one.type is None:
            raise unsupported(name, one.name, one.type_name)
        tensor, _, part = one.name.rpartition(".lora_")
        if part not in ("a", "b"):
            raise hg.UnsupportedError(
                f"{name} has a tensor {one.name!r}, which is of no pair .lora_a and .lora_b",
                advice="adapters that change matrices alone are supported",
            )
        tensors[tensor] = None
    found = {}
    for tensor in tensors:
        for part in "ab":
            if f"{tensor}.lora_{part}" not in own:
                raise hg.InvalidModelError(f"{name} has no tensor '{tensor}.lora_{part}'", advice=_ADVICE)
        if len(shapes.get(tensor, ())) not in (2, 3):
            raise hg.InvalidModelError(
                f"{name} changes {tensor!r:.80}, and {model.header.name} has no such matrix", advice=_ADVICE
            )
        found[tensor] = _rank(name, tensor, shapes[tensor], own)
    return found


def _rank(name: str, tensor: str, shape: tuple[int, ...], own: Mapping[str, tuple[int, ...]]) -> int:
    """Return the rank of a pair for a matrix of this shape. Raises InvalidModelError."""
    a, b = own[f"{tensor}.lora_a"], own[f"{tensor}.lora_b"]
    rank = b[-1] if b else 0
    rows, columns = shape[-2:]
    wanted: tuple[tuple[int, ...], tuple[int, ...]]
    if tensor == EMBEDDING:
        wanted = (rows, rank), (columns, rank)
    else:
        wanted = (*shape[:-2], rank, columns), (*shape[:-2], rows, rank)
    for part, there, fits in zip("ab", (a, b), wanted, strict=True):
        if there != fits or not rank:
            raise hg.InvalidModelError(
                f"{name}: tensor '{tensor}.lora_{part}' has the shape {there}, where the model's {shape} "
                f"takes {fits}",
                advice=_ADVICE,
            )
    return rank
