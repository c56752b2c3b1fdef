"""Readers: the text of a model, as it comes, to the parts of its message.

Nothing is lost: what looks like a call and is none comes as text. White space beside calls and
thoughts is no part of the message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Protocol

from heliograph.llm.tools.calls import Part, Text, Thought, ToolCall, call_of, calls_of, loaded
from heliograph.llm.tools.code_calls import code_call
from heliograph.llm.tools.formats import Format
from heliograph.llm.tools.harmony import HarmonyReader
from heliograph.llm.tools.scanning import JsonEnd, begun, first

#: The longest name of a tool, with what may stand beside it.
_MAX_NAME = 160
#: Texts of one answer that begin as calls and are none; then all is text. Each is read once more.
MAX_BROKEN = 16
_FENCE = re.compile(r"```(?:json)?\s*")


class Reader(Protocol):
    """Takes a model's text, and gives the parts of its message."""

    def put(self, text: str) -> list[Part]:
        """Return the parts that are certain now."""

    def end(self) -> list[Part]:
        """Return the rest."""


def reader_of(form: Format, names: Collection[str], *, is_thinking: bool = False) -> Reader:
    """Return the reader of a form.

    Args:
        form: The way in which the model writes.
        names: The tools that it may call; without any, there are no calls.
        is_thinking: Whether the prompt ends within a thought.
    """
    if form.name == "harmony":
        return HarmonyReader(names)
    return MarkedReader(form, names, is_thinking)


