"""Answers that follow schemas, regular expressions and grammars."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gguf_files import write_model
from lora_files import write_adapter
from random_schemas import random_schema

import heliograph as hg
from heliograph.llm import LanguageModel, Result
from heliograph.llm.constraints import constraint_of
from heliograph.llm.language_model import Asked
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving import engine as serving_engine
from heliograph.llm.serving.answering import Answering

SECONDS = 90.0
PROMPT = "The daemon serves graphs"
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "the daemon": {"enum": ["serves", "runs"]}},
    "required": ["name", "the daemon"],
    "additionalProperties": False,
}
#: Exhausts the stack of the process that compiles it.
DEEP = {
    "$defs": {**{f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(6000)}, "a6000": {}},
    "$ref": "#/$defs/a0",
}
#: Exhausts its time.
LONG = {"type": "integer", "multipleOf": 999_983}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A vocabulary of SentencePiece's kind, and one of bytes."""
    return write_model(folder / f"{request.param}.gguf", request.param, "q8_0", context=512)


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "qwen2", "q8_0", context=512)


@pytest.fixture(scope="module")
def llm(url: str, path: Path) -> Iterator[LanguageModel]:
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, path)
        yield llm
        llm.close()


@asynccontextmanager
async def serving(url: str, path: Path, slots: int = 8) -> AsyncIterator[Server]:
    async with hg.aio.connect(url) as session:
        server = await Server.load(session, path, bounds=Bounds(slots))
        try:
            async with asyncio.timeout(SECONDS):
                yield server
        finally:
            await server.close()


async def begun(server: Server, tokens: list[int], options: dict[str, Any]) -> Answering:
    """An answer that the server writes, with its grammar."""
    names = ("schema", "regex", "grammar")
    asked = Asked(tokens, constraint_of(*(options.get(name) for name in names)))
    [matcher] = await server.following.begin(asked, 1)
    return server.submit(asked, matcher=matcher, **options)


async def read(answering: Answering) -> Result:
    async for _ in answering:
        pass
    return answering.result


def same(one: Result, other: Result) -> bool:
    return (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)


def test_each_answer_of_random_schemas_is_valid(url: str, path: Path) -> None:
    async def body(server: Server, number: int) -> None:
        rng = random.Random(number)
        schema = random_schema(rng)
        options = {"schema": schema, "seed": number, "max_tokens": 450, "temperature": rng.choice((0.0, 1.0))}
        result = await read(await begun(server, server.model.tokenizer.encode(PROMPT), options))
        assert result.finish_reason == "stop", (number, schema, result.text)
        jsonschema.validate(json.loads(result.text), schema)

    async def run() -> None:
        async with serving(url, path, 16) as server:
            await asyncio.gather(*(body(server, number) for number in range(60)))
            await asyncio.gather(*(body(server, number) for number in range(60, 100)))

    asyncio.run(run())


def test_a_regular_expression_and_grammars_hold_for_the_whole_answer(llm: LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 4}
    pattern = "(?:[0-9]{3}-)?/[a-cé]{2,5}/"
    found = llm.generate(PROMPT, regex=pattern, **options).result()
    assert re.fullmatch(pattern, found.text) and found.finish_reason == "stop"
    lark = 'start: greeting " " NAME "."\ngreeting: "Hello" | "Salut"\nNAME: /[A-Z][a-z]{1,6}/'
    assert re.fullmatch(
        r"(Hello|Salut) [A-Z][a-z]{1,6}\.", llm.generate(PROMPT, grammar=lark, **options).text
    )
    gbnf = 'root ::= ("yes" | "no") " " number\nnumber ::= [1-9] [0-9]{0,3}'
    assert re.fullmatch(r"(yes|no) [1-9][0-9]{0,3}", llm.generate(PROMPT, grammar=gbnf, **options).text)
    value = llm.generate(PROMPT, schema=True, max_tokens=200, temperature=0).result()
    assert value.finish_reason == "length" or value.parsed() is not None or value.text == "null"


def test_tokens_that_are_forced_are_the_same_in_a_chunk_and_step_by_step(llm: LanguageModel) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"schema": NAMED, "seed": seed, "max_tokens": 80}
        chunk = llm.generate(PROMPT, **options).result()
        steps = llm.generate(PROMPT, logprobs=True, **options).result()
        assert same(chunk, steps) and len(steps.logprobs) == len(steps.tokens)
        assert chunk.parsed()["the daemon"] in ("serves", "runs")
    # The cache has the forced tokens.
    free: dict[str, Any] = {"max_tokens": 8, "seed": 1}
    again = llm.generate([*llm.tokenizer.encode(PROMPT), *chunk.tokens], **free).result()
    assert again.reused_tokens > 20
    llm.generate("Another", max_tokens=1).result()
    assert same(again, llm.generate([*llm.tokenizer.encode(PROMPT), *chunk.tokens], **free).result())


