"""Decides for a link that broke when it is dialled again, and until when. Pure.

    there ── broke ──▸ away ── back ──▸ there
                       │  ▴
                       │  └─ failed: the next attempt, after a pause
                       └─ the time is used up ──▸ lost

Time without a connection counts until something arrives. So a link that is made again and again and
never carries anything ends, too. A refusal of the token is as a break, but for the first connection
of a link: tokens are renewed at the two daemons at different moments.
"""

from __future__ import annotations

from collections.abc import Callable

from heliograph.core.connection_state import pause_seconds

#: How long a link that broke is dialled for, unless the daemon's configuration says otherwise.
LEASE_SECONDS = 10.0
#: The longest pause between two attempts: runs wait meanwhile.
LONGEST_PAUSE_SECONDS = 0.5


class Redialling:
    """The breaks of one link. Times are those of one monotonic clock."""

    def __init__(self, seconds: float, chance: Callable[[], float]) -> None:
        """`seconds`: the time without a connection after which the other daemon is lost. `chance`
        returns a number from 0 to 1."""
        self._seconds, self._chance = seconds, chance
        #: When the connection broke; None while it is there.
        self._since: float | None = None
        #: Since something arrived: the time without a connection, but for the present break, and the
        #: attempts.
        self._spent = 0.0
        self._attempts = 0
        #: True once the other daemon answered.
        self.was_there = False

    def __repr__(self) -> str:
        return f"<Redialling {'there' if self._since is None else 'away'}, {self._attempts} attempts>"

    @property
    def is_away(self) -> bool:
        """True from a break until `back`."""
        return self._since is not None

    def may_mend(self, *, is_break: bool, is_refusal: bool) -> bool:
        """True if another connection may do what failed. `is_break`: the failure may only say that
        the connection broke. `is_refusal`: the token is not known."""
        return is_break or (is_refusal and (self.was_there or self.is_away))

    def broke(self, now: float) -> float | None:
        """Record that the connection, or the attempt to have another one, failed. Return the pause
        before the next attempt in seconds; None if the daemon is lost."""
        if self._since is None:
            self._since = now
        left = self._seconds - self._spent - (now - self._since)
        if left <= 0:
            return None
        self._attempts += 1
        if self._attempts == 1:
            return 0.0
        return min(left, pause_seconds(self._attempts - 1, self._chance(), LONGEST_PAUSE_SECONDS))

    def back(self, now: float) -> None:
        """Record that there is a connection again."""
        if self._since is not None:
            self._spent += now - self._since
        self._since, self.was_there = None, True

    def progressed(self) -> None:
        """Record that something arrived."""
        self.was_there = True
        self._spent, self._attempts = 0.0, 0
