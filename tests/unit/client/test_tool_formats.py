"""Calls of tools in the text of models: each family's form, cut at every place."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import heliograph as hg
from heliograph.llm.tools import (
    Format,
    Part,
    Text,
    Thought,
    ToolCall,
    for_template,
    format_of,
    reader_of,
    tools_of,
)

NAMES = ("get_weather", "now")
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %} <think>",
    "mistral": "{% if tools %}[TOOL_CALLS]{% endif %}",
    "named": "{% if tools %}[TOOL_CALLS] [ARGS]{% endif %}",
    "phi": "{% if tools %}<|tool_call|>{% endif %}",
    "llama": "{% if tools %}parameters{% endif %}",
    "json": "{{ messages }}",
    "harmony": "<|start|><|channel|><|message|>",
}
FORMS = {name: format_of(text, {"<|python_tag|>"}) for name, text in TEMPLATES.items()}
WEATHER = ToolCall("get_weather", {"city": 'São "Paulo" </tool_call>', "days": [1, {"a": None}]})
NOW = ToolCall("now", {})
SAID = json.dumps(WEATHER.arguments, ensure_ascii=False)
CITY = json.dumps(WEATHER.arguments["city"], ensure_ascii=False)


def pieces(form: Format, parts: Iterable[str], **options: Any) -> list[Part]:
    """The parts that a reader gives, with neighbours of one kind joined."""
    reader = reader_of(form, NAMES, **options)
    found = [part for text in parts for part in reader.put(text)] + reader.end()
    joined: list[Part] = []
    for kind, group in itertools.groupby(found, type):
        same = list(group)
        joined += same if kind is ToolCall else [kind("".join(one.text for one in same))]  # type: ignore[union-attr]
    return joined


def in_all_cuts(form: Format, text: str, **options: Any) -> list[Part]:
    """The parts of a text, which are the same however it is cut."""
    whole = pieces(form, [text], **options)
    assert pieces(form, text, **options) == whole
    for at in range(1, len(text)):
        assert pieces(form, (text[:at], text[at:]), **options) == whole, (at, text[:at])
    return whole


CALLS = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {SAID}}}\n</tool_call>', [WEATHER]),
    (
        "hermes",
        f'Let me see.\n<tool_call>{{"name": "get_weather", "arguments": {SAID}}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>\nSo.',
        [Text("Let me see."), WEATHER, NOW, Text("So.")],
    ),
    (
        "hermes",
        '<think>\nIs it < 5?\n</think>\n\nHm.<tool_call>{"name": "now"}',
        [Thought("Is it < 5?"), Text("Hm."), NOW],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {SAID}}}, {{"name": "now"}}]',
        [WEATHER, NOW],
    ),
    (
        "named",
        f"Wait.[TOOL_CALLS]get_weather[ARGS]{SAID}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}",
        [Text("Wait."), WEATHER, NOW],
    ),
    (
        "phi",
        f'<|tool_call|>[{{"type": "function", "function": {{"name": "get_weather", "arguments": {SAID}}}}}]'
        "<|/tool_call|>",
        [WEATHER],
    ),
    ("llama", f'<|python_tag|>{{"name": "get_weather", "parameters": {SAID}}}', [WEATHER]),
    (
        "llama",
        f'{{"name": "get_weather", "parameters": {SAID}}}; {{"name": "now", "parameters": {{}}}}',
        [WEATHER, NOW],
    ),
    ("llama", f'<|python_tag|>get_weather.call(city={CITY}, days=[1, {{"a": null}}])', [WEATHER]),
    (
        "llama",
        '<|python_tag|>now.call()\nthen<|python_tag|> now.call( zone = "a)b", at=1.5, is_utc=True )',
        [NOW, Text("then"), ToolCall("now", {"zone": "a)b", "at": 1.5, "is_utc": True})],
    ),
    ("json", f'\n{{"name": "get_weather", "arguments": {SAID}}}', [WEATHER]),
    (
        "json",
        f'```json\n[{{"name": "get_weather", "parameters": {SAID}}}, {{"name": "now"}}]\n```',
        [WEATHER, NOW],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>They ask\nfor it.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{SAID}<|call|>",
        [Thought("They ask\nfor it."), WEATHER],
    ),
    (
        "harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}<|end|><|start|>assistant<|channel|>final"
        "<|message|>Done < now.",
        [NOW, Text("Done < now.")],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_calls_are_read_wherever_the_text_is_cut(name: str, text: str, expected: list[Part]) -> None:
    assert in_all_cuts(FORMS[name], text) == expected


#: Texts that look like calls and are none.
NONE = [
    ("hermes", '<tool_call>{"name": 5}</tool_call> and more'),
    ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "now"} no end'),
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_ca"),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, 7]'),
    ("named", "[TOOL_CALLS]now[ARGS][1, 2]"),
    ("named", "[TOOL_CALLS]no such thing at all"),
    ("phi", "<|tool_call|>[]<|/tool_call|>"),
    ("llama", '{"name": "Bob", "parameters": {}}'),
    ("llama", "<|python_tag|>print(5)"),
    ("llama", "<|python_tag|>brave_search.call(query=5)"),
    ("llama", "<|python_tag|>now.call(5)"),
    ("llama", "<|python_tag|>now.call(a=5 b=6)"),
    ("llama", "<|python_tag|>now.call(a=b)"),
    ("llama", "<|python_tag|>now.call(a=1, a=2)"),
    ("llama", '<|python_tag|>now.call(a="x'),
    ("llama", f'<|python_tag|>now.call(a="{"x" * 9000}")'),
    ("json", '{"answer": 42}'),
    ("json", "```js\nnow()\n```"),
    ("json", '```json\n{"name": "now"} and\n```'),
    ("json", "{"),
]


@pytest.mark.parametrize(("name", "text"), NONE)
def test_what_is_no_call_comes_as_text(name: str, text: str) -> None:
    assert in_all_cuts(FORMS[name], text) == [Text(text)]


def test_a_call_behind_a_broken_one_is_read() -> None:
    text = '<tool_call>{broken}<tool_call>{"name": "now"}</tool_call>'
    assert in_all_cuts(FORMS["hermes"], text) == [Text("<tool_call>{broken}"), NOW]


def test_an_answer_of_many_broken_calls_is_read_in_time() -> None:
    text = '<tool_call>{"a": [' * 20_000
    reader = reader_of(FORMS["hermes"], NAMES)
    found = [part for at in range(0, len(text), 1000) for part in reader.put(text[at : at + 1000])]
    assert "".join(one.text for one in [*found, *reader.end()]) == text  # type: ignore[union-attr]


def test_a_thought_that_the_prompt_began_ends_in_the_answer() -> None:
    found = in_all_cuts(FORMS["hermes"], "so\nthen </think>\n\n Yes.", is_thinking=True)
    assert found == [Thought("so\nthen"), Text("Yes.")]
    assert in_all_cuts(FORMS["hermes"], "no end ", is_thinking=True) == [Thought("no end")]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    reader = reader_of(FORMS["hermes"], ())
    assert [*reader.put(text), *reader.end()] == [Text(text)]


def test_a_call_of_harmony_whose_text_is_no_json_comes_as_text() -> None:
    text = "<|channel|>commentary to=functions.now<|message|>now please"
    assert in_all_cuts(FORMS["harmony"], text + "<|call|>") == [Text(text)]
    assert in_all_cuts(FORMS["harmony"], "Just text.") == [Text("Just text.")]
    assert in_all_cuts(FORMS["harmony"], "<|channel|>commentary<|message|>First this.") == [
        Text("First this.")
    ]


def test_no_letter_of_random_texts_is_lost() -> None:
    seed = 20261124
    rng = random.Random(seed)
    words = ['{"name": "now"', "}", "[", "]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "x ", '"', "```"]
    for _ in range(60):
        text = "".join(rng.choices(words, k=rng.randrange(1, 12)))
        for name in ("hermes", "mistral", "named", "llama", "json"):
            parts = in_all_cuts(FORMS[name], text)
            if not any(isinstance(one, ToolCall) for one in parts):
                assert "".join(one.text for one in parts) == text, (seed, name)  # type: ignore[union-attr]


def test_a_template_tells_its_form() -> None:
    assert {name: form.name for name, form in FORMS.items()} == {
        **{name: name for name in TEMPLATES},
        "named": "mistral",
    }
    assert not FORMS["json"].is_native and FORMS["hermes"].is_native
    assert FORMS["hermes"].thought == ("<think>", "</think>") and FORMS["llama"].thought is None


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_choice_says_which_tools_may_be_called() -> None:
    tools = [tool("now"), tool("get_weather")]
    assert tools_of(None) is None and tools_of([]) is None and tools_of(tools, "none") is None
    auto, required = tools_of(tools), tools_of(tools, "required")
    assert auto and required and (auto.is_forced, required.is_forced) == (False, True)
    named = tools_of(tools, {"type": "function", "function": {"name": "now"}})
    assert named and [one.name for one in named.tools] == ["now"] and not named.is_parallel


@pytest.mark.parametrize(
    ("tools", "choice", "match"),
    [
        ("now", None, "tools is 'now'"),
        ([{"name": "now"}], None, "tools has"),
        ([tool("no spaces")], None, "tools has"),
        ([tool("now"), tool("now")], None, "two of one name"),
        ([tool(f"t{n}") for n in range(129)], None, "tools has 129 tools"),
        ([], "required", "there are no tools"),
        ([tool("now")], "now", "tool_choice is 'now'"),
        ([tool("now")], {"type": "function", "function": {"name": "x"}}, "tool_choice is"),
        ([{"function": {"name": "a", "parameters": 5}}], None, "no JSON schema"),
    ],
)
def test_bad_tools_are_refused(tools: Any, choice: Any, match: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=match):
        tools_of(tools, choice)


def messages() -> Sequence[dict[str, Any]]:
    return [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [WEATHER.as_json, NOW.as_json]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "name": "now", "content": "12:00"},
    ]


def test_a_template_gets_arguments_as_objects() -> None:
    found = for_template(messages(), None, FORMS["hermes"])
    assert found[1]["tool_calls"][0]["function"]["arguments"] == WEATHER.arguments
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "tool"]


def test_a_template_without_tools_gets_texts() -> None:
    found = for_template(messages(), [tool("now")], FORMS["json"])
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert '"name": "now"' in found[0]["content"] and found[0]["content"].endswith("When?")
    assert [one["name"] for one in json.loads(found[1]["content"])] == ["get_weather", "now"]
    assert found[2]["content"] == "Result of 1: sun\nResult of now: 12:00"
