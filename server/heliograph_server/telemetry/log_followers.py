"""Clients that follow the log of their sessions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import LEVELS, LogLine, check_level
from heliograph_server.resources.log_fields import LogOwner
from heliograph_server.telemetry.logs import one_line

#: The most lines that wait to be read; older ones are dropped.
MOST_LINES = 1000
#: The most followers of one session.
MOST_FOLLOWERS = 4
#: The longest name of a logger.
_NAME_CHARACTERS = 100


class LogFollower:
    """The log lines of one session from now on, until it is closed. Thread-safe."""

    def __init__(self, owner: LogOwner, level: str, wake: Callable[[], None]) -> None:
        """`wake`: called on any thread when there are lines to take; it must not block, log or
        raise.

        Raises InvalidArgumentError, LimitExceededError.
        """
        self.owner = owner
        self.level = logging.getLevelNamesMapping()[check_level(level).upper()]
        self._wake = wake
        self._lock = threading.Lock()
        self._lines: deque[LogLine] = deque()
        self._dropped = 0
        _FOLLOWERS.add(self)

    def __repr__(self) -> str:
        return f"<LogFollower of {len(self._lines)} lines>"

    def put(self, line: LogLine) -> None:
        """Add a line."""
        with self._lock:
            if len(self._lines) >= MOST_LINES:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
        self._wake()

    def take(self) -> tuple[list[LogLine], int]:
        """Return the lines since the last call, and the number of dropped lines before them."""
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        return lines, dropped

    def close(self) -> None:
        """End the following. Idempotent."""
        _FOLLOWERS.remove(self)


class _Followers(logging.Handler):
    """The followers of this process; a handler of the root logger as long as there are any."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        #: Replaced with each change, so that logging takes no lock here.
        self._by_owner: dict[LogOwner, tuple[LogFollower, ...]] = {}

    def add(self, follower: LogFollower) -> None:
        """Add a follower. Raises LimitExceededError."""
        with self._guard:
            others = self._by_owner.get(follower.owner, ())
            if len(others) >= MOST_FOLLOWERS:
                message = f"{MOST_FOLLOWERS} follow the log of this session already"
                raise LimitExceededError(message, advice="end one of them")
            self._change(follower.owner, (*others, follower))

    def remove(self, follower: LogFollower) -> None:
        with self._guard:
            others = self._by_owner.get(follower.owner, ())
            self._change(follower.owner, tuple(one for one in others if one is not follower))

    def _change(self, owner: LogOwner, followers: tuple[LogFollower, ...]) -> None:
        changed = {one: found for one, found in self._by_owner.items() if one is not owner}
        if followers:
            changed[owner] = followers
        self._by_owner = changed
        root = logging.getLogger()
        (root.addHandler if changed else root.removeHandler)(self)

    def emit(self, record: logging.LogRecord) -> None:
        owner = getattr(record, "owner", None)
        followers = self._by_owner.get(owner, ()) if isinstance(owner, LogOwner) else ()
        followers = tuple(one for one in followers if record.levelno >= one.level)
        if not followers:
            return
        try:
            line = _line_of(record)
        except Exception:
            self.handleError(record)
            return
        for one in followers:
            one.put(line)


_FOLLOWERS = _Followers()


def _line_of(record: logging.LogRecord) -> LogLine:
    level = record.levelname.lower()
    return LogLine(
        record.created,
        level if level in LEVELS else "error",
        record.name[:_NAME_CHARACTERS],
        one_line(record.getMessage()),
        int(getattr(record, "run", 0)),
        str(getattr(record, "trace", "")),
    )