@pytest.mark.parametrize("ends", ["with-its-form", "with-a-stop-text", "closed"])
def test_an_answer_in_a_form_that_ends_early_leaves_the_cache_whole(llm: LanguageModel, ends: str) -> None:
    """The model is at work on the next token when the last one is known."""
    prompt = [*llm.tokenizer.encode(PROMPT)]
    free: dict[str, Any] = {"max_tokens": 8, "seed": 1}
    alone = llm.generate(prompt, **free).result()
    if ends == "closed":
        answer = llm.generate(prompt, regex="(?s:.{40})", seed=2)
        next(answer)
        answer.close()
    else:
        pattern, stop = ("[0-9]{5}", None) if ends == "with-its-form" else ("[0-9]{9}", list("0123456789"))
        llm.generate(prompt, regex=pattern, stop=stop, seed=2).result()
    assert same(llm.generate(prompt, **free).result(), alone)


def test_log_probabilities_are_those_of_the_model_without_the_grammar(llm: LanguageModel) -> None:
    free = llm.generate(PROMPT, max_tokens=1, temperature=0, logprobs=True).result().logprobs[0]
    held = llm.generate(PROMPT, regex="[0-9]{2}", max_tokens=1, temperature=0, logprobs=True).result()
    assert held.logprobs[0].alternatives == free.alternatives
    assert held.logprobs[0].logprob <= free.logprob


def test_tokens_that_are_forced_while_a_plan_compiles_are_taken_first(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a loop comes when the grammars of all its answers have their tokens."""
    monkeypatch.setattr(serving_engine, "SLOW_STEP_SECONDS", math.inf)

    async def run() -> None:
        async with serving(url, path, 8) as server:
            found = server.plans.decoding

            async def late(*given: Any, **options: Any) -> Any:
                plan = await found(*given, **options)
                await asyncio.gather(*server._coming.values())
                return plan

            monkeypatch.setattr(server.plans, "decoding", late)
            tokens = server.model.tokenizer.encode(PROMPT)
            formed = [
                {"schema": NAMED, "max_tokens": 70, "seed": seed, "temperature": 0.0} for seed in range(4)
            ]
            alone = [await read(await begun(server, tokens, options)) for options in formed]
            # Loops of others end often, since each has a stop of its own.
            others = [server.submit(tokens, max_tokens=3 * n + 1, seed=n) for n in range(1, 4)]
            answers = [await begun(server, tokens, options) for options in formed]
            together = await asyncio.gather(*map(read, answers), *map(read, others))
            assert all(map(same, alone, together))

    asyncio.run(run())


@pytest.mark.parametrize("slow_step_seconds", [0.0, math.inf])
def test_an_answer_beside_others_is_what_it_is_alone(
    url: str, path: Path, slow_step_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others wait for its grammar."""
    monkeypatch.setattr(serving_engine, "SLOW_STEP_SECONDS", slow_step_seconds)

    def options(number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": number, "max_tokens": 70, "temperature": 0.9}
        kinds: list[dict[str, Any]] = [{}, {"schema": NAMED}, {"regex": "[a-z]{3,9}"}, {"schema": NAMED}]
        return {**found, **kinds[number % 4], "logprobs": number % 5 == 0}

    async def run() -> list[tuple[list[int], Result]]:
        async with serving(url, path, 16) as server:
            prompts = [server.model.tokenizer.encode(PROMPT + " now" * number) for number in range(16)]
            answers = [await begun(server, one, options(number)) for number, one in enumerate(prompts)]
            together = await asyncio.gather(*map(read, answers))
            for number in (0, 1, 2, 5, 7):
                alone = await read(await begun(server, prompts[number], options(number)))
                assert same(alone, together[number]), number
            return list(zip(prompts, together, strict=True))

    found = asyncio.run(run())
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, path)
        for number in (0, 1, 2, 7):
            tokens, result = found[number]
            assert same(llm.generate(tokens, **options(number)).result(), result), number
        llm.close()


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"schema": {"type": "frob"}}, hg.InvalidArgumentError, "schema cannot be followed: Invalid type"),
        ({"schema": {"not": {}}}, hg.InvalidArgumentError, "Unimplemented keys"),
        (
            {"schema": {"type": "string", "minLength": 5, "maxLength": 2}},
            hg.InvalidArgumentError,
            "Unsatis",
        ),
        ({"schema": False}, hg.InvalidArgumentError, "schema is False"),
        ({"schema": {"a": {1, 2}}}, hg.InvalidArgumentError, "cannot be written as JSON"),
        ({"regex": "a(b"}, hg.InvalidArgumentError, "regex cannot be followed: .*unclosed group"),
        ({"regex": 5}, hg.InvalidArgumentError, "regex is 5"),
        ({"regex": ""}, hg.InvalidArgumentError, "not empty"),
        ({"grammar": "root ::= root"}, hg.InvalidArgumentError, "no text follows it"),
        ({"schema": {"$ref": "#"}}, hg.InvalidArgumentError, "no text follows it"),
        ({"grammar": 'start: "a" b'}, hg.InvalidArgumentError, "unknown name"),
        ({"grammar": "root ::= ("}, hg.InvalidArgumentError, "grammar cannot be followed"),
        ({"schema": {}, "regex": "a"}, hg.InvalidArgumentError, "schema and regex are given"),
        ({"regex": "a" * 300_000}, hg.LimitExceededError, "regex has 300,000 characters"),
        ({"schema": DEEP}, hg.LimitExceededError, "schema takes more than 2 seconds"),
        ({"grammar": "start: /" + "(" * 5000}, hg.HeliographError, "grammar"),
    ],
)
def test_bad_constraints_are_refused_and_the_next_answer_goes_on(
    llm: LanguageModel, options: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        llm.generate(PROMPT, max_tokens=4, **options).result()
    assert llm.generate(PROMPT, regex="[0-9]{2}", max_tokens=4).text.isdecimal()


def test_an_answer_that_is_cut_says_so(llm: LanguageModel) -> None:
    cut = llm.generate(PROMPT, schema=NAMED, max_tokens=12).result()
    assert cut.finish_reason == "length" and cut.text.startswith('{"name": "')
    with pytest.raises(hg.LimitExceededError, match="ended after 12 tokens, before its JSON did"):
        cut.parsed()
    with pytest.raises(hg.InvalidArgumentError, match="the answer is no JSON"):
        llm.generate(PROMPT, regex="[a-z]{3}", max_tokens=12).result().parsed()


def test_an_answer_that_ends_with_its_last_token_is_whole(url: str, small: Path) -> None:
    schema = {"const": "the quick brown fox jumps over the lazy dog"}
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, small)
        whole = llm.generate(PROMPT, schema=schema, seed=1).result()
        count = len(whole.tokens)
        limits = range(1, count + 1)
        alone = [llm.generate(PROMPT, schema=schema, max_tokens=most).result() for most in limits]
        llm.close()

    async def run() -> list[Result]:
        async with serving(url, small) as server:
            tokens = server.model.tokenizer.encode(PROMPT)
            asked = [{"schema": schema, "max_tokens": most} for most in limits]
            return [await read(await begun(server, tokens, options)) for options in asked]

    for results in (alone, asyncio.run(run())):
        assert [len(one.tokens) for one in results] == list(limits)
        assert [one.finish_reason for one in results] == ["length"] * (count - 1) + ["stop"]
        assert results[-1].text == whole.text and all(whole.text.startswith(one.text) for one in results)


