"""The ends of JSON and of marks, in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class JsonEnd:
    """Finds the end of an object or an array that begins a text, as the text grows."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._is_text = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return the place behind the value, None as long as it goes on."""
        for at in range(self._at, len(text)):
            letter = text[at]
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._is_text = False
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._at = at
                    return at + 1
        self._at = len(text)
        return None


def first(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return the first place of a mark in a text, and which it is."""
    found = [(at, mark) for mark in marks if mark and (at := text.find(mark)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=None)


def begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of a text with which a mark begins."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
