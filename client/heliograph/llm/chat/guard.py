"""Keeps what people write from becoming control tokens.

A template joins texts of people and control words, such as "<|im_end|>", to one text, in which
they look the same. So the control words in texts of people are cut in two by a mark before
that, and the tokenizer takes both parts as plain text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

#: The mark: a noncharacter of Unicode, which no text has for a purpose of its own.
MARK = "\ufdd0"


class Guard:
    """Cuts the control words of a model."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(word for word in words if len(word) > 1)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for word in self._words:
            lengths[word[0]].add(len(word))
        #: The lengths of the words that begin with a letter.
        self._lengths = {letter: sorted(found) for letter, found in lengths.items()}
        self._firsts = re.compile(f"[{re.escape(''.join(sorted(lengths)))}]") if lengths else None

    def cut(self, value: Any) -> Any:
        """Return a value as JSON has it, in which each control word of a text has a mark behind its
        first letter."""
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, list):
            return [self.cut(one) for one in value]
        if isinstance(value, dict):
            return {self._cut_text(key): self.cut(one) for key, one in value.items()}
        return value

    def _cut_text(self, text: str) -> str:
        text = text.replace(MARK, "")
        if self._firsts is None:
            return text
        parts, begin = [], 0
        for found in self._firsts.finditer(text):
            at = found.start()
            if any(text[at : at + length] in self._words for length in self._lengths[found[0]]):
                parts.append(text[begin : at + 1])
                begin = at + 1
        return MARK.join((*parts, text[begin:]))