def test_tokens_behind_a_stop_text_do_not_count_where_a_form_forces_several(
    url: str, path: Path, llm: LanguageModel
) -> None:
    options: dict[str, Any] = {"schema": {"const": "the quick brown fox jumps"}, "stop": "w", "seed": 1}
    alone = llm.generate(PROMPT, **options).result()
    steps = llm.generate(PROMPT, logprobs=True, **options).result()
    assert alone.text == '"the quick bro' and same(alone, steps)

    async def run() -> Result:
        async with serving(url, path) as server:
            return await read(await begun(server, server.model.tokenizer.encode(PROMPT), options))

    assert same(alone, asyncio.run(run()))


def test_a_bias_of_infinity_chooses_among_what_the_form_allows(llm: LanguageModel) -> None:
    [digit], letter = llm.tokenizer.encode_parts(["7"])[-1:], llm.tokenizer.encode_parts(["e"])[-1]
    bias = {digit: float("inf"), letter: float("inf")}
    for options in ({"temperature": 0.0}, {"top_k": 0}, {"repeat_penalty": 1.5}):
        found = llm.generate(PROMPT, regex="[0-9]{3}", logit_bias=bias, seed=1, max_tokens=9, **options)
        assert found.text == "777"
    assert llm.generate(PROMPT, logit_bias={letter: float("inf")}, max_tokens=2).tokens == [letter, letter]


def test_a_bias_against_what_the_grammar_allows_is_an_error(llm: LanguageModel) -> None:
    digits = {token: float("-inf") for token in range(len(llm.tokenizer)) if token not in llm.tokenizer.stops}
    with pytest.raises(hg.InvalidArgumentError, match="cannot be followed|no token that it allows"):
        llm.generate(PROMPT, regex="[0-9]{2}", logit_bias=digits, max_tokens=4).result()


def test_a_process_of_grammars_that_dies_is_started_again(llm: LanguageModel) -> None:
    answer = llm.generate(PROMPT, schema=NAMED, max_tokens=60, seed=1)
    expected = answer.text
    process = llm.matching._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert llm.generate(PROMPT, schema=NAMED, max_tokens=60, seed=1).text == expected