class MarkedReader:
    """Reads calls between marks, and bare ones at the begin of an answer."""

    def __init__(self, form: Format, names: Collection[str], is_thinking: bool) -> None:
        self._form = form
        self._names = names
        self._text = ""
        #: The part that is read now: "text", "thought" or "call".
        self._state = "thought" if is_thinking else "text"
        #: The mark before the present call.
        self._begin = ""
        self._json = JsonEnd()
        #: Whether nothing of the present thought came.
        self._is_fresh = True
        #: White space that is dropped if a call or a thought follows.
        self._space = ""
        #: Whether white space is dropped that comes next.
        self._is_beside = False
        #: Whether nothing but white space, thoughts and calls came: a bare call may begin.
        self._may_be_bare = form.is_bare and bool(names)
        #: Whether another bare call may follow the last one.
        self._may_repeat = False
        self._begins = [form.begin] if names and form.begin else []
        self._broken = 0

    def put(self, text: str) -> list[Part]:
        """Return the parts that are certain now."""
        self._text += text
        return self._read(is_last=False)

    def end(self) -> list[Part]:
        """Return the rest."""
        found = self._read(is_last=True)
        return [*found, Text(self._space)] if self._space and not self._is_beside else found

    def _read(self, *, is_last: bool) -> list[Part]:
        found: list[Part] = []
        steps = {"text": self._read_text, "thought": self._read_thought, "call": self._read_call}
        while True:
            state, size = self._state, len(self._text)
            found += steps[state](is_last)
            if (self._state, len(self._text)) == (state, size):
                return _joined(found)

    def _read_text(self, is_last: bool) -> Iterator[Part]:
        if self._may_repeat and (head := self._text.lstrip()):
            self._may_repeat = False
            if head.startswith(self._form.separator):
                self._space, self._may_be_bare = self._form.separator, True
                self._text = head[len(self._space) :]
        if self._may_be_bare:
            head = self._text.lstrip()
            if head[:1] in ("{", "[") or (head.startswith("```") and _FENCE.match(head + " ")):
                self._space += self._text[: len(self._text) - len(head)]
                self._text, self._may_be_bare = head, False
                self._enter("call", "")
                return
            if not is_last and "```json".startswith(head):
                return
        marks = [*self._begins, *(self._form.thought or ())[:1]]
        if place := first(self._text, marks):
            at, mark = place
            yield from self._given(self._text[:at])
            self._text = self._text[at + len(mark) :]
            self._enter("call" if mark in self._begins else "thought", mark)
            return
        kept = 0 if is_last else begun(self._text, marks)
        certain = self._text[: len(self._text) - kept]
        self._text = self._text[len(certain) :]
        yield from self._given(certain)

    def _given(self, text: str) -> Iterator[Part]:
        """Give text but the white space at its end, which waits for what follows."""
        if self._is_beside:
            text = text.lstrip()
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._is_beside = self._may_be_bare = False
            yield Text(kept)

    def _enter(self, state: str, mark: str) -> None:
        self._state, self._begin, self._json, self._is_fresh = state, mark, JsonEnd(), True

    def _leave(self) -> None:
        """Go on with text beside a call or a thought."""
        self._enter("text", "")
        self._space, self._is_beside = "", True

    def _read_thought(self, is_last: bool) -> Iterator[Part]:
        assert self._form.thought
        end = self._form.thought[1]
        if self._is_fresh:
            self._text = self._text.lstrip()
        at = self._text.find(end)
        kept = 0 if is_last else begun(self._text, [end])
        certain = (self._text[:at] if at >= 0 else self._text[: len(self._text) - kept]).rstrip()
        self._text = self._text[at + len(end) :] if at >= 0 else self._text[len(certain) :]
        if certain:
            self._is_fresh = False
            yield Thought(certain)
        if at >= 0:
            self._leave()

    def _read_call(self, is_last: bool) -> Iterator[Part]:
        found = self._call(is_last)
        if found is None and not is_last:
            return
        if found:
            calls, rest = found
            self._text = rest
            self._leave()
            self._may_repeat = self._form.separator != ""
            yield from calls
            return
        # A beginning that is no call is text; a mark may begin another one within it.
        begin, self._begin = self._begin, ""
        self._broken += 1
        if self._broken >= MAX_BROKEN:
            self._begins = []
        if not begin:
            begin, self._text = self._text[:1], self._text[1:]
        self._enter("text", "")
        self._is_beside = False
        yield from self._given(begin)

    def _call(self, is_last: bool) -> tuple[list[ToolCall], str] | tuple[()] | None:
        """Return calls and what follows them, () for what is none, None if more must come."""
        body = self._text.lstrip()
        if not body:
            return () if is_last else None
        name, end = "", self._form.end
        if not self._begin and body.startswith("`"):
            if "```json".startswith(body) and not is_last:
                return None
            fence = _FENCE.match(body)
            body, end = body[fence.end() if fence else 0 :], "```"
            if not body:
                return () if is_last else None
        if body[0] not in "{[" and self._begin and self._form.begin == "[TOOL_CALLS]":
            place = body.find("{")
            if place < 0:
                return () if is_last or len(body) > _MAX_NAME else None
            match = _NAMED.fullmatch(body[:place])
            if match is None:
                return ()
            name, body = match["name"], body[place:]
        if body[0] not in "{[":
            if not (self._begin and self._form.has_code):
                return ()
            called = code_call(body, self._names, is_last=is_last)
            return ([called[0]], called[1]) if called else called
        after = self._json.find(body)
        if after is None:
            return () if is_last else None
        calls = self._calls(name, body[:after])
        if calls is None:
            return ()
        return self._ended(calls, body[after:], end if self._begin or end == "```" else "", is_last)

    def _calls(self, name: str, text: str) -> list[ToolCall] | None:
        if name:
            call = call_of({"name": name, "arguments": loaded(text)})
            return None if call is None else [call]
        calls = calls_of(text)
        if calls and not self._begin and any(one.name not in self._names for one in calls):
            return None
        return calls

    def _ended(
        self, calls: list[ToolCall], rest: str, end: str, is_last: bool
    ) -> tuple[list[ToolCall], str] | tuple[()] | None:
        """Take the mark behind a call, which may be missing at the end of an answer."""
        follows = rest.lstrip()
        if not end:
            return calls, rest
        if follows.startswith(end):
            return calls, follows[len(end) :]
        if end.startswith(follows):
            return (calls, "") if is_last else None
        return ()


_NAMED = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


def _joined(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and found and isinstance(found[-1], Text):
            found[-1] = Text(found[-1].text + part.text)
        else:
            found.append(part)
    return found
