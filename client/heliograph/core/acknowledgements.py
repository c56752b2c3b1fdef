"""The messages and downloads that came, and how many of them the server knows of. Pure.

In a session with a lease the server keeps completion messages, and the bytes of downloads, until
the client says that it has them.
"""

from __future__ import annotations

from collections import deque

from heliograph_proto import commands as c

#: The server hears of received messages after so many of them, or so many bytes, if no general
#: command leaves before. It keeps them until then.
_TELL_MESSAGES, _TELL_BYTES = 512, 2**18


class Acknowledgements:
    """The count of what the client of one session has received, over all its connections."""

    def __init__(self) -> None:
        #: The messages of completions that came.
        self.received = 0
        #: Those that the server knows of, and the bytes of the others.
        self._told, self._untold_bytes = 0, 0
        #: Transfers whose bytes came, to be told.
        self._downloaded: list[int] = []
        #: Those that were told, with the number of the first command after them: once that is done,
        #: the server knows of them.
        self._told_downloaded: deque[tuple[int, int]] = deque()

    def __repr__(self) -> str:
        return f"<Acknowledgements {self._told:,} of {self.received:,} told>"

    def came(self, size_bytes: int) -> None:
        """Record that a message of completions came."""
        self.received += 1
        self._untold_bytes += size_bytes

    def downloaded(self, transfer: int) -> None:
        """Record that all bytes of a transfer came."""
        self._downloaded.append(transfer)

    @property
    def is_due(self) -> bool:
        """True if the server should hear of them at once."""
        is_much = self.received - self._told >= _TELL_MESSAGES or self._untold_bytes >= _TELL_BYTES
        return is_much or bool(self._downloaded)

    def take(self, next_sequence: int, *, is_general: bool) -> c.Acknowledged | None:
        """Return what to tell before a command of this number; None: nothing, so far.

        `is_general`: the message has general commands, to which a few bytes more are nothing.
        """
        if not (self.is_due or (is_general and self.received > self._told)):
            return None
        told = c.Acknowledged(self.received, tuple(self._downloaded))
        self._told, self._untold_bytes = self.received, 0
        self._told_downloaded.extend((next_sequence, one) for one in self._downloaded)
        self._downloaded.clear()
        return told

    def done(self, completed_through: int) -> None:
        """Record that the server is done with all commands up to a number."""
        while self._told_downloaded and self._told_downloaded[0][0] <= completed_through:
            self._told_downloaded.popleft()

    def go_on(self, received: int) -> None:
        """Continue on another connection, of which both sides count `received` messages before.

        Downloads of which the server may not know are told again.
        """
        self.received = self._told = received
        self._untold_bytes = 0
        self._downloaded[:0] = [transfer for _, transfer in self._told_downloaded]
        self._told_downloaded.clear()

    def clear(self) -> None:
        """Drop what is to be told, since the session has ended."""
        self._downloaded.clear()
        self._told_downloaded.clear()
