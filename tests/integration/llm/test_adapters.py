"""LoRA adapters: what a model with them writes is what the merged model writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_daemons import running_daemon
from gguf_files import write_model
from llm_models import error_of, write_encoder, write_other
from lora_files import merged, write_adapter

import heliograph as hg
from heliograph.llm import Adapter
from heliograph.llm.serving import Bounds, Server

PROMPT = "The daemon serves graphs to many clients."
SECONDS = 60.0


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=400)


@pytest.fixture(scope="module")
def first(folder: Path, model: Path) -> Path:
    return write_adapter(folder / "first.gguf", model, seed=2, stored="f16", wanted=lambda _: True)


@pytest.fixture(scope="module")
def second(folder: Path, model: Path) -> Path:
    return write_adapter(
        folder / "second.gguf", model, seed=3, rank=16, alpha=4, wanted=lambda name: "attn" in name
    )


def tokens(count: int = 40, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(10, 500, count).tolist()


def written(llm: hg.llm.LanguageModel, **options: Any) -> tuple[list[int], list[Any]]:
    result = llm.generate(tokens(), **{"max_tokens": 12, "seed": 5, "logprobs": True, **options}).result()
    return result.tokens, result.logprobs


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "gpt-oss"])
def test_logits_are_those_of_the_model_with_its_adapters_merged(
    session: hg.Session, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    path = write_model(path, kind) if kind in ("llama", "qwen3") else write_other(path, kind)
    # The embedding makes the logits too in some, where a merged one is another model.
    has_output = kind not in ("qwen3", "gemma2")
    one = write_adapter(
        tmp_path / "a.gguf", path, wanted=lambda name: has_output or name != "token_embd.weight"
    )
    other = write_adapter(
        tmp_path / "b.gguf", path, seed=2, rank=3, alpha=None, wanted=lambda name: "attn" in name
    )
    llm = hg.llm.load(session, path, cache="f32", adapters=[one, Adapter(other, scale=0.5)])
    assert llm.adapters == {"a": 1.0, "b": 0.5}
    found, expected = llm.logits(tokens()), merged(path, (one, 1.0), (other, 0.5)).logits(tokens())
    assert error_of(found, expected) < 1e-9
    assert error_of(found, merged(path).logits(tokens())) > 0.1
    llm.set_adapter_scale("b", -2.0)
    expected = merged(path, (one, 1.0), (other, -2.0)).logits(tokens())
    assert error_of(llm.logits(tokens()), expected) < 1e-9


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16", "q8_0"])
def test_adapters_are_stored_as_the_converter_writes_them(
    session: hg.Session, tmp_path: Path, stored: str
) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "f16")
    adapter = write_adapter(tmp_path / "a.gguf", path, rank=32, stored=stored)
    llm = hg.llm.load(session, path, cache="f32", adapters=[adapter], activations="f32")
    expected = merged(path, (adapter, 1.0)).logits(tokens())
    assert error_of(llm.logits(tokens()), expected) < 1e-5
    rounded = hg.llm.load(session, path, cache="f32", adapters=[adapter]).logits(tokens())
    is_rounded = stored == "q8_0"
    assert (rounded != llm.logits(tokens())).any() == is_rounded and error_of(rounded, expected) < 1e-3


def test_a_scale_changes_without_a_compile(session: hg.Session, model: Path, first: Path) -> None:
    llm = hg.llm.load(session, model, adapters=[first])
    whole, plans = written(llm), llm.plans
    llm.set_adapter_scale("first", 0.25)
    half = written(llm)
    assert half != whole
    llm.set_adapter_scale("first", 1)
    assert written(llm) == whole and llm.plans == plans


def test_a_scale_of_0_gives_the_bits_and_the_plans_of_the_model_alone(
    session: hg.Session, model: Path, first: Path, second: Path
) -> None:
    expected = written(hg.llm.load(session, model))
    llm = hg.llm.load(session, model, adapters=[Adapter(first, 0), second])
    assert written(llm) != expected
    llm.set_adapter_scale("second", 0.0)
    assert written(llm) == expected
    assert not any("adapter" in node.name for node in llm.plans[-1].explain().nodes)


def test_what_was_read_with_other_scales_is_read_again(session: hg.Session, model: Path, first: Path) -> None:
    llm = hg.llm.load(session, model, adapters=[first])
    expected = written(llm)
    llm.set_adapter_scale("first", 0.5)
    written(llm)
    llm.set_adapter_scale("first", 1.0)
    answer = llm.generate(tokens(), max_tokens=12, seed=5, logprobs=True).result()
    assert answer.reused_tokens == 0 and (answer.tokens, answer.logprobs) == expected


def test_rows_of_a_prompt_and_decoded_ones_have_the_same_bits(
    session: hg.Session, model: Path, first: Path, second: Path
) -> None:
    llm = hg.llm.load(session, model, adapters=[first, second])
    chosen, logprobs = written(llm, max_tokens=30)
    longer = [*tokens(), *chosen[:20]]
    llm.logits(tokens(3))
    found = llm.generate(longer, max_tokens=10, seed=5, logprobs=True).result()
    assert (found.tokens, found.logprobs) == (chosen[20:], logprobs[20:])


def test_adapters_on_the_server_are_not_uploaded(url: str, model: Path, first: Path) -> None:
    with hg.connect(url, progress=None) as session:
        expected = written(hg.llm.load(session, model, adapters=[first]))
    told: list[int] = []
    with hg.connect(url, progress=lambda done, total: told.append(done)) as session:
        files = [session.server_weights(path.name) for path in (model, first)]
        assert written(hg.llm.load(session, files[0], adapters=[files[1]])) == expected
    assert max(told, default=0) < 10_000


def test_a_model_on_several_devices_takes_adapters_and_a_draft(
    session: hg.Session, model: Path, first: Path
) -> None:
    expected = written(hg.llm.load(session, model, adapters=[first]))
    devices = [word for _ in range(2) for word in ("--device", "cpu:threads=1,memory=1GiB")]
    with running_daemon(*devices) as other, hg.connect(other, progress=None) as split:
        options: Any = {"devices": ["cpu0", "cpu1"], "memory": {"cpu0": "200KiB"}}
        llm = hg.llm.load(split, model, adapters=[first], draft=hg.llm.Draft(model, 3), **options)
        assert written(llm) == expected
        assert {node.device for node in llm.plans[0].explain().nodes} == {"cpu0", "cpu1"}


def test_asyncio_takes_adapters_too(url: str, session: hg.Session, model: Path, first: Path) -> None:
    llm = hg.llm.load(session, model, adapters=[first])
    expected = [written(llm)[0]]
    llm.set_adapter_scale("first", 0.5)
    expected.append(written(llm)[0])

    async def scenario() -> list[list[int]]:
        async with hg.aio.connect(url) as other:
            loaded = await hg.llm.load(other, model, adapters=[first])
            found = []
            for scale in (1.0, 0.5):
                loaded.set_adapter_scale("first", scale)
                found.append((await loaded.generate(tokens(), max_tokens=12, seed=5)).tokens)
            return found

    assert asyncio.run(scenario()) == expected


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def pair(tensor: str, rows: int = 64, columns: int = 64) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{tensor}.lora_a": array(4, columns), f"{tensor}.lora_b": array(rows, 4)}


Q = "blk.1.attn_q.weight"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"architecture": "qwen2"},
            hg.InvalidModelError,
            "for the architecture 'qwen2', small.gguf is 'llama'",
        ),
        ({"entries": {"general.type": "model"}}, hg.InvalidModelError, "its general.type is 'model'"),
        ({"entries": {"adapter.type": "vector"}}, hg.InvalidModelError, "its adapter.type 'vector'"),
        ({"alpha": float("nan")}, hg.InvalidModelError, "adapter.lora.alpha is nan"),
        ({"entries": {"adapter.alora.invocation_tokens": [1]}}, hg.UnsupportedError, "activated LoRA"),
        ({"extra": {f"{Q}.lora_b": array(0)}}, hg.InvalidModelError, f"no tensor '{Q}.lora_b'"),
        ({"extra": {f"{Q}.lora_a": array(4, 65)}}, hg.InvalidModelError, f"'{Q}.lora_a' has the shape"),
        ({"extra": {f"{Q}.lora_b": array(64, 5)}}, hg.InvalidModelError, f"'{Q}.lora_a' has the shape"),
        (
            {
                "extra": {
                    "blk.9.attn_q.weight.lora_a": array(4, 64),
                    "blk.9.attn_q.weight.lora_b": array(64, 4),
                }
            },
            hg.InvalidModelError,
            "'blk.9.attn_q.weight', and small.gguf has no such matrix",
        ),
        (
            {"extra": pair("output_norm.weight")},
            hg.InvalidModelError,
            "'output_norm.weight', and small.gguf has no such matrix",
        ),
        ({"extra": {"blk.0.attn_norm.weight": array(64)}}, hg.UnsupportedError, "'blk.0.attn_norm.weight'"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_its_tensor(
    session: hg.Session, model: Path, tmp_path: Path, changes: Any, error: Any, match: str
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", model, **changes)
    with pytest.raises(error, match=match):
        hg.llm.load(session, model, adapters=[adapter])


def test_a_pair_that_no_product_takes_is_refused(session: hg.Session, tmp_path: Path) -> None:
    path = write_other(tmp_path / "m.gguf", "gpt-oss")
    bias = pair("blk.0.ffn_up_exps.bias", 4, 32)
    adapter = write_adapter(tmp_path / "a.gguf", path, extra=bias)
    with pytest.raises(hg.InvalidModelError, match="'blk.0.ffn_up_exps.bias', which is no matrix of a prod"):
        hg.llm.load(session, path, adapters=[adapter])


def test_a_pair_that_no_product_takes_is_not_served(url: str, tmp_path: Path) -> None:
    path = write_other(tmp_path / "m.gguf", "gpt-oss")
    adapter = write_adapter(tmp_path / "a.gguf", path, extra=pair("blk.0.ffn_up_exps.bias", 4, 32))

    async def scenario() -> None:
        async with hg.aio.connect(url) as other:
            with pytest.raises(hg.InvalidModelError, match="which is no matrix of a product"):
                await Server.load(other, path, bounds=Bounds(1), adapters=[adapter])

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_truncated_adapter_is_refused_by_its_tensor(
    session: hg.Session, model: Path, first: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(first.read_bytes()[:-3000])
    with pytest.raises(hg.InvalidModelError, match=r"cut.gguf is not a valid model: .*tensor 'blk"):
        hg.llm.load(session, model, adapters=[cut])
    with pytest.raises(hg.InvalidModelError, match="cannot read"):
        hg.llm.load(session, model, adapters=[tmp_path / "absent.gguf"])
    with pytest.raises(hg.InvalidModelError, match="is no LoRA adapter"):
        hg.llm.load(session, model, adapters=[model])
    with pytest.raises(hg.InvalidModelError, match=r"first.gguf is an adapter, .*\n.*adapters="):
        hg.llm.load(session, first)


def test_names_and_scales_that_are_wrong_are_refused(
    session: hg.Session, model: Path, first: Path, folder: Path
) -> None:
    given: Any
    for given, match in (
        ([first, first], "two adapters are named 'first'"),
        ([first] * 17, "adapters is"),
        (str(first), "adapters is"),
        ([Adapter(first, float("inf"))], "the scale of an adapter is inf"),
        ([Adapter(first, "1")], "the scale of an adapter is '1'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            hg.llm.load(session, model, adapters=given)
    llm = hg.llm.load(session, model, adapters=[first, Adapter(first, 0.5, "again")])
    with pytest.raises(hg.InvalidArgumentError, match="no adapter 'third'"):
        llm.set_adapter_scale("third", 1.0)
    with pytest.raises(hg.InvalidArgumentError, match="the scale of an adapter is nan"):
        llm.set_adapter_scale("again", float("nan"))
    assert llm.adapters == {"first": 1.0, "again": 0.5}
    encoder = write_encoder(folder / "bert.gguf", "bert")
    with pytest.raises(hg.UnsupportedError, match="takes no adapters"):
        hg.llm.load(session, encoder, adapters=[first])


def test_answers_of_one_batch_have_adapters_of_their_own(
    url: str, session: hg.Session, model: Path, first: Path, second: Path
) -> None:
    """Each is, to the bit, what it is alone, and what a model with that adapter writes."""
    adapters = [first, Adapter(second, 0.5)]
    names = ["", "first", "second", "", "second", "first", "first"]
    options: dict[str, Any] = {"max_tokens": 12, "seed": 5, "logprobs": True}
    prompts = [tokens(30 + place, seed=place % 2) for place in range(len(names))]
    llm = hg.llm.load(session, model, adapters=adapters)
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        llm.set_adapter_scale("first", float(name == "first"))
        llm.set_adapter_scale("second", 0.5 * (name == "second"))
        result = llm.generate(prompt, **options).result()
        expected.append((result.tokens, result.logprobs))

    async def scenario() -> None:
        async with hg.aio.connect(url) as other:
            server = await Server.load(other, model, bounds=Bounds(8), adapters=adapters)

            async def write(place: int) -> Any:
                answering = server.submit(prompts[place], adapter=names[place], **options)
                async for _ in answering:
                    pass
                return answering.result.tokens, answering.result.logprobs

            try:
                together = await asyncio.gather(*map(write, range(len(names))))
                assert together == expected
                for place in (3, 4, 5):
                    assert await write(place) == expected[place]
                with pytest.raises(hg.InvalidArgumentError, match="no adapter 'third'"):
                    server.submit(prompts[0], adapter="third")
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_pages_are_reused_by_the_same_adapter_alone(url: str, model: Path, first: Path) -> None:
    async def scenario() -> None:
        async with hg.aio.connect(url) as other:
            server = await Server.load(other, model, bounds=Bounds(1), adapters=[first])
            try:
                reused = []
                for name in ("", "first", "first", "", ""):
                    answering = server.submit(tokens(), adapter=name, max_tokens=2, seed=1)
                    async for _ in answering:
                        pass
                    reused.append(answering.result.reused_tokens)
                assert reused == [0, 0, 32, 32, 32]
                plain, adapted = [await server.embed([tokens()], name) for name in ("", "first")]
                assert not np.array_equal(plain, adapted)
                np.testing.assert_array_equal(await server.embed([tokens()]), plain)
                with pytest.raises(hg.InvalidArgumentError, match="no adapter 'third'"):
                    await server.embed([tokens()], "third")
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
