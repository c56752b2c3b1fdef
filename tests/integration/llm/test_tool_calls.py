"""Calls of tools and JSON by OpenAI's own client, and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gguf_files import CHATML, bpe, write_model
from llm_servers import HttpModel, served
from openai import BadRequestError, OpenAI

import heliograph as hg
from heliograph.llm.serving import Bounds

#: A template of Hermes' form, with calls and results, and one of gpt-oss'.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer as <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
THOUGHTFUL = HERMES + "{% if thinks %}<think>\n{% endif %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)
MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 6}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def exactly(text: str) -> dict[str, Any]:
    """A body's grammar that allows one answer."""
    return {"grammar": f"start: {json.dumps(text)}"}


@pytest.fixture(scope="module")
def hermes(folder: Path) -> Path:
    return write_model(folder / "hermes.gguf", "qwen2", "q8_0", context=1500, chat_template=HERMES)


@pytest.fixture(scope="module")
def http(url: str, hermes: Path) -> Iterator[HttpModel]:
    with served(url, hermes, Bounds(4, 8)) as http:
        # Its thread starts here: tests look for threads that are left.
        http.post("/v1/completions", prompt="x", regex="[0-9]")
        yield http


@pytest.fixture(scope="module")
def openai(http: HttpModel) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{http.port}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_call_is_forced_by_the_schema_of_its_tool(openai: OpenAI) -> None:
    for seed in range(4):
        found = openai.chat.completions.create(
            model="small", messages=ASKED, tools=[WEATHER, NOW], tool_choice="required", seed=seed
        ).choices[0]
        assert found.finish_reason == "tool_calls" and found.message.content is None
        assert found.message.tool_calls
        for call in found.message.tool_calls:
            assert call.type == "function" and call.function.name in ("get_weather", "now")
            if call.function.name == "get_weather":
                jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
            else:
                assert call.function.arguments == "{}"


def test_a_named_tool_is_called_once(openai: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    found = openai.chat.completions.create(
        model="small", messages=ASKED, tools=[NOW, WEATHER], tool_choice=named, n=3, seed=1
    )
    for choice in found.choices:
        [call] = choice.message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["days"] < 10


def test_a_stream_of_calls_adds_up(openai: OpenAI) -> None:
    def asked(**options: Any) -> Any:
        tools: Any = [WEATHER, NOW]
        return openai.chat.completions.create(
            model="small", messages=ASKED, tools=tools, tool_choice="required", seed=5, **options
        )

    whole = asked().choices[0].message.tool_calls
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in asked(stream=True):
        [choice] = chunk.choices
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    assert reason == "tool_calls"
    assert list(calls.values()) == [[one.function.name, one.function.arguments] for one in whole]


def test_calls_thoughts_and_text_of_a_free_answer_are_told_apart(url: str, folder: Path) -> None:
    path = write_model(folder / "thoughtful.gguf", "qwen2", "q8_0", context=900, chat_template=THOUGHTFUL)
    text = f"<think>\nHm, so.\n</think>\n\nLet me see.\n{CALL}"
    body = {"messages": ASKED, "tools": [NOW], **exactly(text)}
    with served(url, path, Bounds(2)) as http:
        found = http.post("/v1/chat/completions", **body)["choices"][0]
        message = found["message"]
        assert found["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Hm, so.")
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["now"]
        kinds: dict[str, str] = {"content": "", "reasoning_content": ""}
        for event in http.stream("/v1/chat/completions", **body):
            for name, value in event["choices"][0]["delta"].items():
                if name in kinds:
                    kinds[name] += value
        assert kinds == {"content": "Let me see.", "reasoning_content": "Hm, so."}
        # The prompt ends within a thought, which ends before the answer that a grammar holds.
        thinks = {"chat_template_kwargs": {"thinks": True}, "max_tokens": 20, "seed": 1}
        cut = http.post("/v1/chat/completions", messages=ASKED, regex="[a-z]{4}", **thinks)["choices"][0]
        assert cut["message"]["reasoning_content"] and cut["message"]["content"] == ""


def test_what_is_no_call_and_calls_without_tools_come_as_text(http: HttpModel) -> None:
    broken = '<tool_call>{"name": 5}</tool_call>'
    for text, tools in (
        (broken, {"tools": [NOW]}),
        (CALL, {}),
        (CALL, {"tools": [NOW], "tool_choice": "none"}),
    ):
        found = http.post("/v1/chat/completions", messages=ASKED, **tools, **exactly(text))["choices"][0]
        assert found["message"]["content"] == text and "tool_calls" not in found["message"]
        assert found["finish_reason"] == "stop"


def test_a_call_that_is_cut_comes_as_text(http: HttpModel) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 20}
    found = http.post("/v1/chat/completions", messages=ASKED, **options)["choices"][0]
    assert found["finish_reason"] == "length" and found["message"]["content"].startswith("<tool_call>")


