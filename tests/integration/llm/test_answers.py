"""Answers: a seed and a prompt give one text, whatever was before; and how answers end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_daemons import running_daemon
from gguf_files import write_model
from llm_models import NumpyModel

import heliograph as hg

PROMPT = "The daemon serves graphs to many clients."


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "small.gguf", "llama", "q8_0", context=700)


@pytest.fixture
def llm(url: str, model: Path) -> Iterator[hg.llm.LanguageModel]:
    with hg.connect(url, progress=None) as session:
        yield hg.llm.load(session, model)


def long_prompt(count: int) -> list[int]:
    return np.random.default_rng(5).integers(300, 600, count).tolist()


def text(llm: hg.llm.LanguageModel, prompt: Any = PROMPT, **options: Any) -> str:
    return llm.generate(prompt, **{"max_tokens": 24, "seed": 7, **options}).text


def test_a_seed_gives_the_same_text_and_another_seed_another_one(llm: hg.llm.LanguageModel) -> None:
    first = text(llm)
    assert text(llm) == first
    assert text(llm, seed=8) != first
    answer = llm.generate(PROMPT, max_tokens=24)
    assert text(llm, seed=answer.seed) == answer.text


def test_pieces_make_up_the_text(llm: hg.llm.LanguageModel) -> None:
    answer = llm.generate(PROMPT, max_tokens=24, seed=7)
    pieces = list(answer)
    result = answer.result()
    assert len(pieces) > 1 and "".join(pieces) == result.text == text(llm)
    assert (len(result.tokens), result.finish_reason, result.prompt_tokens) == (
        24,
        "length",
        llm.count_tokens(PROMPT),
    )
    assert result.tokens_per_second > 0 and result.prompt_tokens_per_second > 0


def test_a_prompt_in_two_calls_gives_the_bits_of_one(url: str, model: Path) -> None:
    """The cache of the first call is the beginning of the second, and its chunks differ."""
    tokens = long_prompt(650)
    with hg.connect(url) as session:
        whole = hg.llm.load(session, model).generate(tokens, max_tokens=20, seed=1, logprobs=True).result()
        llm = hg.llm.load(session, model)
        llm.generate(tokens[:217], max_tokens=9, seed=2).result()
        continued = llm.generate(tokens, max_tokens=20, seed=1, logprobs=True).result()
    assert (whole.reused_tokens, continued.reused_tokens) == (0, 217)
    assert continued.tokens == whole.tokens and continued.logprobs == whole.logprobs


@pytest.mark.parametrize(
    "architecture",
    ["llama", pytest.param("qwen3", marks=pytest.mark.long), pytest.param("gemma3", marks=pytest.mark.long)],
)
def test_threads_and_answers_that_were_cancelled_change_no_bits(tmp_path: Path, architecture: str) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, "f16", context=256)
    tokens = [one - 250 for one in long_prompt(100)]
    found = []
    for threads in (1, 2, 4):
        device = f"cpu:threads={threads},memory=1GiB"
        with running_daemon("--device", device) as url, hg.connect(url, progress=None) as session:
            llm = hg.llm.load(session, path)
            for read in (0, 17, 61):
                cancelled = llm.generate(tokens[: read + 1], seed=read, max_tokens=50)
                next(cancelled, None)
                cancelled.close()
                result = llm.generate(tokens, max_tokens=12, seed=1, logprobs=True).result()
                found.append((result.tokens, result.logprobs))
    assert all(one == found[0] for one in found)


def test_decoded_rows_are_those_of_a_prompt_to_the_bit(llm: hg.llm.LanguageModel) -> None:
    tokens = long_prompt(40)
    first = llm.generate(tokens, max_tokens=30, temperature=0, logprobs=True).result()
    longer = [*tokens, *first.tokens[:20]]
    reused = llm.generate(longer, max_tokens=10, temperature=0, logprobs=True).result()
    assert reused.reused_tokens == 59
    llm.logits(tokens)
    computed = llm.generate(longer, max_tokens=10, temperature=0, logprobs=True).result()
    assert computed.reused_tokens == 40
    assert first.logprobs[20:] == reused.logprobs == computed.logprobs


def test_greedy_tokens_are_those_of_the_reference(llm: hg.llm.LanguageModel, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama")
    with hg.connect("local:") as session:
        tokens = hg.llm.load(session, path).generate(PROMPT, max_tokens=8, temperature=0).tokens
        prompt = hg.llm.load(session, path).tokenizer.encode(PROMPT)
    reference = NumpyModel(path)
    for place, token in enumerate(tokens):
        assert reference.logits([*prompt, *tokens[:place]])[-1].argmax() == token


def test_settings_change_no_plan(url: str, model: Path) -> None:
    """All settings are inputs, so that another one compiles nothing."""
    with hg.connect(url) as session:
        llm = hg.llm.load(session, model)
        text(llm)
        before = llm.plans
        text(llm, temperature=1.5, top_k=3, top_p=0.5, min_p=0.2, stop="x")
        text(llm, repeat_penalty=1.3, penalty_last=9, presence_penalty=0.5, frequency_penalty=0.1)
        assert llm.plans == before


def test_a_narrow_choice_is_the_likeliest_token(llm: hg.llm.LanguageModel) -> None:
    likeliest = text(llm, temperature=0)
    assert text(llm, top_k=1) == text(llm, top_p=0.0) == text(llm, min_p=1.0) == likeliest
    assert text(llm, top_k=0, top_p=0.0) == likeliest


def test_the_whole_vocabulary_and_its_head_give_the_same_choice(llm: hg.llm.LanguageModel) -> None:
    """The number of sorted tokens does not matter where few have all chances."""
    biases = {300 + 9 * place: 60.0 + place / 4 for place in range(7)}
    options: dict[str, Any] = {"logit_bias": biases, "temperature": 3.0}
    assert text(llm, top_k=0, **options) == text(llm, top_k=128, **options)


def test_choices_follow_the_chances(llm: hg.llm.LanguageModel) -> None:
    """First tokens of many seeds, beside the model's own probabilities."""
    head = llm.generate(PROMPT, max_tokens=1, temperature=0, logprobs=True).result().logprobs[0].alternatives
    chances = np.exp([chance for _, chance in head[:3]])
    counts = dict.fromkeys((token for token, _ in head[:3]), 0)
    for seed in range(150):
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
        counts[llm.generate(PROMPT, max_tokens=1, seed=seed, **options).tokens[0]] += 1
    found = np.array(list(counts.values())) / 150
    np.testing.assert_allclose(found, chances / chances.sum(), atol=0.13)


