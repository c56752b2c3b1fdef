"""The copies of a plan's memory: how many of its runs may be under way at once.

Any thread, under the session's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heliograph_server.resources.handles import DeviceQueue
    from heliograph_server.session.protocol.dependencies import CommandState


class RunSlots:
    """The runs of a plan, or of plans that share memory: as many at once as there are copies of it.

    Runs take the copies in turns; each waits for the one before it on its copy. With several copies every
    copy has a queue of its own, so that a run need not wait for the work of the others.
    """

    def __init__(self, queues: Sequence[DeviceQueue] = ()) -> None:
        #: Of each copy; empty: there is one, and it runs on its device's queue or the stream's.
        self.queues = tuple(queues)
        #: Plans that run by these slots.
        self.holders = 0
        self._last: list[CommandState | None] = [None] * max(1, len(self.queues))
        self._next = 0

    def __repr__(self) -> str:
        return f"<RunSlots on {len(self._last)} copies, {sum(1 for _ in self.running())} runs in flight>"

    @property
    def overlap(self) -> bool:
        """Whether several runs may be under way at once."""
        return len(self._last) > 1

    def next(self) -> int:
        """The copy that the next run takes."""
        slot, self._next = self._next, (self._next + 1) % len(self._last)
        return slot

    def enter(self, slot: int, state: CommandState) -> None:
        """A run waits for the one before it on its copy."""
        state.wait_for(self._last[slot])
        self._last[slot] = state

    def leave(self, slot: int, state: CommandState) -> bool:
        """Forgets a retired run; whether it was the last one."""
        if self._last[slot] is state:
            self._last[slot] = None
        return self.is_idle

    def running(self) -> Iterator[CommandState]:
        """The last run on each copy, as long as it is not over."""
        return (state for state in self._last if state is not None)

    @property
    def is_idle(self) -> bool:
        return not any(self.running())
