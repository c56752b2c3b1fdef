"""LoRA adapters for the models of tests, as llama.cpp's converter writes them, and models with
adapters merged into them in f64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_files import save
from llm_models import NumpyModel

#: The tensors of an adapter are of the size of the model's products.
STRENGTH = 0.7


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float | None = 8.0,
    seed: int = 1,
    stored: str = "f32",
    wanted: Callable[[str], bool] = lambda name: name != "token_embd.weight",
    architecture: str = "",
    entries: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    strength: float = STRENGTH,
) -> Path:
    """Write an adapter for the matrices of a model that are wanted. `extra` replaces tensors and
    adds further ones; an empty one leaves a tensor out."""
    reader = GGUFReader(model)
    writer = GGUFWriter(path, architecture or reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in (entries or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        (writer.add_array if isinstance(value, list) else writer.add_string)(key, value)
    rng, made = np.random.default_rng(seed), {}
    for one in reader.tensors:
        shape = tuple(int(size) for size in reversed(one.shape))
        if len(shape) < 2 or not one.name.endswith(".weight") or not wanted(one.name):
            continue
        *experts, rows, columns = shape
        a = rng.standard_normal((*experts, rank, columns)) * columns**-0.5
        b = rng.standard_normal((*experts, rows, rank)) * strength / (alpha or 1) * rank**0.5
        if one.name == "token_embd.weight":
            a, b = rng.standard_normal((rows, rank)), rng.standard_normal((columns, rank)) * strength
        made[f"{one.name}.lora_a"], made[f"{one.name}.lora_b"] = a, b
    for name, values in {**made, **(extra or {})}.items():
        if values.size:
            _add(writer, name, values.astype(np.float32), stored)
    save(writer)
    return path


def _add(writer: GGUFWriter, name: str, values: np.ndarray[Any, Any], stored: str) -> None:
    # As the converter: what has no whole blocks is kept as f16.
    kind = GGMLQuantizationType[stored.upper()]
    if stored == "q8_0" and values.shape[-1] % 32:
        kind = GGMLQuantizationType.F16
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def merged(model: Path, *adapters: tuple[Path, float]) -> NumpyModel:
    """Return a model in f64 whose matrices have the products of adapters added."""
    found = NumpyModel(model)
    for path, scale in adapters:
        reader = GGUFReader(path)
        alpha = reader.fields.get("adapter.lora.alpha")
        own = {one.name: dequantize(one.data, one.tensor_type).astype(np.float64) for one in reader.tensors}
        for name in sorted({one.rpartition(".lora_")[0] for one in own}):
            a, b = own[f"{name}.lora_a"], own[f"{name}.lora_b"]
            factor = scale * (float(alpha.contents()) / b.shape[-1] if alpha else 1.0)
            added = a @ b.T if name == "token_embd.weight" else b @ a
            found.tensors[name] = found.tensors[name] + factor * added
    return found