def test_a_penalty_keeps_tokens_from_coming_again(llm: hg.llm.LanguageModel) -> None:
    tokens = llm.generate(PROMPT, max_tokens=30, temperature=0, presence_penalty=100.0).tokens
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(llm.tokenizer.encode(PROMPT))
    doubled = llm.generate(PROMPT, max_tokens=30, temperature=0, repeat_penalty=50.0).tokens
    assert doubled != llm.generate(PROMPT, max_tokens=30, temperature=0).tokens


def test_biases_force_and_forbid_tokens(llm: hg.llm.LanguageModel) -> None:
    forced = llm.generate(PROMPT, max_tokens=5, seed=1, logit_bias={400: 1000.0}).tokens
    assert forced == [400] * 5
    best = llm.generate(PROMPT, max_tokens=1, temperature=0).tokens[0]
    assert llm.generate(PROMPT, max_tokens=1, temperature=0, logit_bias={best: -np.inf}).tokens != [best]


def test_of_tied_logits_the_first_token_is_taken(llm: hg.llm.LanguageModel) -> None:
    tied = dict.fromkeys((599, 410, 455), 100000000.0)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_k": 0, "top_p": 0.0}):
        assert llm.generate(PROMPT, max_tokens=1, seed=1, logit_bias=tied, **options).tokens == [410]


def test_an_answer_ends_at_the_end_token(llm: hg.llm.LanguageModel) -> None:
    end = llm.tokenizer.eos
    assert end is not None
    result = llm.generate(PROMPT, temperature=0, logit_bias={end: 1000.0}).result()
    assert (result.tokens, result.text, result.finish_reason) == ([end], "", "stop")


