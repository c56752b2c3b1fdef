"""The tools of a request, and which of them an answer must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heliograph.errors import InvalidArgumentError

#: The most tools of a request.
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    #: The JSON schema of its arguments.
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls that an answer may have, and those that it must."""

    tools: tuple[Tool, ...]
    #: Whether the answer is a call; else the model decides.
    is_forced: bool = False
    #: Whether the answer may have several.
    is_parallel: bool = True


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    is_parallel: bool = True,
) -> ToolChoice | None:
    """Return the tools of a request in OpenAI's form; None where the answer may call none.

    Raises InvalidArgumentError.
    """
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise InvalidArgumentError(f"tools is {tools!r:.60}", advice="it is a list of tools")
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidArgumentError(f"tools has {len(tools or ())} tools", advice=f"at most {MAX_TOOLS}")
    known = {one.name: one for one in map(_tool, tools or ())}
    if len(known) != len(tools or ()):
        raise InvalidArgumentError("tools has two of one name", advice="names differ")
    if choice == "none" or not (known or choice not in (None, "auto")):
        return None
    if choice in (None, "auto", "required"):
        if not known:
            raise InvalidArgumentError("tool_choice is 'required', and there are no tools")
        return ToolChoice(tuple(known.values()), choice == "required", is_parallel)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in known:
        raise InvalidArgumentError(
            f"tool_choice is {choice!r:.80}", advice='"auto", "none", "required", or a function of the tools'
        )
    return ToolChoice((known[name],), True, False)


def _tool(given: Any) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"tools has {given!r:.80}",
            advice='a tool is {"type": "function", "function": {"name": "...", "parameters": {...}}}',
        )
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidArgumentError(f"tools: the parameters of {name} are no JSON schema")
    return Tool(name, parameters)
