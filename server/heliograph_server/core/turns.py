"""Whose turn it is on the memory of a plan: how many of its runs may be under way at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heliograph_server.core.handles import Lane
    from heliograph_server.core.ordering import Entry


class Turns:
    """The runs of a plan, or of plans that share memory: as many at once as there are copies of it.

    Runs take the copies in turns; each waits for the one before it on its copy. With several copies every
    copy has a lane of its own, so that a run need not wait for the work of the others.
    """

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        #: Of each copy; empty: there is one, and it runs on its device's lane or the stream's.
        self.lanes = tuple(lanes)
        #: Plans that run by these turns.
        self.holders = 0
        self._last: list[Entry | None] = [None] * max(1, len(self.lanes))
        self._next = 0

    def __repr__(self) -> str:
        return f"<Turns on {len(self._last)} copies, {sum(1 for _ in self.running())} runs in flight>"

    @property
    def overlap(self) -> bool:
        """Whether several runs may be under way at once."""
        return len(self._last) > 1

    def next(self) -> int:
        """The copy that the next run takes."""
        turn, self._next = self._next, (self._next + 1) % len(self._last)
        return turn

    def enter(self, turn: int, entry: Entry) -> None:
        """A run waits for the one before it on its copy."""
        entry.wait_for(self._last[turn])
        self._last[turn] = entry

    def leave(self, turn: int, entry: Entry) -> bool:
        """Forgets a retired run; whether it was the last one."""
        if self._last[turn] is entry:
            self._last[turn] = None
        return self.is_idle

    def running(self) -> Iterator[Entry]:
        """The last run on each copy, as long as it is not over."""
        return (entry for entry in self._last if entry is not None)

    @property
    def is_idle(self) -> bool:
        return not any(self.running())
