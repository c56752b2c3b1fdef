"""Calls of tools as Llama's models write those that they know: `brave_search.call(query="...")`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from heliograph.llm.tools.calls import ToolCall

#: The longest call. It is read once more with each piece of it that comes.
MAX_CALL = 8192
_KEY = re.compile(r"\s*([A-Za-z_]\w{0,63})\s*=\s*")
#: The letters behind a value.
_BEHIND = (",", ")", " ", "\t", "\n")
_WORDS = {"True": True, "False": False, "None": None}
_DECODER = json.JSONDecoder(strict=False)


def code_call(text: str, names: Collection[str], *, is_last: bool) -> tuple[ToolCall, str] | tuple[()] | None:
    """Return the call of a known tool that begins a text, and what follows it; () where none does,
    None if more must come."""
    for name in names:
        begin = f"{name}.call("
        if text.startswith(begin):
            found = _arguments(text[len(begin) : MAX_CALL])
            if found is None:
                return () if is_last or len(text) > MAX_CALL else None
            arguments, size = found
            return (ToolCall(name, arguments), text[len(begin) + size :]) if size else ()
        if begin.startswith(text) and not is_last:
            return None
    return ()


def _arguments(text: str) -> tuple[dict[str, Any], int] | None:
    """Return arguments and the place behind them, which is 0 where they are none; None if more must
    come."""
    found: dict[str, Any] = {}
    at = 0
    while True:
        rest = text[at:].lstrip()
        if not rest:
            return None
        at = len(text) - len(rest)
        if rest[0] == ")":
            return found, at + 1
        if found and rest[0] == ",":
            at += 1
        elif found:
            return {}, 0
        key = _KEY.match(text, at)
        if key is None or key[1] in found:
            return None if _may_be_key(text[at:]) else ({}, 0)
        value = _value(text, key.end())
        if value is None:
            return None if _may_go_on(text[key.end() :]) else ({}, 0)
        found[key[1]], at = value


def _value(text: str, at: int) -> tuple[Any, int] | None:
    """Return JSON, or a word of Python's, and the place behind it."""
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    # A number may go on with what comes next.
    return (value, end) if text[end : end + 1] in _BEHIND else None


def _may_be_key(text: str) -> bool:
    return re.fullmatch(r"\s*(?:[A-Za-z_]\w{0,63}\s*)?", text) is not None


def _may_go_on(text: str) -> bool:
    """True if a value may end with what comes."""
    if not text or any(word.startswith(text) for word in (*_WORDS, "true", "false", "null")):
        return True
    if text[0] == '"':
        return re.fullmatch(r'"(?:[^"\\]|\\.)*(?:\\|"\s*)?', text, re.DOTALL) is not None
    if text[0] in "{[":
        return True
    return re.fullmatch(r"-?[0-9.eE+-]*", text) is not None
