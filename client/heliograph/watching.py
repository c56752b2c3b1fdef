"""Iterators over a server's device changes and log lines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Self

from heliograph.core.watching import DeviceEvent, WatchBase
from heliograph.transport.blocking import BlockingShell
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.sessions import LogLine


class DeviceWatch(WatchBase):
    """An iterator over what happens to devices, from its creation on. Thread-safe.

    It ends with the session, or when it is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def put(self, events: Sequence[DeviceEvent]) -> None:
        with self._changed:
            super().put(events)
            self._changed.notify_all()

    def end(self, why: str = "") -> None:
        with self._changed:
            super().end(why)
            self._changed.notify_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceEvent:
        """Block until the next event. Raises LimitExceededError, once, if events were missed."""
        found = self._next(None)
        if found is None:
            raise StopIteration
        return found

    def next(self, timeout: float | None = None) -> DeviceEvent | None:
        """Return the next event, or None if the session has ended.

        Raises DeadlineExceededError after `timeout` seconds, and LimitExceededError, once, if
        events were missed.
        """
        return self._next(timeout)

    def _next(self, timeout: float | None) -> DeviceEvent | None:
        with self._changed:
            if not self._changed.wait_for(self._is_ready, timeout):
                raise DeadlineExceededError("no device event in time")
            return self._take()

    def _is_ready(self) -> bool:
        return bool(self._events or self._missed or self._ended)

    def close(self) -> None:
        """End the iterator. Idempotent."""
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class LogLines:
    """An iterator over the server's log of a session, until the session ends.

    Made by `Session.log`.
    """

    def __init__(self, shell: BlockingShell, level: str) -> None:
        self._source = shell.follow_log(level)
        self._lines: deque[LogLine] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LogLine:
        while not self._lines:
            more = self._source.take()
            if more is None:
                raise StopIteration
            self._lines.extend(more)
        return self._lines.popleft()

    def close(self) -> None:
        """End the iterator. Idempotent, from any thread."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
