"""The logits of each architecture, beside a decoder in NumPy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import spm, write_model
from llm_models import ENTRIES, NumpyModel, error_of, write_other

import heliograph as hg

TOKENS = np.random.default_rng(11).integers(3, 500, 45).tolist()


@pytest.fixture
def session() -> Iterator[hg.Session]:
    with hg.connect("local:") as session:
        yield session


def check(session: hg.Session, path: Path, bound: float, **loading: Any) -> None:
    """Compare all logits, and those that decoding gives after the prompt."""
    llm = hg.llm.load(session, path, **loading)
    expected = NumpyModel(path, llm.context).logits(TOKENS)
    assert error_of(llm.logits(TOKENS), expected) < bound
    found = llm.generate(TOKENS, max_tokens=1, temperature=0, logprobs=True).result().logprobs[0]
    best = np.argsort(-expected[-1])[:3]
    total = np.log(np.exp(expected[-1]).sum())
    assert [token for token, _ in found.alternatives[:3]] == best.tolist()
    assert found.logprob == pytest.approx(float(expected[-1, best[0]] - total), abs=0.02)
    llm.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_are_those_of_the_reference(session: hg.Session, tmp_path: Path, name: str) -> None:
    check(session, write_model(tmp_path / "m.gguf", name), 1e-10, cache="f32")


@pytest.mark.parametrize("name", ENTRIES)
def test_logits_of_further_architectures_are_those_of_the_reference(
    session: hg.Session, tmp_path: Path, name: str
) -> None:
    check(session, write_other(tmp_path / "m.gguf", name), 1e-10, cache="f32")


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_experts_may_be_blocks(session: hg.Session, tmp_path: Path, kind: str) -> None:
    path = write_other(tmp_path / "m.gguf", "gpt-oss", experts=GGMLQuantizationType[kind])
    check(session, path, 1e-10, cache="f32", activations="f32")


#: Types of blocks of which a matrix of language models is, beside those of other tests.
STORED = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4",
    "tq1_0", "tq2_0",
)  # fmt: skip


@pytest.mark.parametrize("stored", STORED)
def test_weights_of_every_type_give_the_logits_of_the_reference(
    session: hg.Session, tmp_path: Path, stored: str
) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", stored, width=256, row=64, hidden=256, layers=1)
    check(session, path, 1e-10, cache="f32", activations="f32")


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phi3"])
def test_matrices_and_experts_may_have_a_scale(session: hg.Session, tmp_path: Path, name: str) -> None:
    path = write_other(tmp_path / "m.gguf", name, scales=True)
    check(session, path, 1e-10, cache="f32")


def test_narrow_weights_and_keys_change_little(session: hg.Session, tmp_path: Path) -> None:
    check(session, write_model(tmp_path / "m.gguf", "llama", "f16"), 1e-5)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_those_of_the_reference(session: hg.Session, tmp_path: Path, kind: str) -> None:
    entries = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    path = write_other(tmp_path / "m.gguf", "mixtral", entries=entries)
    check(session, path, 1e-10, cache="f32")


@pytest.mark.parametrize("original", [64, 256])
def test_a_context_beyond_the_original_one_takes_the_long_factors(
    session: hg.Session, tmp_path: Path, original: int
) -> None:
    entries = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    check(session, write_other(tmp_path / "m.gguf", "phi3", entries=entries), 1e-10, cache="f32")


def test_an_unknown_architecture_is_refused_by_name(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", entries={"general.architecture": "mamba"})
    with pytest.raises(hg.UnsupportedError, match=r"'mamba'[\s\S]*gemma2.*llama.*qwen3"):
        hg.llm.load(session, path)


def test_a_size_out_of_range_is_refused_by_its_key(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", entries={"llama.block_count": 100_000})
    with pytest.raises(hg.InvalidModelError, match="llama.block_count is 100000"):
        hg.llm.load(session, path)


def test_sizes_that_contradict_the_tensors_are_refused(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", entries={"llama.attention.head_count_kv": 4})
    with pytest.raises(hg.InvalidModelError, match="the tensors of m.gguf do not fit its metadata"):
        hg.llm.load(session, path)


@pytest.mark.parametrize("sizes", [[1.5], ["a"], [[1]]])
def test_sizes_of_layers_that_are_no_whole_numbers_are_refused(
    session: hg.Session, tmp_path: Path, sizes: list[Any]
) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", entries={"llama.feed_forward_length": sizes})
    with pytest.raises(hg.InvalidModelError, match="llama.feed_forward_length is"):
        hg.llm.load(session, path)


def write_too_few_words(path: Path) -> Path:
    words = spm()
    entries = {
        f"tokenizer.ggml.{key}": getattr(words, one)[:-1]
        for key, one in (("tokens", "tokens"), ("token_type", "types"), ("scores", "scores"))
    }
    return write_model(path, "llama", vocabulary=words, entries=entries)


def test_a_vocabulary_of_another_size_is_refused_before_anything_is_uploaded(tmp_path: Path) -> None:
    """A token without a word, or a word without an embedding, would end an answer in its middle."""
    path = write_too_few_words(tmp_path / "m.gguf")
    told: list[int] = []
    with (
        hg.connect("local:", progress=lambda done, total: told.append(done)) as session,
        pytest.raises(hg.InvalidModelError, match=r"words and embeddings of \d+"),
    ):
        hg.llm.load(session, path)
    assert not told


def test_a_vocabulary_of_another_size_is_refused_by_a_load_on_the_server_too(url: str, folder: Path) -> None:
    """Both APIs read it while the server compiles, and refuse it then."""
    name = write_too_few_words(folder / "few.gguf").name
    fits = write_model(folder / "fits.gguf", "llama").name

    async def scenario() -> int:
        async with hg.aio.connect(url) as session:
            with pytest.raises(hg.InvalidModelError, match=r"words and embeddings of \d+"):
                await hg.llm.load(session, await session.server_weights(name))
            llm = await hg.llm.load(session, await session.server_weights(fits))
            answer = await llm.generate(TOKENS, max_tokens=2, seed=1)
            await llm.close()
            return len(answer.tokens)

    assert asyncio.run(scenario()) == 2
    with (
        hg.connect(url) as blocking,
        pytest.raises(hg.InvalidModelError, match=r"words and embeddings of \d+"),
    ):
        hg.llm.load(blocking, blocking.server_weights(name))


def test_a_load_that_fails_before_it_compiles_leaves_the_next_compile_alone(url: str, folder: Path) -> None:
    name = write_model(folder / "m.gguf", "llama").name
    g = hg.Graph()
    g.output("y", g.input("x", (2,), "f32") * 2)
    with hg.connect(url) as session:
        with pytest.raises(hg.HeliographError, match="lots"):
            hg.llm.load(session, session.server_weights(name), memory={"cpu0": "lots"})
        assert session.compute(g, x=np.ones(2, np.float32))["y"].tolist() == [2, 2]


@pytest.mark.parametrize("cache", ["q4_0", "q8_0"])
def test_keys_may_be_kept_in_blocks_where_heads_are_whole_ones(
    session: hg.Session, tmp_path: Path, cache: Any
) -> None:
    wide = write_model(tmp_path / "wide.gguf", "llama", row=32)
    llm = hg.llm.load(session, wide, cache=cache)
    assert len(llm.generate(TOKENS, max_tokens=3, seed=1).tokens) == 3
    narrow = write_model(tmp_path / "narrow.gguf", "llama", row=16)
    with pytest.raises(hg.InvalidArgumentError, match="blocks of 32 elements, and a head has 16"):
        hg.llm.load(session, narrow, cache=cache)
    with pytest.raises(hg.InvalidArgumentError, match="it is one of f16"):
        hg.llm.load(session, narrow, cache="f64")  # type: ignore[call-overload]


def test_a_model_without_a_tensor_of_its_architecture_is_refused(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", entries={"llama.block_count": 3})
    with pytest.raises(hg.InvalidModelError, match="has no tensor 'blk.2.attn_norm.weight'"):
        hg.llm.load(session, path)
