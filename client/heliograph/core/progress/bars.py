"""Progress: a callback for programs, bars with rate and remaining time for people.

Bars appear for what takes more than a second, on stderr if it is a terminal and rich is installed,
or in the output of a notebook's cell. On a terminal they vanish when they are done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from heliograph.core.progress.displays import Display, Unit, in_notebook, start_display
from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

#: A function of (bytes done, total bytes), called from any thread.
Callback: TypeAlias = Callable[[int, int], None]
#: The progress argument of a session: a callback, bars for people, or nothing.
ProgressArgument: TypeAlias = "Callback | Literal['auto'] | None"

#: Shorter work gets no bar.
SHOWN_SECONDS = 1.0


class ProgressBars:
    """Bars of a terminal or a notebook, several at once. Thread-safe."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        display: Display | None = None,
    ) -> None:
        self._console = console
        self.clock = clock
        self._lock = threading.Lock()
        self._given = display
        self._display: Display | None = None
        self._count = 0

    def is_seen(self) -> bool:
        """True if a bar would be visible."""
        if self._console is not None or self._given is not None:
            return True
        return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())

    def add(self, what: str, total: int, unit: Unit = "bytes") -> Any:
        """Add a bar; a total of 0 is unknown. Returns None if none can be drawn."""
        with self._lock:
            if self._display is None:
                self._display = self._given or start_display(self._console)
            if self._display is None:
                return None
            self._count += 1
            return self._display.add(what, total, unit)

    def measure(self, bar: Any, total: int, unit: Unit) -> None:
        """Give a bar whose total was unknown its total."""
        with self._lock:
            if self._display is not None:
                self._display.measure(bar, total, unit)

    def update(self, bar: Any, done: int, values: str = "") -> None:
        """Set the progress of a bar."""
        with self._lock:
            if self._display is not None:
                self._display.update(bar, done, values)

    def remove(self, bar: Any) -> None:
        """Remove a bar. Removing the last one also ends the display."""
        with self._lock:
            display = self._display
            if display is None:
                return
            self._count -= 1
            try:
                display.remove(bar)
            finally:
                if not self._count:
                    self._display = None
                    display.stop()


#: Shared by all sessions with the argument "auto".
AUTOMATIC = ProgressBars()

Progress: TypeAlias = "Callback | ProgressBars"


def checked_progress(given: object) -> Progress | None:
    """Return the progress display of a session. Raises InvalidArgumentError."""
    if given == "auto":
        return AUTOMATIC
    if given is not None and not callable(given) and not isinstance(given, ProgressBars):
        raise InvalidArgumentError(
            f"progress is {given!r:.80}", advice="a function of bytes done and total bytes, 'auto', or None"
        )
    return given


class Meter:
    """A counter of one transfer's bytes, or of steps, called from any thread and ended once."""

    def __init__(self, what: str, total: int, progress: Progress | None, unit: Unit = "bytes") -> None:
        self._what, self._total, self._progress, self._unit = what, total, progress, unit
        self._done = 0
        #: Texts beside the bar.
        self.values = ""
        self._lock = threading.Lock()
        self._bar: Any = None
        self._begun = progress.clock() if isinstance(progress, ProgressBars) else 0.0
        self(0)

    def __call__(self, more: int) -> None:
        if self._progress is None or not self._total:
            return
        with self._lock:
            self._done += more
            if isinstance(self._progress, ProgressBars):
                self._show(self._progress)
            else:
                self._progress(self._done, self._total)

    def _show(self, bars: ProgressBars) -> None:
        if self._bar is not None:
            bars.update(self._bar, self._done, self.values)
        elif bars.clock() - self._begun > SHOWN_SECONDS and bars.is_seen():
            # The rate counts from here on, without what was done before the bar appeared.
            self._bar = bars.add(self._what, self._total, self._unit)
            if self._bar is None:
                self._progress = None
            else:
                bars.update(self._bar, self._done, self.values)

    def end(self) -> None:
        """End the work, complete or not. Idempotent."""
        with self._lock:
            bar, self._bar = self._bar, None
            if bar is not None and isinstance(self._progress, ProgressBars):
                self._progress.update(bar, self._done, self.values)
                self._progress.remove(bar)
            self._progress = None


class Waiting:
    """A bar for work that may tell nothing before its end. It appears after a second, and is ended
    once.

    With `count` it becomes a bar of `total` steps.
    """

    def __init__(
        self, what: str, bars: ProgressBars | None, seconds: float = SHOWN_SECONDS, total: int = 0
    ) -> None:
        self._what, self._bars, self._total = what, bars, total
        #: The steps that are done; None: nothing was told of them.
        self._done: int | None = None
        self._lock = threading.Lock()
        self._bar: Any = None
        self._has_ended = bars is None or not bars.is_seen()
        self._timer: threading.Timer | None = None
        if not self._has_ended:
            self._timer = threading.Timer(seconds, self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._has_ended and self._bars is not None:
                self._add(self._bars)

    def _add(self, bars: ProgressBars) -> None:
        if self._done is None:
            self._bar = bars.add(self._what, 0)
            return
        self._bar = bars.add(self._what, self._total, "steps")
        if self._bar is not None:
            bars.update(self._bar, self._done)

    def count(self, done: int) -> None:
        """Show that so many steps are done. Any thread."""
        with self._lock:
            was_unknown, self._done = self._done is None, done
            if self._bar is None or self._bars is None:
                return
            if was_unknown:
                self._bars.measure(self._bar, self._total, "steps")
            self._bars.update(self._bar, done)

    def end(self) -> None:
        """End the work. Idempotent."""
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            bar, self._bar, self._has_ended = self._bar, None, True
            if bar is not None and self._bars is not None:
                self._bars.remove(bar)