def test_asyncio_answers_follow_grammars_too(url: str, small: Path) -> None:
    async def run() -> None:
        async with hg.aio.connect(url) as session:
            llm = await hg.llm.load(session, small)
            result = await llm.generate(PROMPT, schema=NAMED, max_tokens=60)
            assert result.parsed()["the daemon"] in ("serves", "runs")
            with pytest.raises(hg.InvalidArgumentError):
                await llm.generate(PROMPT, schema={"type": "frob"})
            answer = llm.generate(PROMPT, schema=NAMED)
            assert (await anext(answer))[0] == "{"
            await answer.aclose()
            assert (await llm.generate(PROMPT, regex="[0-9]")).text.isdecimal()
            await llm.close()

    asyncio.run(run())


def test_a_hostile_schema_keeps_nobody_waiting(url: str, small: Path) -> None:
    async def run() -> None:
        async with serving(url, small, 4) as server:
            tokens = server.model.tokenizer.encode(PROMPT)
            hostile = asyncio.create_task(begun(server, tokens, {"schema": LONG}))
            for seed in range(3):
                await read(server.submit(tokens, max_tokens=4, seed=seed))
                await read(await begun(server, tokens, {"regex": "[0-9]{2}", "max_tokens": 4}))
            turns = 0
            while not hostile.done():
                await asyncio.sleep(0.01)
                turns += 1
            with pytest.raises(hg.LimitExceededError, match="schema takes more than 2 seconds"):
                await hostile
            assert turns > 5 and not list(server.scheduler.all_jobs)

    asyncio.run(run())


def test_an_answer_goes_on_while_the_grammar_of_another_takes_its_time(
    url: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_engine, "SLOW_STEP_SECONDS", math.inf)
    gate = threading.Event()

    async def run() -> None:
        async with serving(url, small, 2) as server:
            tokens = server.model.tokenizer.encode(PROMPT)
            held = await begun(server, tokens, {"schema": NAMED, "max_tokens": 60, "seed": 1})
            bias = {server.model.tokenizer.eos: -math.inf}
            free = server.submit(tokens, max_tokens=200, seed=1, logit_bias=bias)
            deltas = aiter(free)
            await anext(deltas)
            server.following._masking.submit(gate.wait, SECONDS)
            async for _ in deltas:
                pass
            assert len(free.result.tokens) == 200 and held.result.finish_reason is None
            gate.set()
            assert (await read(held)).parsed()

    try:
        asyncio.run(run())
    finally:
        gate.set()


def test_a_reader_that_leaves_ends_the_process_of_its_grammar(url: str, small: Path) -> None:
    async def run() -> None:
        async with serving(url, small, 2) as server:
            tokens = server.model.tokenizer.encode(PROMPT)
            first = await begun(server, tokens, {"schema": {"type": "array", "items": {"type": "string"}}})
            await anext(aiter(first))
            first.close()
            matcher = first.matcher
            assert matcher is not None
            second = await read(await begun(server, tokens, {"schema": NAMED, "max_tokens": 60}))
            assert second.parsed() and not server.scheduler.jobs
            with pytest.raises(hg.LimitExceededError):
                matcher.take(5)

    asyncio.run(run())


def test_answers_with_grammars_and_adapters_that_wait_again_for_pages_are_what_they_are_alone(
    url: str, small: Path, folder: Path
) -> None:
    adapter = write_adapter(folder / "first.gguf", small)
    forced = {"enum": ["the daemon serves graphs to many clients", "a pool of hosts runs one graph"]}
    kinds: list[dict[str, Any]] = [{"schema": forced}, {"top_k": 0}, {"schema": NAMED, "top_k": 0}, {}]

    async def begin(server: Server, number: int, tenant: str = "") -> Answering:
        options = {"seed": number, "max_tokens": 120, "temperature": 0.9, **kinds[number % 4]}
        if number % 4 in (1, 3):
            options["logit_bias"] = {server.model.tokenizer.eos: -math.inf}
        options["adapter"] = ("", "first", "first")[number % 3]
        tokens = server.model.tokenizer.encode(PROMPT + " now" * (number % 5))
        return await begun(server, tokens, {**options, "tenant": tenant})

    async def run() -> None:
        async with hg.aio.connect(url) as session:
            bounds = Bounds(8, cache_tokens=320)
            server = await Server.load(session, small, bounds=bounds, adapters=[adapter])
            try:
                answers = [await begin(server, number) for number in range(16)]
                together = await asyncio.gather(*map(read, answers))
                assert server.scheduler.puts_back
                for number, beside in enumerate(together):
                    alone = await read(await begin(server, number, "alone"))
                    assert same(alone, beside), number
                pages = server.scheduler.pages
                assert (pages.used, pages.shared) == (0, 0)
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
