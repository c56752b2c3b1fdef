"""A place where a session's bars are drawn, which tells tests what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from heliograph.core.progress.bars import ProgressBars


@dataclass
class SeenBar:
    """A bar, and the counts that it has shown."""

    what: str
    total: int
    unit: str
    done: list[int] = field(default_factory=list)
    is_there: bool = True


class SeenBars:
    """A display. The bars of all sessions with `bars` as their progress."""

    def __init__(self) -> None:
        self.all: list[SeenBar] = []
        #: Called after each update, from any thread.
        self.on_update: Callable[[], object] = lambda: None
        #: For `hg.connect(progress=...)`, which takes them though its type does not say so.
        self.bars: Any = ProgressBars(display=self)

    def counts(self) -> list[int]:
        """The counts of the newest bar of steps."""
        found = [one for one in self.all if one.unit == "steps"]
        return found[-1].done if found else []

    def add(self, what: str, total: int, unit: Any) -> SeenBar:
        self.all.append(SeenBar(what, total, unit))
        return self.all[-1]

    def measure(self, bar: SeenBar, total: int, unit: Any) -> None:
        bar.total, bar.unit = total, unit

    def update(self, bar: SeenBar, done: int, values: str) -> None:
        bar.done.append(done)
        self.on_update()

    def remove(self, bar: SeenBar) -> None:
        bar.is_there = False

    def stop(self) -> None:
        pass
