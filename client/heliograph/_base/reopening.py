"""The way to another session in the place of one that is lost, for both APIs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heliograph.core.connection_state import pause_seconds

#: The time for which another session is tried for, unless the caller of `connect` says otherwise.
REOPEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Reopening:
    """Opens sessions with the arguments of an earlier one."""

    #: Opens one within so many seconds; under asyncio the result is awaited. Raises as `connect`.
    open: Callable[[float], Any]
    #: The time for which to try after a loss.
    seconds: float

    def pause(self, attempts: int) -> float:
        """Return the pause after so many failed attempts, as for a broken connection."""
        return pause_seconds(attempts, random.random())


def reopening(reconnect: bool | float, open: Callable[[float], Any]) -> Reopening | None:
    """Return what opens a session again, by the checked argument of `connect`; None: nothing
    does."""
    seconds = REOPEN_SECONDS if reconnect is True else float(reconnect)
    return Reopening(open, seconds) if seconds else None
