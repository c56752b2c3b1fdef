"""Bytes that the server holds for one session between a call and the work that it is for."""

from __future__ import annotations

import threading

from heliograph_proto.errors import LimitExceededError
from heliograph_server.core.tenants import Holding, Kind


class Staging:
    """Counts bytes and refuses what passes the limit before it is taken. `what` they are, for errors."""

    def __init__(self, limit_bytes: int, what: str = "transfers", holding: Holding | None = None) -> None:
        """`holding`: of the session, whose tenant has a limit of its own."""
        self._limit_bytes = limit_bytes
        self._holding = holding
        self._what = what
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<Staging {self.used_bytes:,} of {self._limit_bytes:,} bytes>"

    def reserve(self, size_bytes: int) -> None:
        """Counts what the caller holds already. Raises LimitExceededError."""
        with self._lock:
            if self.used_bytes + size_bytes > self._limit_bytes:
                raise LimitExceededError(
                    f"{self.used_bytes:,} bytes of {self._what} are held, {size_bytes:,} more would pass "
                    f"the limit of {self._limit_bytes:,}",
                    advice=f"wait for earlier {self._what}",
                )
            if self._holding is not None:
                self._holding.take(Kind.STAGING, size_bytes)
            self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Gives memory back: the caller no longer looks at it."""
        with self._lock:
            self.used_bytes -= size_bytes
        if self._holding is not None:
            self._holding.give(Kind.STAGING, size_bytes)
