"""What can be seen of a session from outside: what it holds, has done, and may do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from heliograph_server.core.contents import Contents
from heliograph_server.core.handles import (
    BufferHandle,
    EventHandle,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.core.principals import Principal, Right
from heliograph_server.core.session_counts import SessionCounts
from heliograph_server.core.session_work import SessionWork


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What a session holds now. All zero once it has ended."""

    tensors: int = 0
    buffers: int = 0
    plans: int = 0
    streams: int = 0
    events: int = 0
    storages: int = 0
    staged_bytes: int = 0
    content_bytes: int = 0
    commands_in_flight: int = 0
    #: Plans that nobody has a handle of any more, and what they take of devices.
    idle_plans: int = 0
    idle_bytes: int = 0
    reservations: int = 0
    #: Runs of plans that came and are not done.
    runs_in_flight: int = 0
    #: Of devices, by tensors and variables.
    tensor_bytes: int = 0


class SessionSeen(SessionWork):
    """Thread-safe. `Session` makes it."""

    number: int
    client: str
    principal: Principal
    _contents: Contents

    def __repr__(self) -> str:
        counts = f"{self._core.in_flight} commands in flight, {len(self._core.handles)} handles"
        return f"<Session {self.number} of {self.client}: {counts}>"

    def __str__(self) -> str:
        return f"session {self.number} of {self.client}"

    def statistics(self) -> SessionStatistics:
        with self._lock:
            count = self._core.handles.count
            return SessionStatistics(
                tensors=count(TensorHandle),
                buffers=count(BufferHandle),
                plans=count(PlanHandle),
                streams=count(StreamHandle),
                events=count(EventHandle),
                storages=self._core.storages,
                staged_bytes=self._staging.used_bytes,
                content_bytes=self._contents.size_bytes,
                commands_in_flight=self._core.unretired,
                idle_plans=self._plans.idle,
                idle_bytes=self._plans.idle_bytes,
                reservations=count(ReservationHandle),
                runs_in_flight=self._core.runs_in_flight,
                tensor_bytes=self._core.storage_bytes,
            )

    @property
    def may_exchange(self) -> bool:
        """Whether it may name other daemons, with which this one then exchanges values."""
        return self.principal.may(Right.POOL)

    @property
    def is_attached(self) -> bool:
        return self._on_batch is not None

    @property
    def counts(self) -> SessionCounts:
        """What it has done so far, from any thread; only grows, but for its runs."""
        waiting, running = self._book.counts
        return SessionCounts(
            self._execution.traffic.now,
            self._execution.traffic.by_road,
            Counter(self._core.failures.copy()),
            waiting,
            running,
        )

    @property
    def commands(self) -> int:
        """How many came so far."""
        return self._core.last_sequence

    @property
    def is_quiet(self) -> bool:
        """Whether no work is queued or running."""
        with self._lock:
            return self._core.unretired == 0
