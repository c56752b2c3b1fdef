"""Counters and statistics of a session. Data alone, for any thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from heliograph_proto.sessions import Traffic


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Counters of a session since it was opened."""

    traffic: Traffic = field(default_factory=Traffic)
    #: Bytes by "received" or "sent", and by `Transport`.
    by_transport: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Failed commands, by the error's reason.
    failures: Counter[int] = field(default_factory=Counter)
    #: Runs that wait for their turn now, and those that had it; 0 unless the host observes runs.
    runs_waiting: int = 0
    runs_running: int = 0

    def plus(self, other: SessionCounts) -> SessionCounts:
        """Return the sum of both."""
        return SessionCounts(
            self.traffic.plus(other.traffic),
            self.by_transport + other.by_transport,
            self.failures + other.failures,
            self.runs_waiting + other.runs_waiting,
            self.runs_running + other.runs_running,
        )


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """The objects that a session holds now. All zero once it has ended."""

    tensors: int = 0
    buffers: int = 0
    plans: int = 0
    streams: int = 0
    events: int = 0
    storages: int = 0
    staged_bytes: int = 0
    content_bytes: int = 0
    commands_in_flight: int = 0
    #: Cached plans without a handle, and their device memory.
    idle_plans: int = 0
    idle_bytes: int = 0
    reservations: int = 0
    #: Runs that were received and are not done.
    runs_in_flight: int = 0
    #: Device memory of tensors and variables.
    tensor_bytes: int = 0
