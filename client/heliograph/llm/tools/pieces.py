"""The text of an answer in pieces, as its tokens come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from heliograph.llm.tools.calls import Part, Text, Thought, ToolCall
from heliograph.llm.tools.readers import Reader
from heliograph.llm.tools.scanning import begun


class Stream(Protocol):
    """A decoder that takes one token after the other."""

    def put(self, *tokens: int) -> str:
        """Return the text that is whole now."""

    def end(self) -> str:
        """Return the rest."""


class Pieces:
    """Turns tokens into text that never changes again, and finds the texts that end an answer.

    A piece ends with a whole character. Text that may begin a stop text is held back.
    """

    def __init__(self, stream: Stream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._held = ""
        #: True when a stop text was found; it is not part of the answer.
        self.is_stopped = False
        #: True if that can be.
        self.may_stop = bool(stops)

    def add(self, token: int) -> str:
        """Take a token, and return the text that is certain now."""
        return self._certain(self._stream.put(token), is_last=False)

    def rest(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._certain(self._stream.end(), is_last=True)

    def _certain(self, text: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            found, self._held = self._held[: min(places)], ""
            return found
        kept = 0 if is_last else begun(self._held, self._stops)
        cut = len(self._held) - kept
        found, self._held = self._held[:cut], self._held[cut:]
        return found


class MessagePieces:
    """As `Pieces`, of the text of a message alone: thoughts and calls are handed over."""

    #: True if the text may end an answer.
    may_stop = True

    def __init__(
        self,
        pieces: Pieces,
        reader: Reader,
        keep: Callable[[Thought | ToolCall], None],
        is_done: Callable[[], bool],
    ) -> None:
        """`is_done` says that the answer may end after the parts that were handed over."""
        self._pieces = pieces
        self._reader = reader
        self._keep = keep
        self._is_done = is_done

    @property
    def is_stopped(self) -> bool:
        """True when a stop text was found, or the answer may end."""
        return self._pieces.is_stopped or self._is_done()

    def add(self, token: int) -> str:
        """Take a token, and return the text that is certain now."""
        return self._text(self._reader.put(self._pieces.add(token)))

    def rest(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._text([*self._reader.put(self._pieces.rest()), *self._reader.end()])

    def _text(self, parts: Sequence[Part]) -> str:
        found = ""
        for part in parts:
            if isinstance(part, Text):
                found += part.text
            else:
                self._keep(part)
        return found
