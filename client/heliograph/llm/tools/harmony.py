"""The form of gpt-oss: messages in channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

A call is a message to a function, whose text is JSON. `<|call|>` and `<|return|>` end the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from heliograph.llm.tools.calls import Part, Text, Thought, ToolCall, loaded
from heliograph.llm.tools.scanning import begun, first

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
#: The begins of a header. One that ends without a text has nothing for the reader.
_HEADS = ("<|channel|>", "<|start|>", "<|constrain|>", "to=")
_BODY, _ENDS = "<|message|>", ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")


class HarmonyReader:
    """Reads messages of channels."""

    def __init__(self, names: Collection[str]) -> None:
        self._has_tools = bool(names)
        self._text = ""
        #: The header of the present message; None: no message has begun.
        self._header: str | None = None
        self._channel = "final"
        self._name = ""

    def put(self, text: str) -> list[Part]:
        """Return the parts that are certain now."""
        self._text += text
        return self._read(is_last=False)

    def end(self) -> list[Part]:
        """Return the rest."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[Part]:
        found: list[Part] = []
        while self._has_header(is_last):
            place = first(self._text, _ENDS)
            if place is None and not is_last and self._name:
                # A call is given as a whole.
                return found
            at = place[0] if place else len(self._text) - (0 if is_last else begun(self._text, _ENDS))
            body, self._text = self._text[:at], self._text[at:]
            is_whole = place is not None or is_last
            if body or (self._name and is_whole):
                found.append(self._part(body))
            if not is_whole:
                return found
            self._header = None
            if place and place[1] not in ("<|start|>", "<|channel|>"):
                self._text = self._text[len(place[1]) :]
        return found

    def _has_header(self, is_last: bool) -> bool:
        """Read a header, unless one is read; False if more of it must come."""
        if self._header is not None:
            return True
        if (at := self._text.find(_BODY)) >= 0:
            self._open(self._text[:at])
            self._text = self._text[at + len(_BODY) :]
            return True
        head = self._text.lstrip()
        if not head.startswith(_HEADS) and not any(one.startswith(head) for one in _HEADS):
            # A model that does not keep to its form.
            self._open("")
            return True
        if is_last:
            self._text = ""
        return False

    def _open(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._header = header
        self._name = recipient[1] if recipient and self._has_tools else ""
        self._channel = channel[1] if channel else "final"

    def _part(self, body: str) -> Part:
        if self._name:
            arguments = loaded(body) if body.strip() else {}
            if isinstance(arguments, dict):
                return ToolCall(self._name, arguments)
            return Text(f"{self._header}{_BODY}{body}")
        return Thought(body) if self._channel == "analysis" else Text(body)
