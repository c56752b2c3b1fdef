"""The completion messages of a session with a lease that its client has not acknowledged. Pure.

Messages are numbered from 1 in the order in which they are written, by whatever stream. A client
that attaches says how many it has received, and gets the others again, byte for byte.
"""

from __future__ import annotations

from collections import deque

from heliograph_proto.errors import ProtocolError

#: While more is kept, no further message is written.
MOST_BYTES = 16 * 2**20
MOST_MESSAGES = 65_536


class CompletionLog:
    """Encoded messages, in order, from the first that was not acknowledged."""

    def __init__(self, acknowledged: int = 0, kept: tuple[bytes, ...] = ()) -> None:
        """`kept`: messages after those that were `acknowledged`, as of a restored session."""
        self._kept: deque[bytes] = deque(kept)
        #: The messages that the client acknowledged.
        self.acknowledged = acknowledged
        #: The memory of those kept.
        self.size_bytes = sum(map(len, kept))

    def __repr__(self) -> str:
        return f"<CompletionLog {self.acknowledged + 1} to {self.written}, {self.size_bytes:,} bytes>"

    @property
    def written(self) -> int:
        """The number of the last message."""
        return self.acknowledged + len(self._kept)

    @property
    def is_full(self) -> bool:
        """True if the client must acknowledge some before more are written."""
        return self.size_bytes >= MOST_BYTES or len(self._kept) >= MOST_MESSAGES

    def append(self, message: bytes) -> None:
        """Keep the next message."""
        self._kept.append(message)
        self.size_bytes += len(message)

    def acknowledge(self, received: int) -> None:
        """Drop the messages up to a number. A smaller number than before has no effect.

        Raises ProtocolError if so many were not written.
        """
        self._check(received)
        while self.acknowledged < received:
            self.size_bytes -= len(self._kept.popleft())
            self.acknowledged += 1

    def since(self, received: int) -> tuple[bytes, ...]:
        """Return the messages after a number. Raises ProtocolError unless all of them are kept."""
        self._check(received)
        if received < self.acknowledged:
            raise ProtocolError(
                f"the client claims {received:,} completion messages and has acknowledged "
                f"{self.acknowledged:,}"
            )
        return tuple(self._kept)[received - self.acknowledged :]

    def _check(self, received: int) -> None:
        if received > self.written:
            raise ProtocolError(
                f"the client claims {received:,} completion messages; {self.written:,} were written"
            )
