"""The wait for the end of all sessions' work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from heliograph_server.session.session import Session

#: While the host drains, the time that a client has to request a result after the end of its run.
LINGER_SECONDS = 0.25


def wait_quiet(
    changed: threading.Condition,
    sessions: Callable[[], Collection[Session]],
    is_quiet: Callable[[Session], bool],
    is_over: Callable[[], bool],
    timeout: float,
) -> bool:
    """Wait until no session has work, at most `timeout` seconds, or until `is_over`. Return True if
    so.

    A client requests large results after it learns of the end of their run. So all sessions must
    stay quiet for LINGER_SECONDS.
    """
    end = time.monotonic() + timeout

    def commands() -> int:
        return sum(one.commands for one in sessions())

    def has_new(before: int) -> bool:
        return is_over() or commands() != before

    with changed:
        # A client that sends short runs is quiet between them, so both waits look at the time.
        all_quiet = lambda: is_over() or all(map(is_quiet, sessions()))  # noqa: E731
        while (left := end - time.monotonic()) > 0 and changed.wait_for(all_quiet, left):
            if is_over() or not sessions():
                return True
            is_new = partial(has_new, commands())
            left = end - time.monotonic()
            if not changed.wait_for(is_new, min(left, LINGER_SECONDS)) and left > LINGER_SECONDS:
                return True
    return False
