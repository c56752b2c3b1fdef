"""A model that writes many answers at a time: each is what it is alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_daemons import running_daemon
from gguf_files import write_model
from llm_models import write_other

import heliograph as hg
from heliograph.llm import Result
from heliograph.llm.graphs import carries
from heliograph.llm.loading import CacheType
from heliograph.llm.sampling import CANDIDATES, ENDS, Form, Settings
from heliograph.llm.serving import Bounds, QueueFullError, Server
from heliograph.llm.serving import plans as served_plans
from heliograph.llm.serving import scheduler as scheduling
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.http.endpoints import EventStream

CONTEXT = 400
#: A choice that depends on all of a row's state.
FORM = Form(CANDIDATES)
FORM_SETTINGS = Settings(temperature=0.9, repeat_penalty=1.3, seed=5)
SECONDS = 60.0


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=CONTEXT)


@asynccontextmanager
async def serving(
    url: str, model: Path, bounds: Bounds | None = None, cache: CacheType = "f16"
) -> AsyncIterator[Server]:
    async with hg.aio.connect(url) as session:
        server = await Server.load(session, model, bounds=bounds, cache=cache)
        try:
            yield server
        finally:
            await server.close()
            assert not [one for one in asyncio.all_tasks() if one.get_name() == "llm-serving"]


def scenario(
    url: str,
    model: Path,
    body: Callable[[Server], Awaitable[None]],
    *bounds: int,
    cache: CacheType = "f16",
) -> None:
    async def run() -> None:
        async with serving(url, model, Bounds(*bounds), cache) as server:
            await asyncio.wait_for(body(server), SECONDS)

    asyncio.run(run())


async def read(answering: Answering) -> Result:
    text = "".join([delta.text async for delta in answering])
    assert text == answering.result.text
    return answering.result


def prompt(number: int, length: int = 9) -> list[int]:
    return np.random.default_rng(number).integers(300, 600, length).tolist()


def request(number: int) -> tuple[list[int], dict[str, Any]]:
    """One of many kinds of requests."""
    options: dict[str, Any] = {
        "max_tokens": 10 + number % 7,
        "seed": number,
        "temperature": (0.0, 0.8, 1.3)[number % 3],
        "top_k": (40, 5, 128)[number % 3],
        "top_p": (1.0, 0.9)[number % 2],
        "repeat_penalty": (1.0, 1.2)[number % 2],
        "logprobs": number % 4 == 0,
    }
    if number % 5 == 0:
        options["logit_bias"] = {400: 2.0, 401: -100.0}
    return prompt(number, 1 + (number * 37) % 150), options


def same(one: Result, other: Result) -> bool:
    return (one.tokens, one.logprobs, one.text) == (other.tokens, other.logprobs, other.text)


def test_an_answer_beside_31_others_has_the_bits_of_one_alone(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        asked = [request(number) for number in range(32)]
        together = await asyncio.gather(
            *(read(server.submit(tokens, **options)) for tokens, options in asked)
        )
        for number, (tokens, options) in enumerate(asked):
            alone = await read(server.submit(tokens, **options))
            assert same(alone, together[number]), f"request {number}"

    scenario(url, model, body, 32)


def test_an_answer_has_the_bits_of_a_model_that_writes_one_at_a_time(url: str, model: Path) -> None:
    asked = [request(number) for number in (0, 1, 2, 5, 8, 10)]
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, model)
        expected = [llm.generate(tokens, **options).result() for tokens, options in asked]

    async def body(server: Server) -> None:
        found = await asyncio.gather(*(read(server.submit(tokens, **options)) for tokens, options in asked))
        assert all(map(same, found, expected))

    scenario(url, model, body, 8)


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "qwen3moe", "gpt-oss"])
def test_windows_caps_and_experts_keep_answers_apart(url: str, folder: Path, kind: str) -> None:
    path = write_other(folder / f"{kind}.gguf", kind)

    async def body(server: Server) -> None:
        words = server.model.config.vocabulary
        asked = [np.random.default_rng(n).integers(10, words, 5 + 9 * n).tolist() for n in range(5)]
        options: dict[str, Any] = {"max_tokens": 12, "seed": 3}
        together = await asyncio.gather(*(read(server.submit(tokens, **options)) for tokens in asked))
        for tokens, one in zip(asked, together, strict=True):
            assert same(await read(server.submit(tokens, **options)), one)

    scenario(url, path, body, 8)


def test_a_prefix_that_the_cache_has_is_not_computed_again_and_changes_no_bit(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        long = prompt(5, 150)
        options: dict[str, Any] = {"max_tokens": 8, "seed": 1, "logprobs": True}
        first = await read(server.submit(long[:100], max_tokens=8, seed=1))
        whole = await read(server.submit(long, **options))
        again = await read(server.submit(long, **options))
        assert (first.reused_tokens, whole.reused_tokens, again.reused_tokens) == (0, 96, 128)
        other = await read(server.submit(long, tenant="other", **options))
        assert other.reused_tokens == 0
        assert same(whole, again) and same(whole, other)

    scenario(url, model, body, 4)


def test_what_an_answer_wrote_serves_a_prompt_that_continues_it(url: str, model: Path) -> None:
    """As each turn of a chat does: keys and values of decoding steps are those of a prompt."""

    async def body(server: Server) -> None:
        asked: dict[str, Any] = {"seed": 3, "logprobs": True, "logit_bias": {2: -100.0}}
        first = await read(server.submit(prompt(7, 40), max_tokens=70, **asked))
        longer = [*prompt(7, 40), *first.tokens, *prompt(8, 20)]
        found = await read(server.submit(longer, max_tokens=20, **asked))
        assert found.reused_tokens == 96
        alone = await read(server.submit(longer, tenant="other", max_tokens=20, **asked))
        assert alone.reused_tokens == 0 and same(found, alone)

    scenario(url, model, body, 4)


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_answers_that_wait_again_for_pages_go_on_with_the_same_bits(
    url: str, folder: Path, cache: CacheType
) -> None:
    path = write_model(folder / "heads.gguf", "llama", "q8_0", context=CONTEXT, heads=2, kv_heads=1, row=32)

    async def body(server: Server) -> None:
        long = {"max_tokens": 120, "logit_bias": {server.model.tokenizer.eos: -np.inf}}
        asked = [(tokens, {**options, **long}) for tokens, options in map(request, range(8))]
        answers = [server.submit(tokens, **options) for tokens, options in asked]
        together = await asyncio.gather(*map(read, answers))
        assert server.scheduler.puts_back and server.scheduler.pages.evictions
        for number, (tokens, options) in enumerate(asked):
            alone = await read(server.submit(tokens, tenant="alone", **options))
            assert same(alone, together[number]), f"request {number}"
        pages = server.scheduler.pages
        assert (pages.used, pages.shared, pages.free + pages.kept) == (0, 0, pages.total)

    scenario(url, path, body, 12, 64, 512, cache=cache)


def test_tables_of_any_size_give_the_same_bits(
    url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(number) for number in range(8)]
    found = []

    async def body(server: Server) -> None:
        found.append(
            await asyncio.gather(*(read(server.submit(tokens, **options)) for tokens, options in asked))
        )

    for fewest, growth in ((8, 4), (1, 2), (13, 2)):
        monkeypatch.setattr(scheduling, "FEWEST_PAGES", fewest)
        monkeypatch.setattr(scheduling, "GROWTH", growth)
        scenario(url, model, body, 8)
    for others in found[1:]:
        assert all(map(same, found[0], others))


def test_many_short_answers_fit_where_two_long_ones_do(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        answers = [server.submit(prompt(number), max_tokens=8, seed=1) for number in range(24)]
        deltas = aiter(answers[-1])
        await anext(deltas)
        assert not server.scheduler.waiting and not server.scheduler.puts_back
        for one in answers:
            one.close()

    scenario(url, model, body, 32, 64, 2 * CONTEXT)


def test_choices_among_all_tokens_are_written_beside_others_with_the_bits_of_one_alone(
    url: str, model: Path
) -> None:
    async def body(server: Server) -> None:
        asked: list[tuple[list[int], dict[str, Any]]] = [
            (prompt(number, 20), {"max_tokens": 30, "seed": number, "temperature": 1.2, "top_k": top_k})
            for number, top_k in enumerate((0, 40, 300, 129, 128, 0))
        ]
        together = await asyncio.gather(
            *(read(server.submit(tokens, **options)) for tokens, options in asked)
        )
        for (tokens, options), beside in zip(asked, together, strict=True):
            assert same(await read(server.submit(tokens, **options)), beside)

    scenario(url, model, body, 8)


def test_requests_join_while_others_are_written(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        first = server.submit(prompt(1), max_tokens=300, temperature=0.9, seed=1)
        deltas = aiter(first)
        await anext(deltas)
        second = await read(server.submit(prompt(2), max_tokens=5, seed=2))
        assert len(second.tokens) == 5 and first.result.finish_reason is None
        async for _ in deltas:
            pass
        assert first.result.finish_reason

    scenario(url, model, body, 4)


def test_a_row_of_a_loop_waits_at_its_limit_and_goes_on_with_the_same_bits_when_it_is_fed(
    url: str, model: Path
) -> None:
    rows, steps = 2, 40

    async def body(server: Server) -> None:
        plan = await server.plans.decoding(rows, server.scheduler.table_sizes[0], FORM, is_adapted=False)
        pages = plan.inputs["table"].shape[1]
        tables = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        row = FORM_SETTINGS.inputs(server.model.config.vocabulary, [], FORM)
        inputs: dict[str, Any] = {
            **{name: np.concatenate([one] * rows) for name, one in row.items()},
            "token": [300, 301],
            "position": [0, 0],
            "ends": np.full((rows, ENDS), -1, np.int32),
            "table": tables,
        }

        async def loop(limits: list[int]) -> tuple[list[int], int]:
            """Return the tokens of row 0, and the steps in which it waited before the last one."""
            made = plan.loop(
                {**inputs, "limit": limits},
                steps=10**6,
                carry=carries(FORM),
                until="idle",
                taps=["chosen"],
                feed=["limit", "table"],
                fetch=(),
            )
            tokens, waited = [], 0
            async for tap in made.taps(SECONDS):
                if tap.value[0, 0] >= 0:
                    tokens.append(int(tap.value[0, 0]))
                elif len(tokens) < steps:
                    waited += 1
                    if waited == 3:
                        made.feed({"limit": [steps], "table": tables[:1]}, rows=[0])
            await made.result()
            return tokens, waited

        whole, waited = await loop([steps, 0])
        assert len(whole) == steps and not waited
        parts, waited = await loop([7, 32 * pages])
        assert parts == whole and waited >= 3

    scenario(url, model, body, 4)


def test_plans_are_bounded_and_those_that_were_not_used_for_the_longest_time_are_freed(
    url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_plans, "MOST_PLANS", 4)

    async def body(server: Server) -> None:
        def written(number: int) -> Awaitable[Result]:
            tokens, options = request(number)
            return read(server.submit(tokens[:20], **options))

        whole = dict(server.plans.known)
        assert len(whole) == 3
        first = [await written(number) for number in (0, 1)]
        seen = whole | dict(server.plans.known)
        again = [await written(number) for number in (0, 1)]
        assert all(map(same, first, again))
        seen |= dict(server.plans.known)
        assert len(server.plans.known) == 4 and len(seen) > 4 and next(iter(whole)) in server.plans.known
        for key, plan in seen.items():
            if key in server.plans.known:
                await plan.explain()
            else:
                with pytest.raises(hg.UnknownHandleError):
                    await plan.explain()

    scenario(url, model, body, 4)


def test_a_reader_that_leaves_frees_its_place(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        expected = await read(server.submit(prompt(3), max_tokens=6, seed=5))
        first = server.submit(prompt(1), max_tokens=300, seed=1)
        waiting = server.submit(prompt(3), max_tokens=6, seed=5)
        deltas = aiter(first)
        await anext(deltas)
        assert server.scheduler.waiting == 1
        first.close()
        assert same(await read(waiting), expected)
        assert not server.scheduler.jobs

    scenario(url, model, body, 1)


def test_a_reader_that_leaves_while_a_plan_is_compiled_ends_its_own_answer_alone(
    url: str, model: Path
) -> None:
    async def body(server: Server) -> None:
        expected = await read(server.submit(prompt(3), max_tokens=40, seed=5))
        beside = server.submit(prompt(3), max_tokens=40, seed=5)
        deltas = aiter(beside)
        await anext(deltas)
        leaving = server.submit(prompt(1, 150), max_tokens=5, seed=1)
        # No prompt had so many tokens before: the plan of its chunk is compiled now.
        for _ in range(100_000):
            await asyncio.sleep(0)
            if leaving.job.pages:
                break
        leaving.close()
        async for _ in deltas:
            pass
        assert same(beside.result, expected)
        assert not server.scheduler.jobs

    scenario(url, model, body, 2)


def test_a_task_that_is_cancelled_frees_its_place(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        task = asyncio.create_task(read(server.submit(prompt(1), max_tokens=300, seed=1)))
        other = asyncio.create_task(read(server.submit(prompt(2), max_tokens=300, seed=1)))
        await read(server.submit(prompt(3), max_tokens=2, seed=1))
        task.cancel()
        assert len((await other).tokens) <= 300 and task.cancelled()
        assert not server.scheduler.jobs

    scenario(url, model, body, 4)


def test_a_stream_whose_client_left_before_its_first_event_frees_its_place(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        answering = server.submit(prompt(1), max_tokens=300, seed=1)

        async def events() -> AsyncGenerator[bytes, None]:
            raise AssertionError("the stream is read")
            yield b""

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await EventStream(events(), [answering])(scope, receive, send)
        assert not list(server.scheduler.all_jobs)

    scenario(url, model, body, 1)


def test_a_full_queue_refuses_a_request(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        taken = [server.submit(prompt(number), max_tokens=5, seed=1) for number in range(3)]
        with pytest.raises(QueueFullError, match="requests wait already, of at most 2"):
            server.submit(prompt(9), max_tokens=5)
        for one in taken:
            assert len((await read(one)).tokens) <= 5

    scenario(url, model, body, 1, 2)


def test_an_answer_that_takes_too_long_is_an_error_and_the_others_go_on(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        late = server.submit(prompt(1), max_tokens=300, seed=1, seconds=0.0)
        other = server.submit(prompt(2), max_tokens=5, seed=1)
        with pytest.raises(hg.DeadlineExceededError, match="took longer than its time"):
            await read(late)
        assert (await read(other)).finish_reason

    scenario(url, model, body, 2)


def test_bad_requests_are_refused_before_they_wait(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        for options, match in (
            ({"temperature": -1}, "temperature is -1"),
            ({"top_k": -1}, "top_k is -1"),
            ({"logit_bias": {100_000: 1.0}}, "logit_bias is"),
            ({"max_tokens": 0}, "max_tokens is 0"),
        ):
            with pytest.raises(hg.InvalidArgumentError, match=match):
                server.submit(prompt(1), **options)  # type: ignore[arg-type]
        with pytest.raises(hg.LimitExceededError, match=f"has {CONTEXT} tokens, the context {CONTEXT}"):
            server.submit(prompt(1, CONTEXT))
        assert not server.scheduler.jobs and not server.scheduler.waiting

    scenario(url, model, body, 2)


def test_an_answer_ends_with_the_context(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        options: dict[str, Any] = {"seed": 3, "logit_bias": {server.model.tokenizer.eos: -np.inf}}
        beside = server.submit(prompt(4), max_tokens=20, **options)
        result = await read(server.submit(prompt(2, CONTEXT - 10), **options))
        assert len(result.tokens) == 11 and result.finish_reason == "length"
        assert len((await read(beside)).tokens) == 20

    scenario(url, model, body, 2)


def test_a_stop_text_ends_its_own_answer_alone(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        whole = await read(server.submit(prompt(1), max_tokens=30, seed=7))
        stop = whole.text[8:11]
        beside = server.submit(prompt(1), max_tokens=30, seed=7)
        stopped = await read(server.submit(prompt(1), max_tokens=30, seed=7, stop=stop))
        assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"
        assert same(await read(beside), whole)

    scenario(url, model, body, 2)


def test_a_server_that_closes_ends_its_answers_with_an_error(url: str, model: Path) -> None:
    async def run() -> None:
        async with serving(url, model) as server:
            answering = server.submit(prompt(1), max_tokens=300, seed=1)
            await server.close()
            with pytest.raises(hg.DrainingError):
                await read(answering)
            with pytest.raises(hg.DrainingError):
                server.submit(prompt(1))

    asyncio.run(run())


def test_servers_one_after_the_other_find_the_memory_of_the_one_before(model: Path) -> None:
    """Each has a cache of more than half of the memory."""

    async def run() -> None:
        with running_daemon("--device", "cpu:threads=1,memory=24MiB") as url:
            async with hg.aio.connect(url) as session:
                for draft in (None, "prompt", None):
                    bounds = Bounds(2, cache_tokens=60_000)
                    server = await Server.load(session, model, bounds=bounds, draft=draft)
                    assert len((await read(server.submit(prompt(1), max_tokens=9))).tokens) == 9
                    held = (await session.devices[0].memory()).free_bytes
                    assert held < 12 * 2**20
                    await server.close()

    asyncio.run(run())


def test_a_daemon_that_ends_ends_answers_with_an_error(model: Path) -> None:
    async def run() -> None:
        with running_daemon("--device", "cpu:threads=1,memory=1GiB") as url:
            session = await hg.aio.connect(url, reconnect=0.5)
            server = await Server.load(session, model, bounds=Bounds(2))
            answering = server.submit(prompt(1), max_tokens=300, seed=1)
            await anext(aiter(answering))
        with pytest.raises(hg.HeliographError):
            async with asyncio.timeout(SECONDS):
                await read(server.submit(prompt(2), max_tokens=300))
        await server.close()
        await session.close()

    asyncio.run(run())


def test_a_prompt_that_exceeds_the_cache_is_refused_and_an_answer_ends_with_it(url: str, model: Path) -> None:
    async def body(server: Server) -> None:
        with pytest.raises(hg.LimitExceededError, match="has 128 tokens, the cache 128"):
            server.submit(prompt(1, 128))
        options: dict[str, Any] = {"seed": 3, "logit_bias": {server.model.tokenizer.eos: -np.inf}}
        result = await read(server.submit(prompt(1, 100), **options))
        assert len(result.tokens) == 29 and result.finish_reason == "length"

    scenario(url, model, body, 4, 64, 150)


def test_answers_and_the_cache_are_bounded(url: str, model: Path) -> None:
    async def run() -> None:
        async with hg.aio.connect(url) as session:
            for bounds, match in (
                (Bounds(33), "answers is 33"),
                (Bounds(0), "answers is 0"),
                (Bounds(cache_tokens=31), "cache_tokens is 31"),
                (Bounds(cache_tokens=2**31), "cache_tokens is 2147483648"),
            ):
                with pytest.raises(hg.InvalidArgumentError, match=match):
                    await Server.load(session, model, bounds=bounds)

    asyncio.run(run())
