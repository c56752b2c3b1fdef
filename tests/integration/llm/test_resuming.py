"""Answers go on after their daemon was killed, with the bits that they would have had."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import waiting
from gguf_files import write_model
from llm_servers import HttpModel, events, served
from lora_files import write_adapter
from surviving_daemons import SurvivingDaemon

import heliograph as hg
from heliograph.llm import Draft, LanguageModel, Result
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.effects import Ask, blocking
from heliograph.llm.language_model import Asked, constraint_in
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.pages import PAGE

SECONDS = 90.0
#: Long enough that a daemon dies in the middle of an answer.
CONTEXT = 700
TOKENS = 400
PROMPT = "The daemon serves graphs"
#: No answer ends before its last token.
NO_END = {"logit_bias": {2: -100.0}}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, **NO_END},
    {"seed": 3, "repeat_penalty": 1.3, "frequency_penalty": 0.2, **NO_END},
    {"seed": 4, "logprobs": True, "temperature": 1.5, **NO_END},
    {"seed": 5, "top_k": 0, "top_p": 1.0, **NO_END},
)
FORM = {"schema": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}}


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=CONTEXT)


@pytest.fixture(scope="module")
def calm(folder: Path) -> Iterator[hg.Session]:
    """A daemon that nothing happens to."""
    with SurvivingDaemon(None) as daemon, hg.connect(daemon.url, progress=None) as session:
        yield session


@pytest.fixture
def daemon(folder: Path) -> Iterator[SurvivingDaemon]:
    """One that keeps no state, and dies."""
    with SurvivingDaemon(None, "--models", str(folder)) as daemon:
        yield daemon


def expected(session: hg.Session, model: Path, *options: dict[str, Any], **how: Any) -> list[Result]:
    llm = hg.llm.load(session, model, **how)
    try:
        return [llm.generate(PROMPT, **{"max_tokens": TOKENS, **one}).result() for one in options]
    finally:
        llm.close()


def killed_in_the_middle(
    llm: LanguageModel, daemon: SurvivingDaemon, options: dict[str, Any], kills: int = 1
) -> Result:
    """The answer of a daemon that dies after some tokens, so often."""
    answer = llm.generate(PROMPT, **{"max_tokens": TOKENS, **options})
    text, killed, due = "", 0, 20
    for piece in answer:
        text += piece
        count = len(answer.so_far.tokens)
        # Some that the dead daemon had sent come first.
        if llm._engine.session.number == killed < kills and count >= due:
            daemon.restart()
            killed, due = killed + 1, count + 40
    assert text == answer.so_far.text
    return answer.result()


def same(one: Result, other: Result) -> bool:
    names = ("tokens", "text", "logprobs", "finish_reason", "prompt_tokens")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("options", SETTINGS, ids=["greedy", "penalties", "logprobs", "all tokens"])
def test_an_answer_goes_on_after_its_daemon_was_killed(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path, options: dict[str, Any]
) -> None:
    [calmly] = expected(calm, model, options)
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, model)
        found = killed_in_the_middle(llm, daemon, options, kills=2)
        assert same(found, calmly) and llm._engine.session.number == 2
        # The next one needs nothing of that.
        assert same(llm.generate(PROMPT, max_tokens=TOKENS, **options).result(), calmly)
        llm.close()


def test_a_durable_session_keeps_its_model_over_a_restart(
    calm: hg.Session, folder: Path, model: Path
) -> None:
    [calmly] = expected(calm, model, SETTINGS[1])
    with SurvivingDaemon(folder / "state") as daemon, daemon.connect(progress=None) as session:
        llm = hg.llm.load(session, model)
        session.snapshot()
        answer = llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[1])
        text = next(answer)
        daemon.restart()
        text += "".join(answer)
        assert same(answer.result(), calmly) and text == calmly.text
        assert not session.closed and not llm._engine.session.number


def test_an_answer_that_was_closed_does_not_break_a_durable_session(
    calm: hg.Session, folder: Path, model: Path
) -> None:
    [calmly] = expected(calm, model, SETTINGS[1])
    with SurvivingDaemon(folder / "cancelled") as daemon, daemon.connect(progress=None) as session:
        llm = hg.llm.load(session, model)
        session.snapshot()
        answer = llm.generate("Another one", max_tokens=TOKENS, **SETTINGS[0])
        next(answer)
        answer.close()
        daemon.restart()
        assert same(llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[1]).result(), calmly)
        assert not session.closed and not llm._engine.session.number


def test_weights_on_the_server_are_found_there_again(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path
) -> None:
    adapter = write_adapter(model.parent / "adapter.gguf", model)
    [calmly] = expected(calm, model, SETTINGS[1], adapters=[adapter])
    with hg.connect(daemon.url, progress=None) as session:
        file, other = (session.server_weights(one.name) for one in (model, adapter))
        llm = hg.llm.load(session, file, adapters=[other])
        assert same(killed_in_the_middle(llm, daemon, SETTINGS[1]), calmly)


def test_a_file_that_is_another_one_afterwards_is_refused(
    daemon: SurvivingDaemon, model: Path, folder: Path
) -> None:
    changing = write_model(folder / "changing.gguf", "llama", "q8_0", context=CONTEXT)
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, session.server_weights(changing.name))
        answer = llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[0])
        next(answer)
        daemon.kill()
        write_model(changing, "llama", "q8_0", context=CONTEXT, seed=2)
        daemon.start()
        with pytest.raises(hg.InvalidModelError, match="another file"):
            answer.result()


@pytest.mark.parametrize("draft", ["prompt", "model"])
def test_a_speculated_answer_goes_on(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path, draft: str
) -> None:
    [calmly] = expected(calm, model, SETTINGS[1])
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, model, draft=Draft(model if draft == "model" else draft, 3))
        found = killed_in_the_middle(llm, daemon, SETTINGS[1])
        assert same(found, calmly)
        assert found.speculation is not None and found.speculation.proposed


def test_an_answer_that_follows_a_grammar_goes_on(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path
) -> None:
    options = {**SETTINGS[1], **FORM}
    [calmly] = expected(calm, model, options)
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, model)
        found = killed_in_the_middle(llm, daemon, options)
        assert same(found, calmly) and (found.finish_reason == "length" or found.parsed())
        assert llm._engine.session.number == 1
        llm.close()


def test_logits_and_vectors_are_computed_again(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path
) -> None:
    texts = [PROMPT, "Another text"]
    vectors = hg.llm.load(calm, model).embed(texts).tobytes()
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, model)
        assert llm.embed(texts).tobytes() == vectors
        daemon.restart()
        assert llm.embed(texts).tobytes() == vectors
        assert llm._engine.session.number == 1


def test_without_the_daemon_an_answer_ends_with_an_error_and_the_next_one_tries_again(
    daemon: SurvivingDaemon, model: Path
) -> None:
    with hg.connect(daemon.url, progress=None, reconnect=0.5) as session:
        llm = hg.llm.load(session, model)
        answer = llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[0])
        next(answer)
        daemon.kill()
        with pytest.raises(hg.UnavailableError, match="no other one opens"):
            answer.result()
        daemon.start()
        assert len(llm.generate(PROMPT, max_tokens=5, **SETTINGS[0]).tokens) == 5


def test_a_session_that_was_closed_or_wishes_for_no_other_stays_lost(
    daemon: SurvivingDaemon, model: Path
) -> None:
    with hg.connect(daemon.url, progress=None) as session:
        closed = hg.llm.load(session, model)
    with pytest.raises(hg.SessionClosedError, match="the session was closed"):
        closed.generate(PROMPT).result()
    with hg.connect(daemon.url, progress=None, reconnect=False) as session:
        llm = hg.llm.load(session, model)
        answer = llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[0])
        next(answer)
        daemon.restart()
        with pytest.raises(hg.ConnectionError):
            answer.result()
        assert session.closed and not llm._engine.session.number


def test_the_session_that_took_a_lost_ones_place_ends_with_it_and_with_its_model(
    daemon: SurvivingDaemon, model: Path
) -> None:
    with hg.connect(daemon.url, progress=None) as session:
        llm, other = hg.llm.load(session, model), hg.llm.load(session, model)
        daemon.restart()
        assert llm.generate(PROMPT, max_tokens=3).tokens and other.generate(PROMPT, max_tokens=3).tokens
        first, second = session._successors
        llm.close()
        assert first.closed and not second.closed
    assert second.closed


# Many answers


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - counts have no events
        await asyncio.sleep(0.001)


def written(server: Server) -> int:
    return sum(len(one.result.tokens) for one in server._answers.values())


async def read(answering: Answering) -> Result:
    text = "".join([delta.text async for delta in answering])
    assert text == answering.result.text
    return answering.result


def test_many_answers_and_those_that_wait_go_on(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path
) -> None:
    asked = [{**SETTINGS[number % 4], "seed": number} for number in range(7)]
    asked.append({**SETTINGS[1], **FORM})
    calmly = expected(calm, model, *asked)

    async def answered(server: Server, options: dict[str, Any]) -> Result:
        form = {name: options[name] for name in FORM if name in options}
        rest = {name: value for name, value in options.items() if name not in FORM}
        tokens = server.model.tokenizer.encode(PROMPT)
        prompt = Asked(tokens, constraint_in(form))
        [matcher] = await server.following.begin(prompt, 1)
        return await read(server.submit(prompt, matcher=matcher, max_tokens=TOKENS, **rest))

    async def run() -> None:
        async with hg.aio.connect(daemon.url, progress=None) as session:
            server = await Server.load(session, model, bounds=Bounds(5, 8))
            try:
                work = [asyncio.create_task(answered(server, one)) for one in asked]
                for kills in (1, 2):
                    await until(lambda: written(server) > 30 * kills)  # noqa: B023
                    await asyncio.to_thread(daemon.restart)
                    await until(lambda: server.session.number == kills)  # noqa: B023
                found = await asyncio.gather(*work)
                assert [same(*pair) for pair in zip(found, calmly, strict=True)] == [True] * 8
                assert not server.is_reconnecting and server.is_connected
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_many_answers_of_a_durable_session_go_on_in_it(calm: hg.Session, folder: Path, model: Path) -> None:
    asked = [{**SETTINGS[1], "seed": number} for number in range(4)]
    calmly = expected(calm, model, *asked)

    async def run() -> None:
        with SurvivingDaemon(folder / "many") as daemon:
            async with hg.aio.connect(daemon.url, progress=None, durable=True) as session:
                server = await Server.load(session, model, bounds=Bounds(4))
                try:
                    await session.snapshot()
                    tokens = server.model.tokenizer.encode(PROMPT)
                    answers = [server.submit(tokens, max_tokens=TOKENS, **one) for one in asked]
                    work = asyncio.gather(*map(read, answers))
                    # Loops of answers that need pages are fed, and that cannot be done again.
                    await until(lambda: written(server) > 4 * 2 * PAGE)
                    await asyncio.to_thread(daemon.restart)
                    assert [same(*pair) for pair in zip(await work, calmly, strict=True)] == [True] * 4
                    assert not session.closed and not server.session.number
                finally:
                    await server.close()

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_an_answer_goes_on_under_asyncio(calm: hg.Session, daemon: SurvivingDaemon, model: Path) -> None:
    [calmly] = expected(calm, model, SETTINGS[2])

    async def run() -> None:
        async with hg.aio.connect(daemon.url, progress=None) as session:
            llm = await hg.llm.load(session, model)
            answer = llm.generate(PROMPT, max_tokens=TOKENS, **SETTINGS[2])
            text = await anext(answer)
            await asyncio.to_thread(daemon.restart)
            async for piece in answer:
                text += piece
            assert same(answer.so_far, calmly) and text == calmly.text
            assert llm._engine.session.number == 1
            await llm.close()

    asyncio.run(asyncio.wait_for(run(), SECONDS))


@contextmanager
def restarted_later(daemon: SurvivingDaemon) -> Iterator[threading.Event]:
    """A dead daemon, which starts once the event is set."""
    back = threading.Event()

    def start() -> None:
        back.wait(SECONDS)
        daemon.start()

    thread = threading.Thread(target=start, name="restart")
    daemon.kill()
    thread.start()
    try:
        yield back
    finally:
        back.set()
        thread.join(SECONDS)


def streamed(http: HttpModel, daemon: SurvivingDaemon, body: dict[str, Any]) -> tuple[str, list[Any]]:
    """The text and the log-probabilities of a stream whose daemon dies after some pieces."""
    text, logprobs, is_killed = "", [], False
    with http.opened("POST", "/v1/completions", {**body, "stream": True}) as response:
        for one in events(response):
            if one == "[DONE]":
                return text, logprobs
            [choice] = one["choices"]
            text += choice["text"]
            logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            if not is_killed and len(text) > 30:
                is_killed = True
                with restarted_later(daemon) as back:
                    waiting.until(lambda: health(http) == (503, "reconnecting"), SECONDS)
                    back.set()
    raise AssertionError("the stream ended early")


def health(http: HttpModel) -> tuple[int, str]:
    status, found, _ = http.call("GET", "/health")
    return status, found.get("status", "")


def test_streams_of_the_endpoint_go_on_and_health_tells_of_it(
    calm: hg.Session, daemon: SurvivingDaemon, model: Path
) -> None:
    body = {
        "prompt": PROMPT, "max_tokens": TOKENS, "seed": 9, "temperature": 1.0, "logprobs": 1,
        "logit_bias": {"2": -100}, "stop": ["no such text is written"],
    }  # fmt: skip
    with served(daemon.url, model, Bounds(4, 8)) as http:
        [calmly] = http.post("/v1/completions", **body)["choices"]
        assert health(http) == (200, "ok")
        whole: list[Any] = []
        others = [
            threading.Thread(target=lambda: whole.append(http.post("/v1/completions", **body)["choices"][0]))
            for _ in range(2)
        ]
        for one in others:
            one.start()
        text, logprobs = streamed(http, daemon, body)
        for one in others:
            one.join(SECONDS)
        assert text == calmly["text"] and logprobs == calmly["logprobs"]["token_logprobs"]
        assert whole == [calmly, calmly]
        assert health(http) == (200, "ok") and http.figures()["heliograph_llm_sessions_reopened_total"] == 1


def test_an_endpoint_without_requests_is_ready_again_before_the_next_one(
    daemon: SurvivingDaemon, model: Path
) -> None:
    with served(daemon.url, model, Bounds(2)) as http:
        before = http.post("/v1/completions", prompt=PROMPT, seed=1)["choices"]
        daemon.restart()
        waiting.until(lambda: health(http)[0] == 503, SECONDS)
        waiting.until(lambda: health(http) == (200, "ok"), SECONDS)
        assert http.figures()["heliograph_llm_sessions_reopened_total"] == 1
        assert http.post("/v1/completions", prompt=PROMPT, seed=1)["choices"] == before


def test_requests_end_with_503_where_the_daemon_stays_away(daemon: SurvivingDaemon, model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "logit_bias": {"2": -100}, "stream": True}
    with served(daemon.url, model, Bounds(1, 4), reconnect=0.5) as http:
        with http.opened("POST", "/v1/completions", body) as response:
            pieces = events(response)
            next(pieces)
            daemon.kill()
            # One that waits ends too.
            status, found, _ = http.call("POST", "/v1/completions", {**body, "stream": False})
            assert (status, found["error"]["code"]) == (503, "unavailable")
            *_, error, done = pieces
            assert error["error"]["code"] == "unavailable" and done == "[DONE]"
        daemon.start()
        waiting.until(lambda: health(http) == (200, "ok"), SECONDS)
        assert http.post("/v1/completions", prompt=PROMPT)["choices"]


def test_work_that_ends_each_daemon_is_given_up(daemon: SurvivingDaemon, model: Path) -> None:
    with hg.connect(daemon.url, progress=None) as session:
        llm = hg.llm.load(session, model)
        current, began = llm._engine.session, []

        def work() -> Any:
            began.append(current.number)
            daemon.restart()
            yield Ask(session_of(current).server_traffic)

        with pytest.raises(hg.ConnectionError):
            for _ in blocking(current.kept_up(work)):
                pass
        assert began == [0, 1, 2, 3]


def session_of(current: CurrentSession) -> Any:
    return current._session
