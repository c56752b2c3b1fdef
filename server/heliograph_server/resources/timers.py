"""Deadlines: one thread that calls back at given times.

Any thread may set timers; the callbacks run on the timer thread.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(order=True, slots=True)
class Timer:
    """A callback, due at a time in seconds of the monotonic clock."""

    due: float
    number: int
    callback: Callable[[], None] | None = field(compare=False)


class Deadlines:
    """Timers on a heap. The thread starts with the first timer and ends with `close`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._timers: list[Timer] = []
        self._number = 0
        self._cancelled = 0
        #: When the thread looks again by itself.
        self._looks_at = -math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Deadlines {self.pending} pending>"

    @property
    def pending(self) -> int:
        """The number of timers that are neither due nor cancelled."""
        return len(self._timers) - self._cancelled

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back from the timer thread, once, unless cancelled before. The callback must not
        block."""
        with self._changed:
            self._number += 1
            timer = Timer(self._clock() + seconds, self._number, callback)
            heapq.heappush(self._timers, timer)
            self._start()
            # Most timers are cancelled before their time. The thread wakes for none of these.
            if timer.due < self._looks_at:
                self._changed.notify()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel a timer. Idempotent. Cancelled timers are removed when they are half of the
        heap."""
        with self._changed:
            if timer.callback is None:
                return
            timer.callback = None
            self._cancelled += 1
            if self._cancelled * 2 > len(self._timers):
                self._timers = [one for one in self._timers if one.callback is not None]
                heapq.heapify(self._timers)
                self._cancelled = 0

    def close(self) -> None:
        """End the thread. Pending callbacks are not called."""
        with self._changed:
            self._closed = True
            self._timers.clear()
            self._cancelled = 0
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="heliograph-deadlines", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback()
            except Exception:
                logger.exception("a deadline's callback failed")

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next due callback. None when closed."""
        with self._changed:
            while not self._closed:
                delay = self._timers[0].due - self._clock() if self._timers else None
                if delay is not None and delay <= 0:
                    timer = heapq.heappop(self._timers)
                    callback, timer.callback = timer.callback, None
                    if callback is not None:
                        return callback
                    self._cancelled -= 1
                else:
                    self._looks_at = math.inf if delay is None else self._timers[0].due
                    self._changed.wait(delay)
                    self._looks_at = -math.inf
        return None
