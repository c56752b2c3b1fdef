"""What sessions have done so far, for whoever looks on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from heliograph_proto.description import Traffic


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What a session has done so far."""

    traffic: Traffic = field(default_factory=Traffic)
    #: Bytes by "received" or "sent", and by `Road`.
    by_road: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Commands that failed, by the error's reason.
    failures: Counter[int] = field(default_factory=Counter)
    #: Runs that wait for their turn, and that have had it, now; known only where runs are observed.
    runs_waiting: int = 0
    runs_running: int = 0

    def plus(self, other: SessionCounts) -> SessionCounts:
        """Both together."""
        return SessionCounts(
            self.traffic.plus(other.traffic),
            self.by_road + other.by_road,
            self.failures + other.failures,
            self.runs_waiting + other.runs_waiting,
            self.runs_running + other.runs_running,
        )
