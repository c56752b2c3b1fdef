"""Whether a device computes, so that a short run can be done at once, in the thread that brought it.

Two changes of thread cost more than a small plan computes. Doing it at once is safe for an event loop
only if it cannot wait for somebody else's long run on the same workers. So all who compute on a device
sign in; what is done at once holds the door shut meanwhile, and is not begun while anybody is inside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A plan that is expected to take longer than this goes to its device's thread.
SHORT_US = 50.0


class Occupancy:
    """Who computes on one device. Used as a context by those who compute in threads of their own."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._inside = 0
        #: Of those who left; and since when somebody is inside without a break.
        self._busy_seconds = 0.0
        self._since = 0.0

    @property
    def busy_seconds(self) -> float:
        """For how long somebody computed, so far."""
        with self._door:
            running = time.monotonic() - self._since if self._inside else 0.0
            return self._busy_seconds + running

    def __repr__(self) -> str:
        return f"<Occupancy {self._inside}>"

    def __enter__(self) -> None:
        with self._door:
            if not self._inside:
                self._since = time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._door:
            self._inside -= 1
            if not self._inside:
                self._busy_seconds += time.monotonic() - self._since

    @contextmanager
    def outside(self) -> Iterator[None]:
        """One of those who compute does not, for a while: it waits for its client."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def at_once(self, work: Callable[[], None]) -> bool:
        """Does short work here and now, unless somebody computes. Whether it did."""
        if not self._door.acquire(blocking=False):
            return False
        try:
            if self._inside:
                return False
            began = time.monotonic()
            work()
            self._busy_seconds += time.monotonic() - began
            return True
        finally:
            self._door.release()
