"""Bytes that a session may have staged on the server: who gets them, and in which order.

There are two kinds. What commands carry ends by itself, so who asks for more of it waits. What an observed
run may tell is held until the run has ended, and one that pauses, or a loop, may end only when somebody takes
its values, who may be the very thread that asks for more: where one of these is under way, and there is no
room, asking fails. The second kind takes from the first only beyond a quarter of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from heliograph.core.feed import Feed
from heliograph.core.future import Outcome
from heliograph.core.gates import CreditGrant, OrderGate
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.sessions import Limits


def most_observed_bytes(limits: Limits) -> int:
    """What all observed runs and loops may hold together. So that others can go on, it is not all."""
    return limits.in_flight_bytes * 3 // 4


class Credit:
    """Bytes that are granted in the order of asking, first to the first open gate. Something larger than the
    limit goes alone. `settle` makes a grant done, whose shell is told later."""

    __slots__ = ("_gates", "_limit", "_settle", "_waiting", "held_bytes")

    def __init__(
        self,
        limit: Callable[[], int],
        gates: deque[OrderGate],
        settle: Callable[[Outcome, HeliographError | None], None],
    ) -> None:
        self._limit, self._gates, self._settle = limit, gates, settle
        self.held_bytes = 0
        self._waiting: deque[CreditGrant] = deque()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.held_bytes:,} of {self._limit():,}, {len(self._waiting)} wait>"

    def could_reserve(self, size_bytes: int, gate: OrderGate | None = None) -> bool:
        """Whether a grant would come at once."""
        queued = self._waiting and any(self._may_ask(grant.gate) for grant in self._waiting)
        return not queued and self._may_ask(gate) and self._has_room(size_bytes)

    def _may_ask(self, gate: OrderGate | None) -> bool:
        """What is behind an open gate must not hold credit that the gate's own commands wait for."""
        return not self._gates or gate is self._gates[0]

    def _has_room(self, size_bytes: int) -> bool:
        return self.held_bytes + size_bytes <= self._limit() or not self.held_bytes

    def ask(self, grant: CreditGrant) -> None:
        """Settles a grant now or later, or with the reason why that may be never."""
        if self.could_reserve(grant.size_bytes, grant.gate):
            self._take(grant)
            grant.settle()
        elif self._may_ask(grant.gate) and (refusal := self._refusal(grant)) is not None:
            grant.settle(refusal)
        else:
            self._waiting.append(grant)

    def _take(self, grant: CreditGrant) -> None:
        self.held_bytes += grant.size_bytes

    def _refusal(self, grant: CreditGrant) -> HeliographError | None:
        """Why what has no room now may have none for ever."""
        return None

    def withdraw(self, grant: CreditGrant) -> None:
        """Gives up a grant, whether it has come or not."""
        if not grant.done:
            self._waiting.remove(grant)
            self.share_out()
        elif grant.error is None:
            self.give_back(grant.size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Returns credit, which may settle the grants of others."""
        self.held_bytes -= size_bytes
        if self._waiting:
            self.share_out()

    def share_out(self) -> None:
        """Settles the grants that there is room for, or never will be."""
        for grant in [one for one in self._waiting if self._may_ask(one.gate)]:
            refusal = None
            if self._has_room(grant.size_bytes):
                self._take(grant)
            elif (refusal := self._refusal(grant)) is None:
                break
            self._waiting.remove(grant)
            self._settle(grant, refusal)

    def end(self, error: HeliographError) -> None:
        """The session is over: who waits fails with this error."""
        for grant in self._waiting:
            self._settle(grant, error)
        self._waiting.clear()
        self.held_bytes = 0


class ObservedGrant(CreditGrant):
    """Room for what a run tells, and for what its command carries."""

    __slots__ = ("feed",)

    def __init__(self, feed: Feed, inline_bytes: int, gate: OrderGate | None) -> None:
        super().__init__(feed.held_bytes + inline_bytes, gate)
        self.feed = feed


class ObservedCredit(Credit):
    """What observed runs hold, each until it has ended."""

    __slots__ = ("_feeds",)

    def __init__(
        self,
        limit: Callable[[], int],
        gates: deque[OrderGate],
        settle: Callable[[Outcome, HeliographError | None], None],
    ) -> None:
        super().__init__(limit, gates, settle)
        #: Of the runs that hold some, and how much.
        self._feeds: dict[Feed, int] = {}

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return max(0, self._limit() - self.held_bytes)

    def _take(self, grant: CreditGrant) -> None:
        assert isinstance(grant, ObservedGrant)
        super()._take(grant)
        self._feeds[grant.feed] = grant.size_bytes

    def _refusal(self, grant: CreditGrant) -> HeliographError | None:
        if not any(feed.may_wait for feed in self._feeds):
            return None
        return LimitExceededError(
            f"the observed runs and loops under way hold {self.held_bytes:,} bytes on the server; "
            f"{grant.size_bytes:,} more would pass the limit of {self._limit():,}",
            advice="take their taps, or cancel them",
        )

    def withdraw(self, grant: CreditGrant) -> None:
        assert isinstance(grant, ObservedGrant)
        if grant.done:
            self.ended(grant.feed)
        else:
            super().withdraw(grant)

    def ended(self, feed: Feed) -> None:
        """A run is over, or will never be sent. Idempotent."""
        self.give_back(self._feeds.pop(feed, 0))

    def end(self, error: HeliographError) -> None:
        super().end(error)
        self._feeds.clear()


class CreditCore:
    """What of a session's state credits are. The rest is `ClientCore`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Why the session ended; commands are refused with it.
        self.lost: HeliographError | None = None
        #: Those that are open, in order.
        self._gates: deque[OrderGate] = deque()
        most_bytes = most_observed_bytes(limits)
        self._observed = ObservedCredit(lambda: most_bytes, self._gates, self.settle)
        self._credit = Credit(self._most_carried_bytes, self._gates, self.settle)

    @abstractmethod
    def settle(self, outcome: Outcome, error: HeliographError | None = None) -> None:
        """Makes an outcome done, unless it is."""

    def _most_carried_bytes(self) -> int:
        """What commands may carry: what observed runs may tell lies in the quarter beside it, mostly."""
        limit = self.limits.in_flight_bytes
        # The server may still hold a transfer for a moment after it has reported the command.
        return limit - max(limit // 4, self._observed.held_bytes)

    def could_reserve(self, size_bytes: int, gate: OrderGate | None = None) -> bool:
        """Whether a grant would come at once. Something larger than the limit goes alone."""
        return self._credit.could_reserve(size_bytes, gate)

    def reserve(self, size_bytes: int, gate: OrderGate | None = None) -> CreditGrant:
        """Asks for bytes of credit; granted in the order of asking, first to the first open gate."""
        grant = CreditGrant(size_bytes, gate)
        if self.lost is not None:
            grant.settle(self.lost)
        else:
            self._credit.ask(grant)
        return grant

    def withdraw(self, grant: CreditGrant) -> None:
        """Gives up a grant, whether it has come or not."""
        if self.lost is None:
            self._credit.withdraw(grant)

    def give_back(self, size_bytes: int) -> None:
        """Returns credit, which may settle the grants of others."""
        if self.lost is None:
            self._credit.give_back(size_bytes)

    @property
    def free_observed_bytes(self) -> int:
        """What a run may have on its way here that is observed."""
        return self._observed.free_bytes

    def reserve_observed(self, feed: Feed, inline_bytes: int, gate: OrderGate | None = None) -> CreditGrant:
        """Asks for room for what a run tells and carries, which its end gives back. Fails with
        LimitExceededError where there is none and that may last until somebody takes what is told."""
        grant = ObservedGrant(feed, inline_bytes, gate)
        if self.lost is not None:
            grant.settle(self.lost)
        else:
            self._observed.ask(grant)
        return grant

    def withdraw_observed(self, grant: CreditGrant) -> None:
        """Gives up such a grant, whether it has come or not."""
        if self.lost is None:
            self._observed.withdraw(grant)
            self._credit.share_out()

    def _observed_ended(self, feed: Feed) -> None:
        if self.lost is None:
            self._observed.ended(feed)
            self._credit.share_out()