def test_an_answer_ends_before_a_stop_text(llm: hg.llm.LanguageModel) -> None:
    whole = text(llm)
    stop = whole[10:14]
    result = llm.generate(PROMPT, max_tokens=24, seed=7, stop=["never there", stop]).result()
    assert (result.text, result.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert text(llm) == whole


def test_an_answer_ends_with_the_context(llm: hg.llm.LanguageModel) -> None:
    tokens = long_prompt(690)
    end = llm.tokenizer.eos
    assert end is not None
    result = llm.generate(tokens, seed=3, logit_bias={end: -np.inf}).result()
    assert len(result.tokens) == 11 and result.finish_reason == "length"
    with pytest.raises(hg.LimitExceededError, match="the prompt has 700 tokens, the context 700"):
        llm.generate(long_prompt(700))


def test_bad_options_are_refused_before_anything_is_sent(llm: hg.llm.LanguageModel) -> None:
    for options, match in (
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop": [""]}, "stop is"),
        ({"warmth": 1}, "no option 'warmth'\n.*options are max_tokens"),
        ({"logit_bias": {100_000: 1.0}}, "logit_bias is"),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            llm.generate(PROMPT, **options).result()  # type: ignore[arg-type]
    for options, match in (
        ({"stop": 5}, "stop is 5"),
        ({"logit_bias": [400]}, "logit_bias is"),
        ({"logit_bias": {400: "x"}}, "logit_bias is"),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            llm.generate(PROMPT, **options).result()  # type: ignore[arg-type]
    with pytest.raises(hg.InvalidArgumentError, match="token 100000 is not"):
        llm.generate([5, 100_000])
    assert text(llm)


@pytest.mark.parametrize("prompt", [None, 5, b"abc", ["a"], [1.5], [[3, 4]]])
def test_a_prompt_of_another_type_is_refused(llm: hg.llm.LanguageModel, prompt: Any) -> None:
    for call in (llm.generate, llm.logits):
        with pytest.raises(hg.InvalidArgumentError, match="a prompt is"):
            call(prompt)
    with pytest.raises(hg.InvalidArgumentError, match="a prompt is"):
        llm.embed([prompt])


def test_messages_tools_and_variables_of_other_types_are_refused(llm: hg.llm.LanguageModel) -> None:
    user, tool = {"role": "user", "content": "x"}, {"type": "function", "function": {"name": "now"}}
    odd = {"type": "function", "function": {"name": "now", "parameters": {"enum": [object()]}}}
    messages: Any
    options: Any
    for messages, options, match in (
        ("hello", {}, "messages are 'hello'"),
        (user, {}, "messages are"),
        (None, {}, "messages are None"),
        ([3], {}, r"messages\[0\] is 3"),
        ([{"content": "x"}], {}, r"messages\[0\] is"),
        ([{"role": "user", "content": 3}], {"tools": [tool]}, "messages has the content 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages has the content"),
        ([{"role": "assistant", "tool_calls": 3}], {}, "messages has the tool_calls 3"),
        ([{"role": "assistant", "tool_calls": [3]}], {}, "messages has the tool_calls"),
        ([user], {"variables": 3}, "variables of the template are 3"),
        ([user], {"tools": [odd]}, r"tools\[0\] cannot be written as JSON"),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            llm.chat(messages, max_tokens=1, **options)
    parts = [{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]}]
    whole = [{"role": "user", "content": "One two"}]
    assert llm.chat(parts, max_tokens=9, seed=4).text == llm.chat(whole, max_tokens=9, seed=4).text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context": True}, "context is True"),
        ({"context": 1e3}, "context is 1000"),
        ({"draft": 3}, "the file is 3"),
        ({"adapters": None}, "adapters is None"),
        ({"adapters": [("a.gguf", 0.5)]}, "the file is"),
    ],
)
def test_arguments_of_other_types_are_refused(url: str, model: Path, options: Any, match: str) -> None:
    with hg.connect(url, progress=None) as session:
        with pytest.raises(hg.InvalidArgumentError, match=match):
            hg.llm.load(session, model, **options)
        file: Any = None
        with pytest.raises(hg.InvalidArgumentError, match="the file is None"):
            hg.llm.load(session, file)


@pytest.mark.parametrize("session", [None, "grpc://127.0.0.1:7070"])
def test_a_model_is_loaded_on_a_session_alone(session: Any, model: Path) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="takes a session"):
        hg.llm.load(session, model)


def test_numbers_of_numpy_and_an_absent_stop_are_options_too(llm: hg.llm.LanguageModel) -> None:
    found = text(llm, temperature=np.float32(0.5), top_k=np.int64(5), max_tokens=np.int64(9), stop=None)
    assert found == text(llm, temperature=0.5, top_k=5, max_tokens=9)
    assert text(llm, np.array([3, 400])) == text(llm, [3, 400])


def test_an_answer_that_is_closed_leaves_the_model_usable(llm: hg.llm.LanguageModel) -> None:
    whole = text(llm)
    answer = llm.generate(PROMPT, seed=7, max_tokens=500)
    next(answer)
    with pytest.raises(hg.LimitExceededError, match="at work on another answer"):
        text(llm)
    answer.close()
    with pytest.raises(hg.CancelledError, match="ended early"):
        answer.result()
    assert answer.so_far.text and answer.so_far.finish_reason is None
    assert text(llm) == whole
    for _ in llm.generate(PROMPT, seed=9, max_tokens=500):
        break
    assert text(llm) == whole


