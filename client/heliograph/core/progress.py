"""Progress of uploads: a callback for programs, bars with rate and remaining time for people.

Bars appear on stderr for uploads that take more than a second, if it is a terminal and rich is
installed, and vanish when they are done. Nothing of rich is imported before.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

#: A function of (bytes done, total bytes), called from any thread.
Callback: TypeAlias = Callable[[int, int], None]
#: The progress argument of a session: a callback, bars on a terminal, or nothing.
ProgressArgument: TypeAlias = "Callback | Literal['auto'] | None"

#: Shorter uploads get no bar.
SHOWN_SECONDS = 1.0


class UploadBars:
    """Bars on a terminal, several at once. Thread-safe."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self.clock = clock
        self._lock = threading.Lock()
        self._bars: Any = None
        self._count = 0

    def is_seen(self) -> bool:
        """True if a bar would be visible."""
        return self._console is not None or (sys.stderr is not None and sys.stderr.isatty())

    def add(self, what: str, total_bytes: int) -> Any:
        """Add a bar. Returns None if rich is missing or already shows something else."""
        with self._lock:
            if self._bars is None and not self._start():
                return None
            self._count += 1
            return self._bars.add_task(what, total=total_bytes)

    def update(self, bar: Any, done_bytes: int) -> None:
        """Set the progress of a bar."""
        with self._lock:
            self._bars.update(bar, completed=done_bytes)

    def remove(self, bar: Any) -> None:
        """Remove a bar. Removing the last one also ends rich's thread."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._bars.stop()
                self._bars = None

    def _start(self) -> bool:
        try:
            from rich.console import Console
            from rich.errors import LiveError
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
        except ImportError:
            return False
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}", markup=False)
        bars = Progress(text, *columns, console=self._console or Console(file=sys.stderr))
        try:
            bars.start()
        except LiveError:
            return False
        self._bars = bars
        return True


#: Shared by all sessions with the argument "auto".
_AUTOMATIC = UploadBars()

Progress: TypeAlias = "Callback | UploadBars"


def checked_progress(given: object) -> Progress | None:
    """Return the progress display of a session. Raises InvalidArgumentError."""
    if given == "auto":
        return _AUTOMATIC
    if given is not None and not callable(given) and not isinstance(given, UploadBars):
        raise InvalidArgumentError(
            f"progress is {given!r:.80}", advice="a function of bytes done and total bytes, 'auto', or None"
        )
    return given


class Meter:
    """A counter of the bytes of one upload, called from any thread and ended once."""

    def __init__(self, what: str, total_bytes: int, progress: Progress | None) -> None:
        self._what, self._total_bytes, self._progress = what, total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._bar: Any = None
        self._begun = progress.clock() if isinstance(progress, UploadBars) else 0.0
        self(0)

    def __call__(self, taken_bytes: int) -> None:
        if self._progress is None or not self._total_bytes:
            return
        with self._lock:
            self._done_bytes += taken_bytes
            if isinstance(self._progress, UploadBars):
                self._show(self._progress)
            else:
                self._progress(self._done_bytes, self._total_bytes)

    def _show(self, bars: UploadBars) -> None:
        if self._bar is not None:
            bars.update(self._bar, self._done_bytes)
        elif bars.clock() - self._begun > SHOWN_SECONDS and bars.is_seen():
            # The rate counts from here on, without the bytes before the bar appeared.
            self._bar = bars.add(self._what, self._total_bytes)
            if self._bar is None:
                self._progress = None
            else:
                bars.update(self._bar, self._done_bytes)

    def end(self) -> None:
        """End the upload, complete or not. Idempotent."""
        with self._lock:
            bar, self._bar = self._bar, None
            if bar is not None and isinstance(self._progress, UploadBars):
                self._progress.remove(bar)
            self._progress = None
