"""The copies of a plan's memory: the number of its runs that may be in progress at once.

Any thread may use them, under the session's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heliograph_server.resources.handles import DeviceQueue
    from heliograph_server.session.protocol.dependencies import CommandState


class RunSlots:
    """The runs of a plan, or of plans that share memory: as many at once as there are copies of it.

    Runs take the copies in turn, and each waits for the previous run on its copy. With several
    copies, every copy has a queue of its own, so that a run need not wait for the work of the
    others.
    """

    def __init__(self, queues: Sequence[DeviceQueue] = ()) -> None:
        #: The queue of each copy. Empty: there is one copy, on its device's queue or the stream's.
        self.queues = tuple(queues)
        #: The plans that use these slots.
        self.holders = 0
        self._last: list[CommandState | None] = [None] * max(1, len(self.queues))
        self._next = 0

    def __repr__(self) -> str:
        return f"<RunSlots on {len(self._last)} copies, {sum(1 for _ in self.running())} runs in flight>"

    def next(self) -> int:
        """The copy for the next run."""
        slot, self._next = self._next, (self._next + 1) % len(self._last)
        return slot

    def enter(self, slot: int, state: CommandState) -> None:
        """Make a run wait for the previous one on its copy."""
        state.wait_for(self._last[slot])
        self._last[slot] = state

    def leave(self, slot: int, state: CommandState) -> bool:
        """Forget a retired run. Return True if no run is left."""
        if self._last[slot] is state:
            self._last[slot] = None
        return self.is_idle

    def running(self) -> Iterator[CommandState]:
        """The last run on each copy that is not over."""
        return (state for state in self._last if state is not None)

    @property
    def is_idle(self) -> bool:
        return self._last.count(None) == len(self._last)
