"""The lag of an event loop: a call that blocks the loop delays all sessions."""

from __future__ import annotations

import asyncio
import time

#: How often the lag is measured.
TICK_SECONDS = 0.25
#: The least time for which the largest lag is reported, so that every scrape sees it.
WINDOW_SECONDS = 15.0


class LoopLag:
    """Measures the lag of an event loop, with a few calls each second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._expected = 0.0
        self._turned = time.monotonic()
        self._now = self._before = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LoopLag {self.seconds:.4f} s>"

    @property
    def seconds(self) -> float:
        """The largest lag of the last one or two windows, and of the tick that is due. From any
        thread."""
        due = time.monotonic() - self._expected if self._handle is not None else 0.0
        return max(self._now, self._before, due, 0.0)

    def start(self) -> None:
        """Start measuring. Called on the loop."""
        self._expected = time.monotonic() + TICK_SECONDS
        self._handle = self._loop.call_later(TICK_SECONDS, self._tick)

    def stop(self) -> None:
        """Stop measuring. Called on the loop."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _tick(self) -> None:
        now = time.monotonic()
        late = now - self._expected
        if now - self._turned > WINDOW_SECONDS:
            self._turned, self._before, self._now = now, self._now, 0.0
        self._now = max(self._now, late)
        self.start()
