"""Bytes that the server holds for one session between a bulk call and the command that names it."""

from __future__ import annotations

import threading

from heliograph_proto.errors import LimitExceededError


class Staging:
    """Counts staged bytes, both ways together, and refuses what passes the limit before it is taken."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<Staging {self.used_bytes:,} of {self._limit_bytes:,} bytes>"

    def take(self, size_bytes: int) -> memoryview:
        """Memory for a transfer, to be given back. Raises LimitExceededError."""
        self._reserve(size_bytes)
        try:
            return memoryview(bytearray(size_bytes))
        except BaseException:
            self.give(size_bytes)
            raise

    def _reserve(self, size_bytes: int) -> None:
        with self._lock:
            if self.used_bytes + size_bytes > self._limit_bytes:
                raise LimitExceededError(
                    f"{self.used_bytes:,} bytes of transfers are staged, {size_bytes:,} more would pass "
                    f"the limit of {self._limit_bytes:,}",
                    advice="wait for earlier transfers",
                )
            self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Gives memory back: the caller no longer looks at it."""
        with self._lock:
            self.used_bytes -= size_bytes
