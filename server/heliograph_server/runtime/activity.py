"""Sessions at work, as an operator counts them. Any thread may call it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from heliograph_server.session.session import Session

#: The time for which a session counts as busy after a command.
BUSY_SECONDS = 1.0


class SessionActivity:
    """Counts sessions at work. A session of short runs is quiet between them, so it counts as busy
    if it has sent commands since an earlier count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the session's number: its commands, and the time of the count that found more of them.
        self._seen: dict[int, tuple[int, float]] = {}

    def __repr__(self) -> str:
        return f"<SessionActivity of {len(self._seen)} sessions>"

    def count_busy(self, sessions: Collection[Session]) -> int:
        """Return how many of the open sessions are at work."""
        now = time.monotonic()
        with self._lock:
            self._seen = {one.number: self._look(one, now) for one in sessions}
            return sum(not one.is_quiet or now - self._seen[one.number][1] < BUSY_SECONDS for one in sessions)

    def _look(self, session: Session, now: float) -> tuple[int, float]:
        commands = session.commands
        before, sent = self._seen.get(session.number, (commands, float("-inf")))
        return commands, now if commands != before else sent
