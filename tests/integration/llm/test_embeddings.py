"""Embeddings of models that write no text, beside an encoder in NumPy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from llm_models import CONTEXT, NumpyEncoder, write_encoder

import heliograph as hg

TEXTS = [
    "the daemon serves graphs to many clients",
    "fox",
    *(f"a client {n} " * (n % 7 + 1) for n in range(20)),
]


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
@pytest.mark.parametrize("pooling", [1, 2, 3])
def test_embeddings_are_those_of_the_reference(tmp_path: Path, name: str, pooling: int) -> None:
    path = write_encoder(tmp_path / "m.gguf", name, pooling=pooling)
    with hg.connect("local:") as session:
        llm = hg.llm.load(session, path)
        found = llm.embed(TEXTS)
        reference = NumpyEncoder(path)
        for row, text in zip(found, TEXTS, strict=True):
            np.testing.assert_allclose(row, reference.embedding(llm.tokenizer.encode(text)), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
def test_matrices_in_nvfp4_have_scales(tmp_path: Path, name: str) -> None:
    path = write_encoder(tmp_path / "m.gguf", name, stored=GGMLQuantizationType.NVFP4, scales=True)
    with hg.connect("local:") as session:
        llm = hg.llm.load(session, path)
        reference = NumpyEncoder(path)
        for row, text in zip(llm.embed(TEXTS[:4]), TEXTS, strict=False):
            np.testing.assert_allclose(row, reference.embedding(llm.tokenizer.encode(text)), atol=1e-5)


def test_a_text_alone_and_beside_others_has_the_same_embedding(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m.gguf", "bert")
    with hg.connect("local:") as session:
        llm = hg.llm.load(session, path)
        together = llm.embed(TEXTS[:9])
        for row, text in zip(together, TEXTS, strict=False):
            np.testing.assert_allclose(llm.embed(text)[0], row, atol=1e-6)
        assert llm.embed([]).shape == (0, llm.config.width)
        llm.close()
        np.testing.assert_array_equal(llm.embed(TEXTS[:9]), together)


def test_asyncio_embeds_too(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m.gguf", "nomic-bert")
    with hg.connect("local:") as session:
        expected = hg.llm.load(session, path).embed(TEXTS[:3])

    async def scenario() -> None:
        async with hg.aio.connect("local:") as session:
            llm = await hg.llm.load(session, path)
            np.testing.assert_array_equal(await llm.embed(TEXTS[:3]), expected)

    asyncio.run(scenario())


def test_an_encoder_refuses_to_write_and_texts_that_are_too_long(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m.gguf", "bert")
    with hg.connect("local:") as session:
        llm = hg.llm.load(session, path)
        for call in (llm.generate, llm.logits):
            with pytest.raises(hg.UnsupportedError, match="'bert' writes no text"):
                call("fox")
        with pytest.raises(hg.LimitExceededError, match=f"the context {CONTEXT}"):
            llm.embed("fox " * 200)
