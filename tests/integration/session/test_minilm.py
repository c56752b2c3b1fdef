"""MiniLM, the model of the demo: against independent references, over every transport."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bert_reference import embed as reference_embed
from paths import GOLDEN

import heliograph as hg
from heliograph.demo import find_model
from heliograph.models.bert import BertConfig, BertEncoder, join_attention_weights, weight_shapes
from heliograph.models.minilm import Embedder, pad

SMALL = BertConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_hidden_layers=2,
    vocab_size=50,
    max_position_embeddings=24,
    layer_norm_eps=1e-12,
)


def small_weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0.0, 0.3, shape).astype(np.float32) for name, shape in weight_shapes(SMALL).items()
    }


def normalised_error(found: Any, expected: Any) -> float:
    return float(np.sum((found - expected) ** 2) / np.sum(np.square(expected)))


def test_a_small_encoder_equals_the_reference_in_float64(session: hg.Session) -> None:
    """On random weights, with padding, over every transport and with every length of sentence."""
    weights = small_weights(seed=7)
    rng = np.random.default_rng(8)
    ids = rng.integers(0, SMALL.vocab_size, (3, 9)).astype(np.int32)
    mask = (np.arange(9) < np.array([[9], [4], [1]])).astype(np.float32)
    encoder = BertEncoder(SMALL, join_attention_weights(weights, SMALL))
    plan = session.compile(encoder.sentence_embeddings(3, 9))
    found = plan.run(ids=ids, mask=mask)["embedding"]
    expected = reference_embed(
        weights, ids, mask, SMALL.num_attention_heads, SMALL.num_hidden_layers, SMALL.layer_norm_eps
    )
    assert normalised_error(found, expected) < 1e-9


def test_the_real_model_equals_pytorch(session: hg.Session) -> None:
    """Golden vectors by PyTorch in float64: an empty text, odd characters, and one of 400 words."""
    golden = np.load(GOLDEN / "minilm.npz")
    texts = [str(text) for text in golden["texts"]]
    found = Embedder(session, find_model()).embed(texts)
    assert normalised_error(found, golden["embeddings"]) < 1e-9
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


def test_another_shape_uploads_nothing_again(url: str) -> None:
    """Weights belong to the session, keyed by content."""
    told: list[tuple[int, int]] = []
    with hg.connect(url, progress=lambda done, total: told.append((done, total))) as session:
        embedder = Embedder(session, find_model())
        embedder.embed(["one"])
        assert told[-1][0] == told[-1][1] > 80e6
        told.clear()
        embedder.embed(["two words " * 20, "and more"])
        assert told == []


def test_a_sentence_has_the_same_bits_alone_and_in_a_batch(session: hg.Session) -> None:
    embedder = Embedder(session, find_model())
    texts = ["alone", "together with", "a few other ones", "of about the same length"]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.array_equal(together, alone)


def test_texts_are_padded_to_few_shapes() -> None:
    ids, mask = pad([[1, 2, 3], [4]], 256)
    assert ids.shape == mask.shape == (2, 16)
    assert mask.sum() == 4
    assert ids[0, :3].tolist() == [1, 2, 3]


def copy_of_model(tmp_path: Path) -> Path:
    """The model's small files, and a link to its weights."""
    source, target = find_model(), tmp_path / "model"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors"))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return target


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "modules.json", "1_Pooling/config.json"]
)
def test_a_model_directory_that_lacks_a_file_is_a_typed_error(tmp_path: Path, name: str) -> None:
    model = copy_of_model(tmp_path)
    (model / name).unlink()
    with hg.connect("local:") as session, pytest.raises(hg.InvalidModelError, match=Path(name).name):
        Embedder(session, model)


def test_a_truncated_safetensors_file_is_a_typed_error(tmp_path: Path) -> None:
    model = copy_of_model(tmp_path)
    whole = (find_model() / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with hg.connect("local:") as session, pytest.raises(hg.InvalidModelError, match="damaged"):
        Embedder(session, model)


def test_a_safetensors_file_that_lacks_a_weight_is_a_typed_error(tmp_path: Path) -> None:
    model = copy_of_model(tmp_path)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with hg.connect("local:") as session, pytest.raises(hg.InvalidModelError, match="model.safetensors"):
        Embedder(session, model)


def test_a_model_of_another_kind_is_a_typed_error(tmp_path: Path) -> None:
    model = copy_of_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with hg.connect("local:") as session, pytest.raises(hg.InvalidModelError, match="gpt2"):
        Embedder(session, model)
