"""A moment by which something must be done."""

from __future__ import annotations

import time

from heliograph._arguments import checked_timeout
from heliograph._words import ANSWER, What, late
from heliograph_proto.errors import DeadlineExceededError


class Deadline:
    """A moment by which something must be done; with None, none."""

    __slots__ = ("_at", "_seconds", "_what")

    def __init__(self, seconds: float | None, what: What = ANSWER) -> None:
        self._seconds = checked_timeout(seconds)
        self._at = None if self._seconds is None else time.monotonic() + self._seconds
        self._what = what

    def remaining(self) -> float | None:
        """Seconds, 0 or more; None when there is no deadline."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raises DeadlineExceededError when the moment has passed."""
        if self._at is not None and time.monotonic() >= self._at:
            raise self.error()

    def error(self) -> DeadlineExceededError:
        """What was not done, and the limit: the same words whoever noticed."""
        return late(self._what, self._seconds or 0.0)

    def worded(self, error: BaseException) -> BaseException:
        """The error, in our words if it is that of this deadline, noticed by somebody else."""
        noticed = isinstance(error, DeadlineExceededError) and not error.origin.sequence
        return self.error() if noticed and self._seconds is not None else error
