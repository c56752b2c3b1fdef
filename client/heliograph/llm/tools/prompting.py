"""Messages for templates: calls in the form that they take, and tools for those that know none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph.errors import InvalidArgumentError
from heliograph.llm.tools.calls import loaded
from heliograph.llm.tools.formats import Format

Message = Mapping[str, Any]

_ADVICE = (
    "You can call these tools, which are described by JSON schemas:\n{tools}\n"
    'To call one, answer with JSON alone: {{"name": "...", "arguments": {{...}}}}. '
    "To call several, answer with an array of these."
)


def for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, form: Format
) -> list[dict[str, Any]]:
    """Return the messages as a template of a form takes them.

    Arguments of calls are objects. Where the template knows no tools, they are described in the
    first message, and calls and results are plain texts.

    Raises InvalidArgumentError for calls that are none, and for a content that is no text where
    one is needed.
    """
    found = [_with_objects(one) for one in messages]
    if form.is_native:
        return found
    found = _joined([_plain(_with_text(one)) for one in found])
    if not tools:
        return found
    described = _ADVICE.format(tools="\n".join(json.dumps(one, ensure_ascii=False) for one in tools))
    for at, one in enumerate(found):
        if one["role"] in ("system", "developer", "user"):
            found[at] = {**one, "content": "\n\n".join(filter(None, (described, one.get("content"))))}
            return found
    return [{"role": "user", "content": described}, *found]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join texts of the user's that follow each other, as several results do: templates refuse
    them."""
    found: list[dict[str, Any]] = []
    for one in messages:
        if found and one["role"] == "user" == found[-1]["role"]:
            found[-1] = {**one, "content": f"{found[-1].get('content') or ''}\n{one.get('content') or ''}"}
        else:
            found.append(one)
    return found


def _with_objects(message: Message) -> dict[str, Any]:
    """Return a message whose calls have arguments as objects."""
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise InvalidArgumentError(
            f"messages has the tool_calls {calls!r:.60}", advice="a list of calls, as answer.message has it"
        )
    made = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
            arguments = loaded(text)
            if isinstance(arguments, dict):
                call = {**call, "function": {**function, "arguments": arguments}}
        made.append(call)
    found = {**message, "tool_calls": made}
    if not found.get("content") and isinstance(thought := found.get("reasoning_content"), str):
        # As templates of gpt-oss call it.
        found.setdefault("thinking", thought)
    return found


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the texts of its parts joined."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    found = content if isinstance(content, list) else [content]
    texts = [one["text"] for one in found if isinstance(one, dict) and isinstance(one.get("text"), str)]
    if len(texts) != len(found):
        raise InvalidArgumentError(
            f"messages has the content {content!r:.60}", advice="it is a text, or an array of parts of text"
        )
    return {**message, "content": "".join(texts)}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a call or of a result as plain text."""
    if message["role"] == "tool":
        name = message.get("name") or message.get("tool_call_id") or "tool"
        return {"role": "user", "content": f"Result of {name}: {message.get('content') or ''}"}
    if not (calls := message.get("tool_calls")):
        return message
    functions = [call.get("function", call) for call in calls]
    shown = json.dumps(functions if len(functions) > 1 else functions[0], ensure_ascii=False)
    return {"role": message["role"], "content": "\n".join(filter(None, (message.get("content"), shown)))}
