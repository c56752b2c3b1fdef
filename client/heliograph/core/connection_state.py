"""The connection of a session: connected, disconnected, attaching or lost. Pure.

Events go in with their time; each returns what the shell does next:

    connected ── broke ──▸ disconnected ── dialling ──▸ attaching ── attached ──▸ connected
                                ▴                           │
                                └────────── failed ─────────┘
    any of them ── another daemon has the session ──▸ disconnected, and dials that one
    any of them ── the lease's end, a refusal, `close` ──▸ lost
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from heliograph_proto.errors import (
    DrainingError,
    HeliographError,
    MovedError,
    SessionClosedError,
    UnavailableError,
)

#: The pause before the second attempt; it doubles from one to the next, up to the longest.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
#: The part of a pause that chance takes off, so that many clients do not come at once.
JITTER = 0.5
#: The most daemons to which a session goes before it is attached to one.
MOST_FOLLOWED = 16


def pause_seconds(attempts: int, chance: float, longest: float = LONGEST_PAUSE_SECONDS) -> float:
    """Return the pause after so many failed attempts. `chance`: a number from 0 to 1."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 16), longest) * (1 - JITTER * chance)


class ConnectionState(Enum):
    """The state of a session's connection."""

    CONNECTED = "connected"
    #: It broke, and the next attempt waits for its time.
    DISCONNECTED = "disconnected"
    #: An attempt is under way.
    ATTACHING = "attaching"
    #: The session has ended.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect and attach, after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Connect to another daemon, which has the session, and attach there."""

    moved: MovedError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the session with an error."""

    error: HeliographError


class Reconnecting:
    """Decides when to attach again, and when to give up."""

    def __init__(self, seconds: float, chance: Callable[[], float]) -> None:
        """`seconds`: the time for which it tries after a break; 0: not at all. `chance` returns a
        number from 0 to 1."""
        self.seconds, self._chance = seconds, chance
        #: True if another incarnation of the daemon may have the session.
        self.is_durable = False
        self.longest_pause_seconds = LONGEST_PAUSE_SECONDS
        self.state = ConnectionState.CONNECTED
        #: The breaks so far, and the attempts since the last one.
        self.breaks = self.attempts = 0
        #: The daemons to which it went since it was attached.
        self.followed = 0
        #: The last break: when, and its error.
        self.broke_at = 0.0
        self.error: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Reconnecting {self.state.value}, {self.breaks:,} breaks>"

    @property
    def is_down(self) -> bool:
        """True while the session has no connection and may get one."""
        return self.state in (ConnectionState.DISCONNECTED, ConnectionState.ATTACHING)

    def left(self, now: float) -> float:
        """The seconds until it gives up, while it is down."""
        return max(0.0, self.broke_at + self.seconds - now)

    def broke(self, error: HeliographError, now: float, *, has_died: bool = False) -> Dial | Follow | GiveUp:
        """Record that the connection, or the attempt to have another one, ended with an error.

        `has_died`: the daemon is known to have ended, and with it a session that is not durable.
        """
        if isinstance(error, MovedError) and self.seconds and self.state is not ConnectionState.LOST:
            return self._moved(error, now)
        if has_died and not self.is_durable:
            return self._give_up(self.error or error)
        if self.is_down:
            return self._failed(error, now)
        # A daemon that ends has a durable session on its disk.
        may_return = is_break(error) or (self.is_durable and isinstance(error, DrainingError))
        if self.state is ConnectionState.LOST or not self.seconds or not may_return:
            return self._give_up(error)
        self.state = ConnectionState.DISCONNECTED
        self.breaks += 1
        self.attempts, self.broke_at, self.error = 0, now, error
        return Dial(0.0)

    def _moved(self, error: MovedError, now: float) -> Follow | GiveUp:
        if self.followed >= MOST_FOLLOWED:
            return self._give_up(
                UnavailableError(f"{MOST_FOLLOWED} daemons have sent the session to another one")
            )
        self.followed += 1
        self.breaks += not self.is_down
        self.state = ConnectionState.DISCONNECTED
        self.attempts, self.broke_at, self.error = 0, now, error
        return Follow(error)

    def _failed(self, error: HeliographError, now: float) -> Dial | GiveUp:
        is_refused = not is_break(error) and not isinstance(error, DrainingError)
        if is_refused or not self.left(now):
            return self._give_up(self._refusal(error) if is_refused else self._late(error))
        self.state = ConnectionState.DISCONNECTED
        pause = pause_seconds(self.attempts, self._chance(), self.longest_pause_seconds)
        return Dial(min(pause, self.left(now)))

    def _refusal(self, error: HeliographError) -> HeliographError:
        if not isinstance(error, SessionClosedError) or self.error is None:
            return error
        return SessionClosedError(
            f"{self.error.message}; and the session was gone afterwards: {error.message}",
            advice=self.error.advice or error.advice,
        )

    def _late(self, error: HeliographError) -> HeliographError:
        return UnavailableError(
            f"{error.message}; no connection for {self.seconds:g} s, the session's lease",
            advice="all data of the session is gone; connect again, compile and run",
        )

    def _give_up(self, error: HeliographError) -> GiveUp:
        self.state = ConnectionState.LOST
        return GiveUp(error)

    def dialling(self) -> None:
        """Record that an attempt begins."""
        self.state = ConnectionState.ATTACHING
        self.attempts += 1

    def attached(self) -> None:
        """Record that the session has a connection again."""
        self.followed = 0
        self.state = ConnectionState.CONNECTED

    def close(self) -> None:
        """Record the end of the session."""
        self.state = ConnectionState.LOST


def is_break(error: HeliographError) -> bool:
    """True if an error tells only of a connection: the session may still be there."""
    return isinstance(error, UnavailableError)
