"""Grammars that hold an answer to calls of tools, and to the form of a family. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable

from heliograph.llm.constraints import Constraint
from heliograph.llm.constraints.forms import checked, schema_text
from heliograph.llm.tools.choice import Tool, ToolChoice
from heliograph.llm.tools.formats import Format

#: The token of a control word, None for other words.
ControlToken = Callable[[str], int | None]


def forcing(
    form: Format, choice: ToolChoice, control: ControlToken, *, is_thinking: bool = False
) -> Constraint:
    """Return the constraint of an answer that must be a call. Raises LimitExceededError."""
    mark = _marks(control)
    calls = " | ".join(f"call_{place}" for place in range(len(choice.tools)))
    rules = [f"call: {calls}"]
    for place, tool in enumerate(choice.tools):
        rules.append(f"call_{place}: {_call(form, tool, f'arguments_{place}', mark)}")
        rules.append(f"arguments_{place}: %json {_schema(tool)}")
    rules.insert(0, f"start: {_before(form, mark, is_thinking)} {_calls(form, choice.is_parallel, mark)}")
    return checked(Constraint("tools", "lark", "\n".join([*rules, *_thought_rules(form, mark)])))


def _calls(form: Format, is_parallel: bool, mark: Callable[[str], str]) -> str:
    """Return the rule of all calls of an answer; forms that are not listed have one."""
    if form.is_array:
        rest = ' (", " call)*' if is_parallel else ""
        return f'{mark(form.begin)} "[" call{rest} "]" {mark(form.end) if form.end else ""}'
    several = {"hermes": 'call ("\\n" call)*', "mistral": "call+"}
    return several.get(form.name, "call") if is_parallel else "call"


def around(form: Format, control: ControlToken, *, is_thinking: bool = False) -> str:
    """Return the rules around an answer that follows a grammar of the caller's; empty: none."""
    mark = _marks(control)
    if form.name == "harmony":
        head = f'{mark("<|channel|>")} "final" {mark("<|message|>")}'
        return "\n".join([f"start: thought? {head} @answer", *_thought_rules(form, mark)])
    if is_thinking and form.thought:
        return "\n".join(["start: thought SPACES @answer", *_thought_rules(form, mark)])
    return ""


def _marks(control: ControlToken) -> Callable[[str], str]:
    """Return what writes a mark: the token of a control word, else its text."""

    def mark(word: str) -> str:
        token = control(word) if word else None
        return json.dumps(word) if token is None else f"<[{token}]>"

    return mark


def _schema(tool: Tool) -> str:
    # A tool that names no arguments has none.
    parameters = tool.parameters or {"additionalProperties": False}
    return schema_text({"type": "object", **parameters})


def _call(form: Format, tool: Tool, arguments: str, mark: Callable[[str], str]) -> str:
    if form.name == "harmony":
        head = f'" to=functions.{tool.name}" {mark("<|channel|>")} "commentary json" {mark("<|message|>")}'
        return f"{head} {arguments}"
    if form.named:
        return f"{mark(form.begin)} {json.dumps(tool.name)} {mark(form.named)} {arguments}"
    head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
    body = f'{head} {arguments} "}}"'
    if form.begin and not form.is_array and form.name != "llama":
        return f'{mark(form.begin)} "\\n" {body} "\\n" {mark(form.end)}'
    return body


def _before(form: Format, mark: Callable[[str], str], is_thinking: bool) -> str:
    """Return the rule of the text before the calls."""
    if form.name == "harmony":
        return "thought?"
    if form.thought is None:
        return ""
    return "thought SPACES" if is_thinking else f"({mark(form.thought[0])} thought SPACES)?"


def _thought_rules(form: Format, mark: Callable[[str], str]) -> list[str]:
    if form.name == "harmony":
        start = f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'
        head = f'{mark("<|channel|>")} "analysis" {mark("<|message|>")}'
        return [f"thought: {head} TEXT {start}", "TEXT: /(?s:.*)/"]
    if form.thought is None:
        return []
    end = mark(form.thought[1])
    spaces = "SPACES: /[ \\n]{0,2}/"
    if end.startswith("<["):
        return [f"thought: TEXT {end}", "TEXT: /(?s:.*)/", spaces]
    return [f"thought[suffix={end}]: /(?s:.*)/", spaces]
