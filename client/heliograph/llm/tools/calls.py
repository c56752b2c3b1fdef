"""The parts of a message that a model writes."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, TypeAlias


def _new_id() -> str:
    # Nine letters and digits: templates of Mistral's models refuse others.
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, which the caller makes."""

    name: str
    arguments: dict[str, Any]
    #: Names the call in the message with its result: `tool_call_id`.
    id: str = field(default_factory=_new_id, compare=False)

    @property
    def as_json(self) -> dict[str, Any]:
        """The call in OpenAI's form, whose arguments are JSON in a text."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the message's own text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what the model writes before its message, for itself."""

    text: str


Part: TypeAlias = Text | Thought | ToolCall


def call_of(value: Any) -> ToolCall | None:
    """Return the call that JSON says, None for other JSON.

    Arguments are an object, also in a text, and are called "arguments" or "parameters".
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def calls_of(text: str) -> list[ToolCall] | None:
    """Return the calls of a JSON object, or of an array of them; None where it is something else."""
    value = loaded(text)
    found = [call_of(one) for one in (value if isinstance(value, list) else [value])]
    calls = [one for one in found if one is not None]
    return calls if calls and len(calls) == len(found) else None


def loaded(text: str) -> Any:
    """Return the value of JSON, also with bare line ends in its texts; None where it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
