"""The newest lines of the log for the dashboard, each for those who may see it.

A handler of the root logger only while a page is open. Lines of sessions are for their tenant and
for operators; all others are for operators.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heliograph_proto.sessions import LEVELS
from heliograph_server.telemetry.logs import one_line

#: The lines that are kept for a page that opens, and the most lines of one message.
KEPT_LINES, MOST_LINES = 500, 200
#: The longest text of a line.
MOST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log. `session` is 0, and `tenant` None, for one that concerns no session."""

    number: int
    at: float
    level: str
    logger: str
    text: str
    session: int = 0
    tenant: str | None = None
    run: int = 0

    def row(self) -> list[Any]:
        """The line for a message."""
        return [
            self.number,
            round(self.at * 1e3),
            self.level,
            self.logger,
            self.text,
            self.session,
            self.tenant or "",
            self.run,
        ]


class LogTap(logging.Handler):
    """Keeps the newest lines. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self._number = 0

    def __repr__(self) -> str:
        return f"<LogTap of {len(self._lines)} lines>"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and (error := record.exc_info[1]) is not None:
                text = f"{text}: {type(error).__name__}: {error}"
            text = one_line(text, MOST_TEXT)
        except Exception:
            self.handleError(record)
            return
        level, session = record.levelname.lower(), getattr(record, "session", 0)
        is_of_session = isinstance(session, int) and session > 0
        # logging holds this handler's lock.
        self._number += 1
        self._lines.append(
            Line(
                self._number,
                record.created,
                level if level in LEVELS else "error",
                record.name.removeprefix("heliograph_server."),
                text,
                session if is_of_session else 0,
                str(getattr(record, "tenant", "")) if is_of_session else None,
                int(getattr(record, "run", 0)),
            )
        )

    @property
    def newest(self) -> int:
        """The number of the newest line."""
        return self._number

    def since(self, number: int, may_see: Callable[[str | None], bool]) -> tuple[list[list[Any]], int]:
        """Return the lines after a number that a caller may see, the newest MOST_LINES of them, and
        the number of others."""
        lock = self.lock
        assert lock is not None
        with lock:
            lines = [one for one in self._lines if one.number > number]
            lost = max(0, self._number - number - len(lines))
        mine = [one.row() for one in lines if may_see(one.tenant)]
        return mine[-MOST_LINES:], max(0, len(mine) - MOST_LINES) + lost
