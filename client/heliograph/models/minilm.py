"""Sentence embeddings with all-MiniLM-L6-v2, or another sentence-transformers model of BERT's kind.

Tokenising, truncation, pooling and normalisation are those of sentence-transformers for the model's
own files. Texts are sorted by length and padded to a few shapes, and there is one plan for each
shape; the weights are uploaded with the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heliograph import Plan, Session
from heliograph.errors import ConfigurationError, InvalidModelError
from heliograph.models.bert import BertConfig, BertEncoder, join_attention_weights, weight_shapes

#: Shapes that texts are padded to: so many tokens, so many sentences at once.
LENGTHS = (16, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)


def read_json(path: Path) -> Any:
    """A JSON file of a model. Raises InvalidModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        advice = "name the folder that holds config.json, tokenizer.json and model.safetensors"
        raise InvalidModelError(f"cannot read {path}: {error.strerror}", advice=advice) from None
    except ValueError as error:
        raise InvalidModelError(f"{path} is not JSON: {error}", advice="copy the file again") from None


def read_config(folder: Path) -> BertConfig:
    """The encoder's sizes from config.json. Raises InvalidModelError."""
    found = read_json(folder / "config.json")
    if found.get("model_type") != "bert" or found.get("hidden_act") != "gelu":
        what = f"{found.get('model_type')!r} with {found.get('hidden_act')!r}"
        raise InvalidModelError(f"{folder} is {what}; this reads 'bert' with 'gelu'")
    try:
        config = BertConfig(**{name: found[name] for name in BertConfig.__dataclass_fields__})
    except KeyError as error:
        raise InvalidModelError(f"{folder / 'config.json'} lacks {error}") from None
    return config


def read_max_tokens(folder: Path, config: BertConfig) -> int:
    """The most tokens of a text that count, special ones included."""
    path = folder / "sentence_bert_config.json"
    limit = read_json(path).get("max_seq_length") if path.exists() else None
    return min(limit or config.max_position_embeddings, config.max_position_embeddings)


def check_pooling(folder: Path) -> None:
    """Raises InvalidModelError unless the model pools by the mean and then normalises."""
    modules = [module.get("type", "").rpartition(".")[2] for module in read_json(folder / "modules.json")]
    pooling = read_json(folder / "1_Pooling" / "config.json")
    modes = [name for name, on in pooling.items() if name.startswith("pooling_mode") and on]
    if modes != ["pooling_mode_mean_tokens"] or "Normalize" not in modules:
        raise InvalidModelError(f"{folder} pools by {modes} in {modules}; this does mean, then Normalize")


def read_weights(folder: Path, config: BertConfig) -> dict[str, Any]:
    """The weights by name, f32, checked. Raises InvalidModelError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise missing_extra("safetensors") from None
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InvalidModelError(f"{path} is missing", advice="name the folder that holds the weights")
    weights = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name, shape in weight_shapes(config).items():
                weights[name] = check_weight(path, name, file.get_tensor(name), shape)
    except (SafetensorError, OSError) as error:
        advice = "the file is damaged or of another model; copy it again"
        raise InvalidModelError(f"cannot read {path}: {error}", advice=advice) from None
    return weights


def check_weight(path: Path, name: str, array: Any, shape: tuple[int, ...]) -> Any:
    """The weight in f32. Raises InvalidModelError if it has another shape than the configuration
    says."""
    if array.shape != shape:
        raise InvalidModelError(f"{path}: {name} has shape {array.shape}; config.json says {shape}")
    return np.ascontiguousarray(array, np.float32)


def missing_extra(package: str) -> ConfigurationError:
    return ConfigurationError(
        f"the package {package!r} is not installed", advice="pip install 'heliograph[models]'"
    )


class Embedder:
    """Embeds texts on a session's devices.

    `model`: a folder with config.json, tokenizer.json, model.safetensors and the pooling's files.
    `compiling`: arguments of `session.compile`, such as devices and memory. Raises
    InvalidModelError if a file is missing or damaged.
    """

    def __init__(self, session: Session, model: Path | str, **compiling: Any) -> None:
        self.session = session
        self._compiling = compiling
        folder = Path(model)
        self.config = read_config(folder)
        check_pooling(folder)
        self.max_tokens = read_max_tokens(folder, self.config)
        self.tokenizer = self._read_tokenizer(folder)
        weights = join_attention_weights(read_weights(folder, self.config), self.config)
        self.encoder = BertEncoder(self.config, weights)
        self._plans: dict[tuple[int, int], Plan] = {}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{batch}x{length}" for batch, length in self._plans)
        return f"<Embedder on {self.session!r}, plans: {shapes or 'none'}>"

    @property
    def plans(self) -> list[Plan]:
        """One for each shape of texts that was met."""
        return list(self._plans.values())

    def embed(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Unit vectors, f32 [len(texts), hidden size], in the order of the texts."""
        tokens = self.tokenize(texts)
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        result = np.empty((len(texts), self.config.hidden_size), np.float32)
        futures = []
        for start in range(0, len(order), BATCHES[-1]):
            chosen = order[start : start + BATCHES[-1]]
            ids, mask = pad([tokens[i] for i in chosen], self.max_tokens)
            futures.append((chosen, self.plan(*ids.shape).submit(ids=ids, mask=mask)))
        for chosen, future in futures:
            result[chosen] = future.result()["embedding"][: len(chosen)]
        return result

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token numbers of each text, special ones included, cut at the model's length."""
        return [one.ids for one in self.tokenizer.encode_batch([text.strip() for text in texts])]

    def plan(self, batch: int, length: int) -> Plan:
        """The plan for a shape, compiled at first use."""
        if (batch, length) not in self._plans:
            graph = self.encoder.sentence_embeddings(batch, length)
            self._plans[batch, length] = self.session.compile(graph, **self._compiling)
        return self._plans[batch, length]

    def _read_tokenizer(self, folder: Path) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise missing_extra("tokenizers") from None
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises plain Exception for a bad file
            raise InvalidModelError(f"cannot read {path}: {error}", advice="copy the file again") from None
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_tokens)
        return tokenizer


def pad(tokens: Sequence[Sequence[int]], max_tokens: int) -> tuple[Any, Any]:
    """Token numbers (i32) and mask (f32) of the smallest offered shape that holds the texts."""
    longest = max(map(len, tokens))
    length = next((n for n in LENGTHS if longest <= n), longest)
    batch = next(n for n in BATCHES if len(tokens) <= n)
    ids = np.zeros((batch, min(length, max(max_tokens, longest))), np.int32)
    mask = np.zeros(ids.shape, np.float32)
    for row, one in enumerate(tokens):
        ids[row, : len(one)] = one
        mask[row, : len(one)] = 1.0
    return ids, mask
