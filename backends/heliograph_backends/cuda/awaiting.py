"""How a thread that has nothing else to do waits for the device: it asks for a while, then it blocks."""

from __future__ import annotations

import os
import time

from heliograph_backends.cuda.driver import Driver, Mark

#: How long it asks. A thread that blocks is woken some tens of microseconds after the device got there, as
#: long as a short run takes. A long run costs a processor no more than this.
POLL_SECONDS = 50e-6


def wait(driver: Driver, mark: Mark) -> None:
    """Waits until the device got to a mark. Not for an event loop: it blocks. Raises DriverError."""
    end = time.perf_counter() + POLL_SECONDS
    while not driver.is_reached(mark):
        if time.perf_counter() >= end:
            driver.wait(mark)
            return
        # Not time.sleep(0), which takes as long as all of this may; others get the interpreter all the same.
        os.sched_yield()
