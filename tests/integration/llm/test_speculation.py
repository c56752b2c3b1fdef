"""Speculation: the text with proposed tokens is the text without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import SHAPES, spm, write_model
from llm_followers import followers, mistaken, write_follower
from llm_models import write_encoder, write_other
from llm_servers import served as http_served
from lora_files import write_adapter

import heliograph as hg
from heliograph.llm import Draft, LanguageModel, Result, Speculation
from heliograph.llm.serving import Bounds, Server

CONTEXT = 300
PROMPT = "The daemon serves graphs to many clients."
#: Settings of each form of a choice.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "penalty_last": 7},
    {"logprobs": True, "temperature": 1.5},
    {"logit_bias": {400: 4.0, 401: -100.0}},
    {"top_k": 0, "top_p": 1.0},
)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=CONTEXT)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Path:
    """A draft that is hardly ever right, with a shorter context."""
    return write_model(folder / "stranger.gguf", "llama", "q8_0", context=60, seed=9, layers=1)


def tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(10, 500, count).tolist()


def answer(llm: LanguageModel, prompt: Any, **options: Any) -> Result:
    return llm.generate(prompt, **{"max_tokens": 24, "seed": 7, **options}).result()


def same(one: Result, other: Result) -> bool:
    names = ("tokens", "text", "logprobs", "finish_reason")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def speculation(result: Result) -> Speculation:
    assert result.speculation is not None
    return result.speculation


def test_a_hundred_seeds_write_the_same_text_with_and_without_drafts(
    session: hg.Session, model: Path, stranger: Path
) -> None:
    alone = hg.llm.load(session, model)
    drafts = [Draft(model, 4), Draft(stranger, 3), Draft("prompt", 2)]
    drafted = [hg.llm.load(session, model, draft=draft) for draft in drafts]
    counts = [Speculation() for _ in drafts]
    for seed in range(100):
        options = {"seed": seed, "max_tokens": 11, **SETTINGS[seed % len(SETTINGS)]}
        prompt = tokens(12 + seed % 23, seed)
        expected = answer(alone, prompt, **options)
        for llm, count in zip(drafted, counts, strict=True):
            found = answer(llm, prompt, **options)
            assert same(found, expected), f"seed {seed}, {count}"
            count.proposed += speculation(found).proposed
            count.accepted += speculation(found).accepted
    assert counts[0].accepted == counts[0].proposed > 500
    assert 0 <= counts[1].accepted < counts[1].proposed / 10 and counts[1].proposed > 500


@pytest.mark.parametrize("count", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3", "qwen3moe", "gpt-oss"])
def test_rows_that_are_checked_have_the_bits_of_decoded_ones(
    session: hg.Session, folder: Path, kind: str, count: int
) -> None:
    path = folder / f"{kind}.gguf"
    if not path.exists():
        (write_model if kind in ("llama", "qwen3") else write_other)(path, kind)
    options: dict[str, Any] = {"max_tokens": 33, "logprobs": True}
    expected = answer(hg.llm.load(session, path), tokens(20), **options)
    found = answer(hg.llm.load(session, path, draft=Draft(path, count)), tokens(20), **options)
    assert same(found, expected)
    assert speculation(found).accepted == speculation(found).proposed >= 15


@pytest.mark.parametrize("cache", ["f32", "q8_0"])
def test_every_type_of_cache_keeps_the_bits(session: hg.Session, tmp_path: Path, cache: Any) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_k", width=256, hidden=256, row=64)
    expected = answer(hg.llm.load(session, path, cache=cache), tokens(20), logprobs=True)
    found = answer(hg.llm.load(session, path, cache=cache, draft=Draft(path, 3)), tokens(20), logprobs=True)
    assert same(found, expected) and speculation(found).accepted > 10


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_proposals_are_counted_and_accepted_up_to_the_first_wrong_one(
    session: hg.Session, tmp_path: Path, share: float
) -> None:
    words = spm()
    right = followers(len(words.tokens))
    proposed = mistaken(right, share)
    big = write_follower(tmp_path / "big.gguf", words, right)
    shape = replace(SHAPES["llama"], width=32, row=8, layers=1)
    small = write_follower(tmp_path / "small.gguf", words, proposed, shape)
    llm = hg.llm.load(session, big, draft=Draft(small, 4))
    found = answer(llm, [500], temperature=0, max_tokens=100)
    text = [500]
    while len(text) < 101:
        text.append(int(right[text[-1]]))
    assert found.tokens == text[1:]
    expected, place = Speculation(), 0
    while 100 - place - 1 >= 4:
        run = [proposed[one] == right[one] for one in text[place : place + 4]]
        accepted = [*run, False].index(False)
        expected.runs, expected.proposed = expected.runs + 1, expected.proposed + 4
        expected.accepted += accepted
        place += accepted + 1
    assert speculation(found) == expected


def test_repeated_text_is_proposed_by_the_prompt(session: hg.Session, tmp_path: Path) -> None:
    words = spm()
    circle = np.arange(len(words.tokens))
    circle[300:310] = np.roll(circle[300:310], -1)
    path = write_follower(tmp_path / "m.gguf", words, circle)
    llm = hg.llm.load(session, path, draft=Draft("prompt", 4))
    found = answer(llm, [300], temperature=0, max_tokens=60)
    assert found.tokens == [300 + (1 + place) % 10 for place in range(60)]
    assert speculation(found).accepted == speculation(found).proposed > 30


def test_proposals_are_made_where_they_pay(session: hg.Session, model: Path, stranger: Path) -> None:
    """The times of this machine decide where, and the text stays."""
    expected = answer(hg.llm.load(session, model), tokens(20), max_tokens=200)
    for draft in (model, stranger, "prompt"):
        assert same(answer(hg.llm.load(session, model, draft=draft), tokens(20), max_tokens=200), expected)


@pytest.mark.parametrize("length", [100, 225, 231, 232, 290, 297, 298, 299])
def test_answers_that_end_with_the_context_are_the_same(
    session: hg.Session, model: Path, stranger: Path, length: int
) -> None:
    options = {"max_tokens": None, "logit_bias": {2: -np.inf}}
    expected = answer(hg.llm.load(session, model), tokens(length), **options)
    assert len(expected.tokens) == CONTEXT - length + 1
    for draft in (Draft(model, 7), Draft(stranger, 3)):
        assert same(answer(hg.llm.load(session, model, draft=draft), tokens(length), **options), expected)


def test_a_stop_within_accepted_tokens_ends_the_answer(session: hg.Session, model: Path) -> None:
    alone, llm = hg.llm.load(session, model), hg.llm.load(session, model, draft=Draft(model, 7))
    whole = answer(alone, PROMPT, max_tokens=60)
    for begin in range(3, 30, 4):
        stop = whole.text[begin : begin + 3]
        expected = answer(alone, PROMPT, max_tokens=60, stop=stop)
        found = answer(llm, PROMPT, max_tokens=60, stop=stop)
        assert same(found, expected) and found.finish_reason == "stop"
        # The cache is right behind it.
        longer = [*llm.tokenizer.encode(PROMPT), *expected.tokens, 300]
        continued = answer(llm, longer, logprobs=True)
        assert same(continued, answer(alone, longer, logprobs=True))
        assert continued.reused_tokens == len(longer) - 2


def test_an_end_token_within_accepted_tokens_ends_the_answer(session: hg.Session, tmp_path: Path) -> None:
    words = spm()
    right = followers(len(words.tokens))
    path = tmp_path / "m.gguf"
    for ahead in range(1, 9):
        text = [500]
        for _ in range(ahead):
            text.append(int(right[text[-1]]))
        ending = right.copy()
        # A token leads to the end, and what follows the end is the token that would have come.
        ending[text[-1]], ending[2] = 2, right[text[-1]]
        llm = hg.llm.load(session, write_follower(path, words, ending), draft=Draft(path, 7))
        found = answer(llm, [500], temperature=0, max_tokens=40)
        assert (found.tokens, found.finish_reason) == ([*text[1:], 2], "stop")


def test_an_answer_that_is_closed_leaves_model_and_draft_usable(
    session: hg.Session, model: Path, stranger: Path
) -> None:
    expected = answer(hg.llm.load(session, model), PROMPT, max_tokens=60)
    for draft in (Draft(model, 3), Draft(stranger, 7), Draft("prompt", 3)):
        llm = hg.llm.load(session, model, draft=draft)
        for pieces in (1, 3):
            stopped = llm.generate(PROMPT, seed=pieces)
            for _ in range(pieces):
                next(stopped)
            stopped.close()
            assert same(answer(llm, PROMPT, max_tokens=60), expected)
        llm.close()
        assert same(answer(llm, PROMPT, max_tokens=60), expected)


def test_asyncio_speculates_too(url: str, session: hg.Session, model: Path) -> None:
    expected = answer(hg.llm.load(session, model), PROMPT, max_tokens=60)

    async def scenario() -> None:
        async with hg.aio.connect(url) as other:
            llm = await hg.llm.load(other, model, draft=Draft(model, 3))
            begun = asyncio.Event()

            async def writing() -> None:
                async for _ in llm.generate(PROMPT, seed=9):
                    begun.set()

            task = asyncio.create_task(writing())
            await asyncio.wait_for(begun.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found = await llm.generate(PROMPT, seed=7, max_tokens=60)
            assert same(found, expected) and speculation(found).accepted > 30
            await llm.close()

    asyncio.run(scenario())


def test_adapters_apply_to_the_rows_that_are_checked(
    session: hg.Session, model: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", model)
    alone = hg.llm.load(session, model, adapters=[adapter])
    llm = hg.llm.load(session, model, adapters=[adapter], draft=Draft(model, 3))
    for scale in (1.0, 0.01, 0.0):
        for one in (alone, llm):
            one.set_adapter_scale("a", scale)
        assert same(answer(llm, PROMPT, logprobs=True), answer(alone, PROMPT, logprobs=True))


def test_a_draft_on_the_server_is_not_uploaded(url: str, model: Path) -> None:
    told: list[int] = []
    with hg.connect(url, progress=lambda done, total: told.append(done)) as session:
        file = session.server_weights(model.name)
        llm = hg.llm.load(session, file, draft=Draft(file, 3))
        expected = answer(hg.llm.load(session, file), PROMPT)
        assert same(answer(llm, PROMPT), expected)
    assert max(told, default=0) < 10_000


def test_drafts_that_cannot_draft_are_refused(
    session: hg.Session, model: Path, folder: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other.gguf", "qwen2")
    with pytest.raises(hg.InvalidModelError, match=r"other.gguf cannot draft for small.gguf: its vocabulary"):
        hg.llm.load(session, model, draft=other)
    words = spm()
    words.tokens[350], words.tokens[351] = words.tokens[351], words.tokens[350]
    swapped = write_model(tmp_path / "swapped.gguf", "llama", vocabulary=words)
    with pytest.raises(hg.InvalidModelError, match="as token 350, not"):
        hg.llm.load(session, model, draft=swapped)
    encoder = write_encoder(tmp_path / "bert.gguf", "bert")
    with pytest.raises(hg.UnsupportedError, match="writes no text"):
        hg.llm.load(session, model, draft=encoder)
    with pytest.raises(hg.UnsupportedError, match="writes no text"):
        hg.llm.load(session, encoder, draft=model)
    with pytest.raises(hg.InvalidModelError, match="cannot read"):
        hg.llm.load(session, model, draft=tmp_path / "absent.gguf")
    for count in (0, 16, 1.5, "3"):
        with pytest.raises(hg.InvalidArgumentError, match="the tokens of a draft are"):
            Draft(model, count)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(url: str, model: Path, draft: Draft, **bounds: int) -> AsyncIterator[Server]:
    async with hg.aio.connect(url) as session, asyncio.timeout(90):
        server = await Server.load(session, model, bounds=Bounds(4, **bounds), draft=draft)
        try:
            yield server
        finally:
            await server.close()


async def served(server: Server, prompt: list[int], **options: Any) -> Result:
    answering = server.submit(prompt, **{"max_tokens": 24, "seed": 7, **options})
    async for _ in answering:
        pass
    return answering.result


@pytest.mark.parametrize(("file", "count"), [("small", 4), ("stranger", 3), ("small", 15), ("prompt", 2)])
def test_answers_of_a_server_with_a_draft_are_those_without(
    url: str, session: hg.Session, model: Path, stranger: Path, file: str, count: int
) -> None:
    alone = hg.llm.load(session, model)
    asked = [(tokens(12 + 5 * n, n), {"seed": n, **options}) for n, options in enumerate(SETTINGS)]
    expected = [answer(alone, prompt, **options) for prompt, options in asked]
    draft = Draft({"small": model, "stranger": stranger}.get(file, file), count)

    async def run() -> list[Speculation]:
        async with serving(url, model, draft) as server:
            found = [await served(server, prompt, **options) for prompt, options in asked]
            assert all(map(same, found, expected))
            together = await asyncio.gather(*(served(server, prompt, **more) for prompt, more in asked))
            assert all(map(same, together, expected))
            assert server.scheduler.pages.used == 0
            return [speculation(one) for one in found]

    counts = asyncio.run(run())
    if file != "prompt":
        assert all(one.proposed >= count for one in counts)
    if file == "small":
        assert all(one.accepted == one.proposed for one in counts)


def test_usage_counts_the_tokens_that_a_draft_proposed(url: str, model: Path) -> None:
    with http_served(url, model, Bounds(2), draft=Draft(model, 3)) as http:
        found = http.post("/v1/completions", prompt=PROMPT, max_tokens=20, seed=1, top_p=1.0)
        counts = found["usage"]["completion_tokens_details"]
        assert counts["accepted_prediction_tokens"] >= 12 and not counts["rejected_prediction_tokens"]
        form = {"type": "json_object"}
        held = http.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=10,
            response_format=form,
        )
        assert held["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_a_draft_of_a_server_needs_no_page_that_is_not_there(url: str, model: Path) -> None:
    """An answer goes on without proposals where the cache ends."""

    async def run() -> None:
        async with serving(url, model, Draft(model, 15), cache_tokens=64) as server:
            bias = {server.model.tokenizer.eos: -np.inf}
            found = await served(server, tokens(20), max_tokens=100, logit_bias=bias)
            assert len(found.tokens) == 45 and found.finish_reason == "length"
            assert speculation(found).proposed > 15

    asyncio.run(run())


def test_a_draft_of_a_server_must_have_its_words(url: str, model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "qwen2")

    async def run() -> None:
        async with serving(url, model, Draft(other)):
            raise AssertionError("it is served")

    with pytest.raises(hg.InvalidModelError, match="cannot draft for"):
        asyncio.run(run())
