"""A moment by which something must be done."""

from __future__ import annotations

import time

from heliograph_proto.errors import DeadlineExceededError


class Deadline:
    """A moment by which something must be done; with None, none."""

    __slots__ = ("_at", "_seconds")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds, 0 or more; None when there is no deadline."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def error(self, what: str = "the answer") -> DeadlineExceededError:
        return DeadlineExceededError(f"{what} did not come within {self._seconds:g} s")
