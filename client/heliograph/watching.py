"""`session.watch()`: devices of the server that come and go, one event after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from heliograph._watching import DeviceEvent, WatchBase
from heliograph_proto.errors import DeadlineExceededError


class DeviceWatch(WatchBase):
    """An iterator over what happens to devices, from the moment it was made. It ends with the session, or
    when it is closed. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def put(self, events: Sequence[DeviceEvent]) -> None:
        with self._changed:
            super().put(events)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            super().end()
            self._changed.notify_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceEvent:
        """Waits for the next event. Raises LimitExceededError, once, where events were missed."""
        found = self._next(None)
        if found is None:
            raise StopIteration
        return found

    def next(self, timeout: float | None = None) -> DeviceEvent | None:
        """The next event, or None when the session has ended. Raises DeadlineExceededError."""
        return self._next(timeout)

    def _next(self, timeout: float | None) -> DeviceEvent | None:
        with self._changed:
            if not self._changed.wait_for(self._is_ready, timeout):
                raise DeadlineExceededError("nothing happened to any device in time")
            return self._take()

    def _is_ready(self) -> bool:
        return bool(self._events or self._missed or self._ended)

    def close(self) -> None:
        """Ends it. Idempotent."""
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
