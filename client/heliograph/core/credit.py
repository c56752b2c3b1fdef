"""Flow control: the bytes that a session may have staged on the server, the order of grants, and
the memory that both share.

There are two kinds of credit. Commands give their credit back when they complete, so a request for
more of it waits. An observed run holds its credit until it has ended. A run that pauses, or a loop,
may end only when its values are read, possibly by the thread that requests more. So a request fails
if such a run is in progress and there is no room. Observed runs reduce the credit of commands only
beyond a quarter of the total.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from heliograph.core.feed import Feed
from heliograph.core.future import ALONE, Outcome, Pending
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.sessions import Limits

if TYPE_CHECKING:
    from heliograph.transport.shared_memory import SharedSpace


def most_observed_bytes(limits: Limits) -> int:
    """Return the most bytes that all observed runs and loops may hold together.

    It is less than the limit, so that other work can go on.
    """
    return limits.in_flight_bytes * 3 // 4


class OrderGate:
    """A place in the outbox for commands that come later; commands queued after it wait."""

    __slots__ = ("closed", "queue")

    def __init__(self) -> None:
        self.queue: deque[Pending] = deque()
        self.closed = False


class CreditGrant(Outcome):
    """A request for a number of bytes of credit."""

    __slots__ = ("gate", "size_bytes")

    def __init__(self, size_bytes: int, gate: OrderGate | None) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.gate = gate


class Credit:
    """Bytes that are granted in the order of requests, first to the first open gate.

    A request larger than the limit is granted when nothing else is held. `settle` makes a grant
    done; the shell fires it later.
    """

    __slots__ = ("_ended", "_gates", "_limit", "_settle", "_waiting", "held_bytes")

    def __init__(
        self,
        limit: Callable[[], int],
        gates: deque[OrderGate],
        settle: Callable[[Outcome, HeliographError | None], None],
    ) -> None:
        self._limit, self._gates, self._settle = limit, gates, settle
        self.held_bytes = 0
        self._waiting: deque[CreditGrant] = deque()
        #: The error of later requests, once the session has ended.
        self._ended: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.held_bytes:,} of {self._limit():,}, {len(self._waiting)} wait>"

    def could_reserve(self, size_bytes: int, gate: OrderGate | None = None) -> bool:
        """True if a grant would come at once."""
        queued = self._waiting and any(self._may_ask(grant.gate) for grant in self._waiting)
        return not queued and self._may_ask(gate) and self._has_room(size_bytes)

    def _may_ask(self, gate: OrderGate | None) -> bool:
        """True unless an earlier gate is open: its own commands may need the credit."""
        return not self._gates or gate is self._gates[0]

    def _has_room(self, size_bytes: int) -> bool:
        return self.held_bytes + size_bytes <= self._limit() or not self.held_bytes

    def reserve(self, size_bytes: int, gate: OrderGate | None = None) -> CreditGrant:
        """Request bytes of credit, granted in order, to the first open gate first."""
        grant = CreditGrant(size_bytes, gate)
        self.ask(grant)
        return grant

    def ask(self, grant: CreditGrant) -> None:
        """Settle a grant now or later, or with an error if it might never be granted."""
        if self._ended is not None:
            grant.settle(self._ended)
        elif self.could_reserve(grant.size_bytes, grant.gate):
            self._take(grant)
            grant.settle()
        elif self._may_ask(grant.gate) and (refusal := self._refusal(grant)) is not None:
            grant.settle(refusal)
        else:
            self._waiting.append(grant)

    def _take(self, grant: CreditGrant) -> None:
        self.held_bytes += grant.size_bytes

    def _refusal(self, grant: CreditGrant) -> HeliographError | None:
        """Return the error for a request that might never have room, or None."""
        return None

    def withdraw(self, grant: CreditGrant) -> None:
        """Give up a grant, granted or not."""
        if grant.done:
            if grant.error is None:
                self.give_back(grant.size_bytes)
        elif self._ended is None:
            self._waiting.remove(grant)
            self.share_out()

    def give_back(self, size_bytes: int) -> None:
        """Return credit, which may settle waiting grants."""
        if self._ended is None:
            self.held_bytes -= size_bytes
            if self._waiting:
                self.share_out()

    def share_out(self) -> None:
        """Settle the grants for which there is room, and those that might never have any."""
        for grant in [one for one in self._waiting if self._may_ask(one.gate)]:
            refusal = None
            if self._has_room(grant.size_bytes):
                self._take(grant)
            elif (refusal := self._refusal(grant)) is None:
                break
            self._waiting.remove(grant)
            self._settle(grant, refusal)

    def end(self, error: HeliographError) -> None:
        """End the session: waiting requests fail with this error."""
        self._ended = error
        for grant in self._waiting:
            self._settle(grant, error)
        self._waiting.clear()
        self.held_bytes = 0


class ObservedGrant(CreditGrant):
    """Room for the values that a run reports and for the data of its command."""

    __slots__ = ("feed",)

    def __init__(self, feed: Feed, inline_bytes: int, gate: OrderGate | None) -> None:
        super().__init__(feed.held_bytes + inline_bytes, gate)
        self.feed = feed


class ObservedCredit(Credit):
    """Credit that observed runs hold until they have ended."""

    __slots__ = ("_feeds",)

    def __init__(
        self,
        limit: Callable[[], int],
        gates: deque[OrderGate],
        settle: Callable[[Outcome, HeliographError | None], None],
    ) -> None:
        super().__init__(limit, gates, settle)
        #: The bytes that each run holds.
        self._feeds: dict[Feed, int] = {}

    @property
    def free_bytes(self) -> int:
        """The bytes that no run holds."""
        return max(0, self._limit() - self.held_bytes)

    def _take(self, grant: CreditGrant) -> None:
        assert isinstance(grant, ObservedGrant)
        super()._take(grant)
        self._feeds[grant.feed] = grant.size_bytes

    def _refusal(self, grant: CreditGrant) -> HeliographError | None:
        if not any(feed.may_wait for feed in self._feeds):
            return None
        return LimitExceededError(
            f"the observed runs and loops in progress hold {self.held_bytes:,} bytes on the server; "
            f"{grant.size_bytes:,} more would pass the limit of {self._limit():,}",
            advice="read their taps, or cancel them",
        )

    def withdraw(self, grant: CreditGrant) -> None:
        assert isinstance(grant, ObservedGrant)
        if grant.done:
            self.ended(grant.feed)
        else:
            super().withdraw(grant)

    def ended(self, feed: Feed) -> None:
        """Give back the credit of a run that has ended or will never be sent. Idempotent."""
        self.give_back(self._feeds.pop(feed, 0))

    def end(self, error: HeliographError) -> None:
        super().end(error)
        self._feeds.clear()


class CreditCore:
    """The credit of a session: the part of `ClientCore` that accounts for it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: The reason why the session ended; commands are refused with it.
        self.lost: HeliographError | None = None
        #: The open gates, in order.
        self._gates: deque[OrderGate] = deque()
        most_bytes = most_observed_bytes(limits)
        self._observed = ObservedCredit(lambda: most_bytes, self._gates, self.settle)
        #: The credit of commands.
        self.credit = Credit(self._most_carried_bytes, self._gates, self.settle)

    @abstractmethod
    def settle(self, outcome: Outcome, error: HeliographError | None = None) -> None:
        """Make an outcome done, unless it is already."""

    def _most_carried_bytes(self) -> int:
        """Return the bytes for commands: the limit without a quarter, or what observed runs
        hold.
        """
        limit = self.limits.in_flight_bytes
        # The server may still hold a transfer for a moment after it has reported the command.
        return limit - max(limit // 4, self._observed.held_bytes)

    @property
    def free_observed_bytes(self) -> int:
        """The bytes of values that an observed run may have on their way."""
        return self._observed.free_bytes

    def reserve_observed(self, feed: Feed, inline_bytes: int, gate: OrderGate | None = None) -> CreditGrant:
        """Request room for the values that a run reports and for its data, until the run ends.

        Fails with LimitExceededError if there is no room and that might last until values are read.
        """
        grant = ObservedGrant(feed, inline_bytes, gate)
        self._observed.ask(grant)
        return grant

    def withdraw_observed(self, grant: CreditGrant) -> None:
        """Give up such a grant, granted or not."""
        self._observed.withdraw(grant)
        self.credit.share_out()

    def _observed_ended(self, feed: Feed) -> None:
        self._observed.ended(feed)
        self.credit.share_out()


class SharingCore(CreditCore):
    """The shared memory of a session, and its end when the session moves."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: Memory that the server maps as well, and the reason if there is none.
        self.shared: SharedSpace | None = None
        self.why_not_shared = ALONE
        #: Such memory of which no more is taken, since the session is about to move.
        self._left: SharedSpace | None = None

    def check(self) -> None:
        """Raise the error that ended the session."""
        if self.lost is not None:
            raise self.lost.at(self.lost.origin)

    def set_shared(self, found: SharedSpace | str) -> None:
        """Set the memory that the server maps as well, or the reason why there is none."""
        if isinstance(found, str):
            self.why_not_shared = found
        else:
            self.shared, self.why_not_shared = found, ""

    def space(self) -> SharedSpace:
        """Return the memory of a slot in use. Raises the error that ended the session."""
        self.check()
        space = self.shared or self._left
        assert space is not None
        return space

    def give_slot(self, slot: int, behind: Pending | None = None) -> None:
        """Free a slot of shared memory: now, or when a command has ended that may still use it."""
        if behind is not None and not behind.done:
            behind.slot = slot
        elif (space := self.shared or self._left) is not None:
            space.give(slot)

    # Moves

    @property
    def holds_nothing(self) -> bool:
        """True if no bytes are on their way, and no slot of shared memory is in use."""
        space = self.shared or self._left
        return not self.credit.held_bytes and (space is None or space.is_free)

    def stop_sharing(self, why: str) -> None:
        """Take no more of the shared memory; that in use stays until it is given back."""
        if self.shared is not None:
            self._left, self.shared, self.why_not_shared = self.shared, None, why

    def share_again(self) -> None:
        """Undo `stop_sharing`."""
        if self._left is not None and self.lost is None:
            self.shared, self._left, self.why_not_shared = self._left, None, ""

    def leave_shared(self, why: str) -> None:
        """Forget the shared memory, since another daemon has the session."""
        if self.shared is not None or self._left is not None:
            self.why_not_shared = why
        self.shared = self._left = None
