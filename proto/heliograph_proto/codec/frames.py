"""Messages on a stream of bytes: each is preceded by its length, four bytes, the lowest first."""

from __future__ import annotations

import sys
from struct import Struct

from heliograph_proto.errors import LimitExceededError

_LENGTH = Struct("<I")
LENGTH_BYTES = _LENGTH.size


def framed(message: bytes) -> bytes:
    """Return a message with its length."""
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """Cuts what arrives into messages. It holds one incomplete message at most, or the messages of
    one `feed` that exceeded a bound."""

    def __init__(self, most_bytes: int, most_messages: int = sys.maxsize) -> None:
        """`most_bytes`: of one message; `most_messages`: of one `feed`."""
        self._most_bytes, self._most_messages = most_bytes, most_messages
        #: True if the next `feed` may return messages without new bytes.
        self.has_more = False
        #: The beginning of a message, with its length, and the bytes that it needs to go on.
        self._rest = bytearray()
        self._needed_bytes = 0

    def __repr__(self) -> str:
        return f"<FrameReader with {len(self._rest):,} bytes of an incomplete message>"

    @property
    def is_empty(self) -> bool:
        """True if there is no incomplete message."""
        return not self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with these bytes.

        Raises LimitExceededError for the length of a message that is too long, before it arrives.
        """
        self.has_more = False
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed_bytes:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        found: list[bytes] = []
        at, end, needed = 0, len(data), _LENGTH.size
        while end - at >= _LENGTH.size:
            if len(found) == self._most_messages:
                self.has_more = True
                break
            size = _LENGTH.unpack_from(data, at)[0]
            if size > self._most_bytes:
                raise LimitExceededError(f"a message of {size:,} bytes; the most is {self._most_bytes:,}")
            needed = _LENGTH.size + size
            if at + needed > end:
                break
            found.append(data[at + _LENGTH.size : at + needed])
            at, needed = at + needed, _LENGTH.size
        if at < end:
            self._rest += data[at:]
            self._needed_bytes = needed
        return found