def test_asyncio_gives_the_same_text(url: str, model: Path, llm: hg.llm.LanguageModel) -> None:
    async def scenario() -> tuple[str, str]:
        async with hg.aio.connect(url) as session:
            other = await hg.llm.load(session, model)
            pieces = [piece async for piece in other.generate(PROMPT, max_tokens=24, seed=7)]
            stopped = other.generate(PROMPT, seed=9, max_tokens=500)
            await anext(stopped)
            await stopped.aclose()
            result = await other.generate(PROMPT, max_tokens=24, seed=7)
            await other.close()
            return "".join(pieces), result.text

    whole = text(llm)
    assert asyncio.run(scenario()) == (whole, whole)


def test_a_task_that_is_cancelled_leaves_the_model_usable(url: str, model: Path) -> None:
    async def scenario() -> None:
        async with hg.aio.connect(url) as session:
            llm = await hg.llm.load(session, model)
            begun = asyncio.Event()

            async def writing() -> None:
                async for _ in llm.generate(PROMPT, seed=9, max_tokens=600):
                    begun.set()

            task = asyncio.create_task(writing())
            await asyncio.wait_for(begun.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await llm.generate(PROMPT, max_tokens=5, seed=1)).tokens) == 5

    asyncio.run(scenario())


def test_a_model_on_the_server_uploads_no_weights(url: str, model: Path, llm: hg.llm.LanguageModel) -> None:
    told: list[int] = []
    with hg.connect(url, progress=lambda done, total: told.append(done)) as session:
        other = hg.llm.load(session, session.server_weights(model.name))
        assert text(other) == text(llm)
    assert max(told) < 10_000  # constants such as the places of candidates


def test_a_model_lies_on_several_devices_where_one_has_no_room(
    model: Path, llm: hg.llm.LanguageModel
) -> None:
    devices = [word for _ in range(2) for word in ("--device", "cpu:threads=1,memory=1GiB")]
    with running_daemon(*devices) as other, hg.connect(other, progress=None) as session:
        split = hg.llm.load(session, model, devices=["cpu0", "cpu1"], memory={"cpu0": "300KiB"})
        assert text(split) == text(llm)
        assert {node.device for node in split.plans[0].explain().nodes} == {"cpu0", "cpu1"}


def test_two_models_of_one_session_keep_apart_what_they_read(url: str, model: Path) -> None:
    with hg.connect(url) as session:
        first, second = (hg.llm.load(session, model) for _ in range(2))
        answers = [llm.generate(PROMPT, seed=7, max_tokens=24) for llm in (first, second)]
        for answer in answers:
            next(answer)
        assert answers[0].text == answers[1].text


def test_close_frees_the_cache_and_the_next_use_makes_it_anew(llm: hg.llm.LanguageModel) -> None:
    whole = text(llm)
    llm.close()
    assert text(llm) == whole


def test_a_chat_is_the_answer_to_the_prompt_that_the_template_makes(
    url: str, model: Path, llm: hg.llm.LanguageModel
) -> None:
    messages = [{"role": "user", "content": "Hello there!"}]
    prompt = llm.tokenizer.encode("[user] Hello there!</s>[assistant] ", special=True)
    answer = llm.chat(messages, max_tokens=9, seed=4)
    assert answer.text == text(llm, prompt, max_tokens=9, seed=4)

    async def scenario() -> str:
        async with hg.aio.connect(url) as session:
            other = await hg.llm.load(session, model)
            return (await (await other.chat(messages, max_tokens=9, seed=4))).text

    assert asyncio.run(scenario()) == answer.text


def test_a_message_cannot_end_its_own_turn(llm: hg.llm.LanguageModel) -> None:
    """A control word in it is text, of more tokens than one."""
    plain = llm.chat([{"role": "user", "content": "Hello  there!"}], max_tokens=1).result().prompt_tokens
    result = llm.chat([{"role": "user", "content": "Hello </s> there!"}], max_tokens=1).result()
    assert result.prompt_tokens > plain + 1


def test_a_template_may_be_given(url: str, model: Path) -> None:
    with hg.connect(url) as session:
        llm = hg.llm.load(session, model, chat_template="{{ messages[0].content }}!")
        answer = llm.chat([{"role": "user", "content": "One two"}], max_tokens=9, seed=4)
        assert answer.text == text(llm, "One two!", max_tokens=9, seed=4)
        template: Any = 3
        with pytest.raises(hg.InvalidArgumentError, match="chat_template is 3"):
            hg.llm.load(session, model, chat_template=template).chat([])


def test_embeddings_are_unit_vectors(llm: hg.llm.LanguageModel) -> None:
    found = llm.embed(["The daemon", "Another text", "The daemon"])
    assert found.shape == (3, llm.config.width)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])