def test_one_call_at_most_without_parallel_calls(http: HttpModel) -> None:
    body: dict[str, Any] = {"messages": ASKED, "tools": [NOW], **exactly(f"{CALL}\n{CALL}")}
    both = http.post("/v1/chat/completions", **body)["choices"][0]["message"]["tool_calls"]
    one = http.post("/v1/chat/completions", parallel_tool_calls=False, **body)["choices"][0]
    assert len(both) == 2 and len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


def test_calls_and_results_go_back_into_the_template(http: HttpModel, openai: OpenAI) -> None:
    options: Any = {"model": "small", "tools": [WEATHER], "seed": 1}
    asked = openai.chat.completions.create(messages=ASKED, tool_choice="required", **options)
    message = asked.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": one.id, "content": "sun"} for one in message.tool_calls
    ]
    talk = [*ASKED, message, *results]
    found = openai.chat.completions.create(messages=talk, max_tokens=4, **options)
    assert found.usage and asked.usage
    assert found.usage.prompt_tokens > asked.usage.prompt_tokens + asked.usage.completion_tokens // 4


def test_json_by_a_schema(http: HttpModel, openai: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = openai.chat.completions.create(model="small", messages=ASKED, response_format=shape)
    assert json.loads(found.choices[0].message.content or "")["a"] in (True, False)
    assert found.choices[0].finish_reason == "stop"
    pieces = openai.chat.completions.create(
        model="small", messages=ASKED, response_format=shape, stream=True, seed=2
    )
    text = "".join(one.choices[0].delta.content or "" for one in pieces)
    assert json.loads(text)["a"] in (True, False)
    anything: Any = {"type": "json_object"}
    free = openai.chat.completions.create(
        model="small", messages=ASKED, response_format=anything, temperature=0, max_tokens=300
    ).choices[0]
    assert (free.message.content or "").startswith("{")
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content or ""), dict)
    assert http.post("/v1/completions", prompt="x", regex="[0-9]{4}")["choices"][0]["text"].isdecimal()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: x"}, "grammar"),
        ({"grammar": 5}, "grammar"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [NOW], "tool_choice": "now"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [NOW], "tool_choice": "required", "regex": "a"}, "regex"),
    ],
)
def test_bad_constraints_and_tools_are_named(openai: OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(model="small", messages=ASKED, extra_body=body)
    assert caught.value.param == param and caught.value.code == "invalid_value"


def test_a_template_without_tools_has_them_described(url: str, folder: Path) -> None:
    path = write_model(folder / "plain.gguf", "qwen2", "q8_0", context=900, chat_template=CHATML)
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, path)
        answer = llm.chat(ASKED, tools=[NOW, WEATHER], tool_choice="required", seed=3)
        [call] = answer.tool_calls
        assert call.name in ("now", "get_weather") and answer.result().finish_reason == "tool_calls"
        talk = [*ASKED, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
        free = llm.chat(talk, tools=[NOW, WEATHER], max_tokens=3, seed=3).result()
        assert free.tool_calls == [] and free.prompt_tokens > answer.result().prompt_tokens
        llm.close()


def test_the_channels_of_gpt_oss_are_told_apart(url: str, folder: Path) -> None:
    words = bpe("gpt-4o")
    words = replace(words, tokens=words.tokens + MARKS, types=words.types + [3] * len(MARKS))
    path = write_model(folder / "channels.gguf", "qwen2", "q8_0", words, context=900, chat_template=HARMONY)
    with hg.connect(url, progress=None) as session:
        llm = hg.llm.load(session, path)
        result = llm.chat(ASKED, tools=[WEATHER], tool_choice="required", seed=2, max_tokens=700).result()
        if result.finish_reason == "tool_calls":
            jsonschema.validate(result.tool_calls[0].arguments, WEATHER["function"]["parameters"])
        shown = llm.chat(ASKED, regex="[a-z]{4}", seed=5, logit_bias={llm.tokenizer.token("<|end|>"): 90})
        # The answer's text is the last channel's, and the grammar is that text's alone.
        result = shown.result()
        assert len(result.text) == 4 and result.text.isalpha() and result.finish_reason == "stop"
        channel = llm.tokenizer.token("<|channel|>")
        assert channel in result.tokens
        llm.close()
