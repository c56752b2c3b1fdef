"""Displays of bars: by rich on a terminal, and as HTML in a notebook, where no widget is
needed.

rich and IPython are imported here alone, and only to draw. The caller holds the lock of all bars.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from rich.console import Console

#: The unit of a bar's numbers.
Unit: TypeAlias = Literal["bytes", "steps"]
#: The pause between two updates of a notebook's output.
NOTEBOOK_SECONDS = 0.2


class Display(Protocol):
    """A place where bars are drawn."""

    def add(self, what: str, total: int, unit: Unit) -> Any:
        """Add a bar; a total of 0 means that it is unknown. Returns its key."""

    def measure(self, bar: Any, total: int, unit: Unit) -> None:
        """Give a bar whose total was unknown its total."""

    def update(self, bar: Any, done: int, values: str) -> None:
        """Set the progress of a bar, and the values beside it."""

    def remove(self, bar: Any) -> None:
        """Take a bar away; the work has ended, complete or not."""

    def stop(self) -> None:
        """End the display; no bar is left."""


def in_notebook() -> bool:
    """True in the kernel of a notebook. Imports nothing."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    return getattr(shell, "kernel", None) is not None


def start_display(console: Console | None) -> Display | None:
    """Return a display that has begun; None if there is no library, or rich shows something else."""
    if console is None and in_notebook():
        return _Notebook()
    return _terminal(console)


# Terminals


class _Terminal:
    """Bars by rich."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars

    def add(self, what: str, total: int, unit: Unit) -> Any:
        return self._bars.add_task(what, total=total or None, unit=unit, values="")

    def measure(self, bar: Any, total: int, unit: Unit) -> None:
        self._bars.update(bar, total=total, unit=unit)

    def update(self, bar: Any, done: int, values: str) -> None:
        self._bars.update(bar, completed=done, values=values)

    def remove(self, bar: Any) -> None:
        # Its last state is seen, if for a moment.
        self._bars.refresh()
        self._bars.remove_task(bar)

    def stop(self) -> None:
        self._bars.stop()


def _terminal(console: Console | None) -> Display | None:
    try:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            Task,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.text import Text
    except ImportError:
        return None

    class ByUnit(ProgressColumn):
        """A column that depends on the unit of a bar, and on whether its end is known."""

        def __init__(self, columns: Mapping[str, ProgressColumn]) -> None:
            super().__init__()
            self._columns = columns

        def render(self, task: Task) -> Any:
            name = "unknown" if task.total is None else str(task.fields["unit"])
            column = self._columns.get(name)
            return Text("") if column is None else column(task)

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        ByUnit({"bytes": DownloadColumn(), "steps": MofNCompleteColumn()}),
        ByUnit({"bytes": TransferSpeedColumn()}),
        ByUnit(
            {"bytes": TimeRemainingColumn(), "steps": TimeRemainingColumn(), "unknown": TimeElapsedColumn()}
        ),
        TextColumn("{task.fields[values]}", markup=False),
        console=console or Console(file=sys.stderr),
        transient=True,
    )
    try:
        bars.start()
    except LiveError:
        return None
    return _Terminal(bars)


# Notebooks


class _NotebookBar:
    """A bar in the output of a cell, with what is told of it."""

    def __init__(self, what: str, total: int, unit: Unit, clock: Callable[[], float]) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.values = 0, ""
        #: The first count and its time: the rate leaves out what was done before the bar was there.
        self.first: tuple[int, float] | None = None
        self._clock = clock
        self.began = self.drawn = clock()
        self.handle: Any = None

    @property
    def seconds(self) -> float:
        """Since it was added."""
        return self._clock() - self.began

    def told(self, ended: bool) -> str:
        """The line beside the bar, or in its place once the work has ended."""
        if not self.total:
            return f"{self.what}: {self.seconds:.1f} s" if ended else f"{self.what} …"
        done, total = self._amount(self.done), self._amount(self.total)
        if ended and self.done >= self.total:
            return f"{self.what}: {total} in {self.seconds:.1f} s{self._beside}"
        if ended:
            return f"{self.what}: ended after {done} of {total}{self._beside}"
        first, at = self.first or (0, self.began)
        seconds = self._clock() - at
        rate = (self.done - first) / seconds if seconds > 0 else 0.0
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate else ""
        return f"{self.what}: {done} of {total}, {self._amount(round(rate))}/s{left}{self._beside}"

    @property
    def _beside(self) -> str:
        return f" · {self.values}" if self.values else ""

    def _amount(self, count: int) -> str:
        return size_text(count) if self.unit == "bytes" else f"{count:,}"

    def bundle(self, ended: bool = False) -> dict[str, str]:
        """The output of the cell, for a page and for a terminal."""
        said = self.told(ended)
        value = f' value="{self.done}" max="{self.total}"' if self.total else ""
        bar = "" if ended else f'<progress style="width:16em;vertical-align:middle"{value}></progress> '
        style = "font-variant-numeric:tabular-nums;opacity:.85"
        return {"text/html": f'<div style="{style}">{bar}{escape(said)}</div>', "text/plain": said}


class _Notebook:
    """Bars by IPython's updatable displays. A bar becomes a line when its work has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def add(self, what: str, total: int, unit: Unit) -> _NotebookBar:
        from IPython.display import display

        bar = _NotebookBar(what, total, unit, self._clock)
        bar.handle = display(bar.bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        return bar

    def measure(self, bar: _NotebookBar, total: int, unit: Unit) -> None:
        bar.total, bar.unit = total, unit

    def update(self, bar: _NotebookBar, done: int, values: str) -> None:
        bar.done, bar.values = done, values
        if bar.first is None:
            bar.first = done, self._clock()
        now = self._clock()
        if now - bar.drawn >= NOTEBOOK_SECONDS:
            bar.drawn = now
            bar.handle.update(bar.bundle(), raw=True)

    def remove(self, bar: _NotebookBar) -> None:
        bar.handle.update(bar.bundle(ended=True), raw=True)

    def stop(self) -> None:
        pass
