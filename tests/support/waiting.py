"""Waits of tests for something that tells of itself by no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: The bound of a wait, unless the test names another one.
SECONDS = 30.0


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait until a condition holds, in bounded time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)
