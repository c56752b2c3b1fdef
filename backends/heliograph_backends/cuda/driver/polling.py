"""Waiting of idle threads for the device: a thread polls for a while, then it blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from heliograph_backends.cuda.driver.driver import Driver, Mark

#: The polling time. A blocked thread wakes some tens of microseconds after the device is done, as
#: long as a short run takes. A long run costs a processor at most this time.
POLL_SECONDS = 50e-6


def wait(driver: Driver, mark: Mark) -> None:
    """Wait until the device has reached a mark. Not for an event loop: it blocks. Raises
    DriverError."""
    if not reached_soon(driver, mark, lambda: False):
        driver.wait(mark)


def reached_soon(driver: Driver, mark: Mark, stop: Callable[[], bool]) -> bool:
    """True if the device reaches a mark while it is polled; polling ends early when `stop` returns
    True. Raises DriverError."""
    end = time.perf_counter() + POLL_SECONDS
    while not driver.is_reached(mark):
        if stop() or time.perf_counter() >= end:
            return False
        # Not time.sleep(0), which may take as long as the whole wait; other threads get the
        # interpreter here too.
        os.sched_yield()
    return True
