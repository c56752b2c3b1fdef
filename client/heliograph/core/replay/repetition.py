"""The commands that leave again after an attach, and the plans made again between them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from heliograph.core.future import Outcome, Pending
from heliograph.core.replay.journal import MadePlan, Step
from heliograph.core.sizes import size_of
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.errors import HeliographError, UnavailableError


class Repetition:
    """Commands and plans in their order. `settle` makes an outcome done."""

    def __init__(self, settle: Callable[[Outcome, HeliographError | None], None]) -> None:
        self._settle = settle
        self._left: deque[Pending | Step] = deque()
        #: True until a restarted server has every command and plan again.
        self.is_of_restart = False
        #: The last command that left, and the last that is done with all before it.
        self._left_through = self._done_through = 0

    def __len__(self) -> int:
        return len(self._left)

    @property
    def may_leave(self) -> bool:
        """True if the next one is a command."""
        return bool(self._left) and not isinstance(self._left[0], MadePlan)

    def begin(self, steps: Iterable[Pending | Step], after: int) -> None:
        """Begin with the commands after one that the server has."""
        self._left = deque(steps)
        self._left_through = self._done_through = after
        self._look()

    def take(self, most_bytes: int) -> list[c.Command | InlineRun]:
        """Return the next commands, up to a plan, in a message of about this size."""
        taken: list[c.Command | InlineRun] = []
        while self._left and (not taken or most_bytes > 0):
            one = self._left[0]
            if isinstance(one, MadePlan):
                break
            self._left.popleft()
            most_bytes -= size_of(one.kind)
            if isinstance(kind := one.kind, InlineRun):
                taken.append(kind)
            else:
                taken.append(c.Command(one.sequence, kind, one.stream, one.notify, one.timeout_ms))
            self._left_through = kind.through if isinstance(kind, c.Skip) else one.sequence
        self._look()
        return taken

    def done(self, through: int) -> None:
        """Record that every command up to a number is done."""
        self._done_through = max(self._done_through, through)
        if self._left:
            self._look()

    def plan(self) -> MadePlan | None:
        """Return the plan that is made again next, once it is due; None without one."""
        return next((one for one in self._left if isinstance(one, MadePlan)), None)

    def made(self, made: MadePlan) -> None:
        """Go on after a plan was made again."""
        assert self._left and self._left[0] is made, "plans are made again in order"
        self._left.popleft()
        self._look()

    def _look(self) -> None:
        """Settle the outcome of a plan whose turn has come: all before it was done again."""
        made = self._left[0] if self._left else None
        if isinstance(made, MadePlan) and self._done_through >= self._left_through:
            self._settle(made.due, None)

    def broke(self) -> None:
        """Record that the connection broke again."""
        for one in self._left:
            if isinstance(one, MadePlan):
                self._settle(one.due, UnavailableError("the connection broke again"))

    def clear(self) -> None:
        """Forget everything, at the end of the session."""
        self._left.clear()
