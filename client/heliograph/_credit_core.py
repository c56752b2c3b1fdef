"""Bytes that a session may have on the server: the part of the client's protocol that grants them."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from heliograph._credit import Credit, ObservedCredit, ObservedGrant, most_observed_bytes
from heliograph._feed import Feed
from heliograph._gates import Gate, Grant
from heliograph._outcome import Outcome
from heliograph_proto.errors import HeliographError
from heliograph_proto.limits import Limits


class CreditCore:
    """What of a session's state credits are. The rest is `ClientCore`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Why the session ended; commands are refused with it.
        self.lost: HeliographError | None = None
        #: Those that are open, in order.
        self._gates: deque[Gate] = deque()
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

    def could_reserve(self, size_bytes: int, gate: Gate | None = None) -> bool:
        """Whether a grant would come at once. Something larger than the limit goes alone."""
        return self._credit.could_reserve(size_bytes, gate)

    def reserve(self, size_bytes: int, gate: Gate | None = None) -> Grant:
        """Asks for bytes of credit; granted in the order of asking, first to the first open gate."""
        grant = Grant(size_bytes, gate)
        if self.lost is not None:
            grant.settle(self.lost)
        else:
            self._credit.ask(grant)
        return grant

    def withdraw(self, grant: Grant) -> None:
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

    def reserve_observed(self, feed: Feed, inline_bytes: int, gate: Gate | None = None) -> Grant:
        """Asks for room for what a run tells and carries, which its end gives back. Fails with
        LimitExceededError where there is none and that may last until somebody takes what is told."""
        grant = ObservedGrant(feed, inline_bytes, gate)
        if self.lost is not None:
            grant.settle(self.lost)
        else:
            self._observed.ask(grant)
        return grant

    def withdraw_observed(self, grant: Grant) -> None:
        """Gives up such a grant, whether it has come or not."""
        if self.lost is None:
            self._observed.withdraw(grant)
            self._credit.share_out()

    def _observed_ended(self, feed: Feed) -> None:
        if self.lost is None:
            self._observed.ended(feed)
            self._credit.share_out()
