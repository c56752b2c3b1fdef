"""Weights in files on the server: `session.models`, `session.server_weights`, graphs of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_daemons import running_daemon
from gguf import GGMLQuantizationType, GGUFWriter
from gguf import quantize as gguf_quantize
from gguf_files import save, write_model
from safetensors.numpy import save_file

import heliograph as hg
from heliograph.llm import read_header

ELEMENTS = np.random.default_rng(20251123).standard_normal((64, 32)).astype(np.float32)
ROWS = ELEMENTS.reshape(32, 64)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A daemon with a folder of models: its URL, and the folder."""
    folder = tmp_path_factory.mktemp("models")
    save_file({"w": ELEMENTS, "bias": ELEMENTS[0]}, folder / "plain.safetensors")
    writer = GGUFWriter(folder / "small.gguf", "llama")
    rows = gguf_quantize(ROWS, GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk", rows, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_block_count(3)
    writer.add_token_list(["a", "ü"])
    save(writer)
    with running_daemon("--models", str(folder), "--device", "cpu:threads=2,memory=1GiB") as url:
        yield url, folder


def graph_of(weights: hg.ServerWeights) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 64), "f32") @ g.weight("w", weights["w"]) + g.weight("b", weights["bias"]))
    return g


def test_a_graph_uses_a_file_of_the_server_and_uploads_nothing(served: tuple[str, Path]) -> None:
    told: list[int] = []
    with hg.connect(served[0], progress=lambda done, total: told.append(done)) as session:
        plain, small = session.models()
        assert (str(plain), str(small)) == ("plain.safetensors", "small.gguf")
        assert plain.gguf is None and plain.size_bytes == (served[1] / plain.name).stat().st_size
        weights = session.server_weights(plain)
        assert list(weights) == ["bias", "w"] or list(weights) == ["w", "bias"]
        assert weights["w"].shape == (64, 32) and weights["w"].dtype.name == "f32"
        x = np.ones((4, 64), np.float32)
        found = session.compile(graph_of(weights)).run(x=x)["y"]
        np.testing.assert_allclose(found, x @ ELEMENTS + ELEMENTS[0], rtol=1e-5, atol=1e-5)
    assert told == []


def test_a_quantized_tensor_of_a_gguf_file_is_a_weight(served: tuple[str, Path]) -> None:
    with hg.connect(served[0]) as session:
        weight = session.server_weights("small.gguf")["blk"]
        assert weight.shape == (32, 64) and weight.dtype.name == "q8_0"
        g = hg.Graph()
        g.output("y", hg.ops.mul_mat(g.weight("w", weight), g.input("x", (2, 64), "f32")))
        x = np.ones((2, 64), np.float32)
        found = session.compile(g).run(x=x)["y"]
        np.testing.assert_allclose(found, x @ ROWS.T, rtol=0.05, atol=0.2)


def test_a_gguf_file_comes_with_its_header(served: tuple[str, Path]) -> None:
    with hg.connect(served[0]) as session:
        header = session.server_weights("small.gguf").header
        assert header is not None
        assert header.value("llama.block_count", int) == 3
        assert list(header.words("tokenizer.ggml.tokens")) == ["a", "ü"]
        assert session.server_weights("plain.safetensors").header is None


def test_asyncio_has_the_same_names(served: tuple[str, Path]) -> None:
    async def scenario() -> None:
        async with hg.aio.connect(served[0]) as session:
            found = {one.name: one for one in await session.models()}
            assert found["small.gguf"].gguf
            assert list((await session.server_weights(found["small.gguf"])).values())
            weights = await session.server_weights("plain.safetensors")
            plan = await session.compile(graph_of(weights))
            assert (await plan.run(x=np.zeros((4, 64), np.float32)))["y"].shape == (4, 32)

    asyncio.run(scenario())


def test_an_array_of_the_same_bytes_is_not_uploaded_either(served: tuple[str, Path]) -> None:
    told: list[int] = []
    with hg.connect(served[0], progress=lambda done, total: told.append(done)) as session:
        session.server_weights("plain.safetensors")
        g = hg.Graph()
        g.output("y", g.weight("w", ELEMENTS) * 2.0)
        session.compile(g)
    assert told == []


def test_refusals_name_what_is_wrong(served: tuple[str, Path]) -> None:
    with hg.connect(served[0]) as session:
        with pytest.raises(hg.InvalidArgumentError, match="is not a path"):
            session.server_weights("../plain.safetensors")
        with pytest.raises(hg.InvalidModelError, match="has no model"):
            session.server_weights("other.gguf")
        weights = session.server_weights("plain.safetensors")
        with pytest.raises(hg.InvalidArgumentError, match="did you mean 'bias'"):
            weights["bia"]
        g = hg.Graph()
        with pytest.raises(hg.InvalidArgumentError, match="is f32"):
            g.weight("w", weights["w"], "f16")


def test_a_file_that_was_replaced_is_a_typed_error_and_can_be_listed_again(served: tuple[str, Path]) -> None:
    url, folder = served
    save_file({"w": ELEMENTS, "bias": ELEMENTS[1]}, folder / "changing.safetensors")
    with hg.connect(url) as session:
        graph = graph_of(session.server_weights("changing.safetensors"))
        save_file({"w": ELEMENTS + 1, "bias": ELEMENTS[2]}, folder / "changing.safetensors")
        with pytest.raises(hg.InvalidModelError, match="list it"):
            session.compile(graph)
        session.compile(graph_of(session.server_weights("changing.safetensors")))


def test_a_graph_whose_weights_lie_on_a_server_cannot_be_saved_here(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    with hg.connect(served[0]) as session:
        graph = graph_of(session.server_weights("plain.safetensors"))
        with pytest.raises(hg.InvalidArgumentError, match="on a server"):
            hg.save(graph, tmp_path / "g.hgraph")
        with pytest.raises(hg.InvalidArgumentError, match="on a server"):
            hg.compare(graph, session, session)


def test_a_server_without_models_says_so(daemon: object) -> None:
    with hg.connect("local:") as session:
        assert session.models() == ()
        with pytest.raises(hg.InvalidModelError, match="serves no models"):
            session.server_weights("plain.safetensors")


def test_models_are_listed_with_what_their_headers_say(served: tuple[str, Path]) -> None:
    url, folder = served
    write_model(folder / "deep.gguf", "qwen3", "q4_0")
    try:
        with hg.connect(url) as session:
            (found,) = (one for one in session.models() if one.name == "deep.gguf")
            assert found.gguf == hg.GgufSummary(
                architecture="qwen3",
                title="random qwen3",
                parameters=133952,
                context_length=256,
                quantization="q4_0",
                tokenizer="gpt2",
                words=550,
                has_chat_template=True,
            )
            header = session.server_weights(found).header
            assert header and len(header.words("tokenizer.ggml.tokens")) == 550
            assert header.parameters == found.gguf.parameters
    finally:
        (folder / "deep.gguf").unlink()


def test_a_header_is_the_same_here_and_on_the_server(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    with hg.connect(url) as session:
        there = read_header(session.server_weights("small.gguf"))
        with pytest.raises(hg.InvalidModelError, match="plain.safetensors is no GGUF file"):
            read_header(session.server_weights("plain.safetensors"))
    here = read_header(folder / "small.gguf")
    assert here.tensors == there.tensors and list(here.metadata) == list(there.metadata)
    assert repr(there) == f"<GgufHeader of small.gguf: {len(there.metadata)} entries, 1 tensors>"
    with pytest.raises(hg.InvalidModelError, match="cannot read .*none.gguf: No such file"):
        read_header(tmp_path / "none.gguf")
