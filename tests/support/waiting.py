"""Waits of tests for something that tells of itself by no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: The bound of a wait, unless the test names another one.
SECONDS = 30.0


def until(condition: Callable[[], Any], what: str = "it came true", seconds: float = SECONDS) -> None:
    """Wait until a condition holds, in bounded time. An OSError, as of a server that is not there yet, counts
    as not yet."""
    end = time.monotonic() + seconds
    while True:
        failure: OSError | None = None
        try:
            if condition():
                return
        except OSError as error:
            failure = error
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}") from failure
        time.sleep(0.01)
