"""Waiting for the end of another process of this host, by its id and start, which name it for good."""

from __future__ import annotations

import os
import select


def process_started(process: int) -> int:
    """Return the start of a process in clock ticks since the start of the system; 0 if it is not
    known."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            # The name of the process, in parentheses, may contain anything.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def wait_for_end(process: int, started: int, seconds: float) -> bool:
    """Wait until a process has ended. Return False if it has not, after so many seconds.

    Returns True at once for a process that is not on this host, or in another PID namespace.
    """
    try:
        descriptor = os.pidfd_open(process)
    except (OSError, OverflowError, AttributeError):
        return True
    try:
        if not started or process_started(process) != started:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))
    finally:
        os.close(descriptor)
