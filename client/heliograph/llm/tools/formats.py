"""The ways in which families of models write calls of tools, by the marks in their templates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write calls."""

    name: str
    #: The marks around a call, or around an array of calls; empty: none.
    begin: str = ""
    end: str = ""
    #: The name of the arguments.
    arguments: str = "arguments"
    #: Whether calls are elements of an array.
    is_array: bool = False
    #: Whether a call is also JSON at the begin of the answer, without a mark.
    is_bare: bool = False
    #: The mark between bare calls; empty: there is one.
    separator: str = ""
    #: Whether a call is also `NAME.call(KEY=VALUE, ...)` behind the mark.
    has_code: bool = False
    #: The mark between a name and its arguments, where they are no JSON object together.
    named: str = ""
    #: The marks around what the model thinks before it answers.
    thought: tuple[str, str] | None = None
    #: Whether the template writes tools, calls and their results.
    is_native: bool = True

    @property
    def has_thoughts(self) -> bool:
        """True if its messages have thoughts, also without tools."""
        return self.thought is not None or self.name == "harmony"

    @property
    def marks(self) -> frozenset[str]:
        """The words that a reader must see, also where they are control tokens."""
        words = HARMONY_MARKS if self.name == "harmony" else ()
        return frozenset(filter(None, (self.begin, self.end, self.named, *(self.thought or ()), *words)))


HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
_THOUGHT = ("<think>", "</think>")


def format_of(template: str, words: Collection[str]) -> Format:
    """Return the way of a model with this template, whose control words are `words`."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Format("harmony")
    thought = _THOUGHT if "<think>" in template or "</think>" in template else None
    takes_tools = "tools" in template
    if takes_tools and "<tool_call>" in template:
        return Format("hermes", "<tool_call>", "</tool_call>", thought=thought)
    if takes_tools and "[TOOL_CALLS]" in template:
        named = "[ARGS]" if "[ARGS]" in template else ""
        return Format("mistral", "[TOOL_CALLS]", is_array=not named, named=named, thought=thought)
    if takes_tools and "<|tool_call|>" in template:
        return Format("phi", "<|tool_call|>", "<|/tool_call|>", is_array=True, thought=thought)
    if takes_tools and "<|python_tag|>" in words:
        return Format(
            "llama",
            "<|python_tag|>",
            arguments="parameters",
            is_bare=True,
            separator=";",
            has_code=True,
            thought=thought,
        )
    return Format("json", is_bare=True, thought=thought, is_native=takes_tools)
