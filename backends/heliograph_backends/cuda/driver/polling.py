"""How a thread that has nothing else to do waits for the device: it asks for a while, then it blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from heliograph_backends.cuda.driver.driver import Driver, Mark

#: How long it asks. A thread that blocks is woken some tens of microseconds after the device got there, as
#: long as a short run takes. A long run costs a processor no more than this.
POLL_SECONDS = 50e-6


def wait(driver: Driver, mark: Mark) -> None:
    """Waits until the device got to a mark. Not for an event loop: it blocks. Raises DriverError."""
    if not reached_soon(driver, mark, lambda: False):
        driver.wait(mark)


def reached_soon(driver: Driver, mark: Mark, stop: Callable[[], bool]) -> bool:
    """Whether the device gets to a mark while it is asked, which ends early when `stop` says so. Raises
    DriverError."""
    end = time.perf_counter() + POLL_SECONDS
    while not driver.is_reached(mark):
        if stop() or time.perf_counter() >= end:
            return False
        # Not time.sleep(0), which takes as long as all of this may; others get the interpreter all the same.
        os.sched_yield()
    return True
