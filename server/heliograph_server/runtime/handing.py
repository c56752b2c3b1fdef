"""Takes the values of sessions from members of the pool that drain to devices that remain.

member drains ─▸ a thread: each session's values go, between two commands ─▸ the member is told
                    │ something stays: it is tried again, and the member told why
                    └── until the member is gone, or drains no more
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliograph_proto import HAND_OVER
from heliograph_proto.devices import DeviceChange, MemberState, ReplacedDevice
from heliograph_proto.errors import HeliographError, SnapshotFailedError, UnsupportedError
from heliograph_proto.sessions import StayingSession
from heliograph_server.resources.failures import typed
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.runtime.heads import MOST_STAYING
from heliograph_server.session.session import Session
from heliograph_server.state.handover import HandedOver, hand_over, holds

if TYPE_CHECKING:
    from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: The time that commands under way have to end while a session begins no others: short, and now and
#: then longer, for a session whose pipeline is never empty otherwise.
SHORT_SECONDS, LONG_SECONDS = 0.5, 10.0
#: That time at the first attempt, at some after those that found commands under way, and at every
#: `LONG_ATTEMPTS`-th. At all others the session is only looked at, so that one with long runs is not
#: stopped most of the time.
HOLDS = {
    1: SHORT_SECONDS,
    5: SHORT_SECONDS,
    10: SHORT_SECONDS,
    20: LONG_SECONDS,
    40: SHORT_SECONDS,
    80: LONG_SECONDS,
    160: SHORT_SECONDS,
}
LONG_ATTEMPTS = 320
#: The pause between two looks, and the shortest and longest one after another error, which doubles.
PAUSE_SECONDS, STAYS_SECONDS, STAYS_LONGEST_SECONDS = 0.2, 2.0, 30.0
#: The time for which `close` waits for a thread.
CLOSE_SECONDS = 2 * LONG_SECONDS


class Handing:
    """The members of one host's pool that drain. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._changed = threading.Condition()
        #: The last of each member; an earlier one ends soon.
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Handing: {len(self._threads)} members drain>"

    def begin(self, change: MembershipChange) -> None:
        """A member drains: take everything from its devices."""
        with self._changed:
            if self._is_closed:
                return
            name = f"heliograph-handing-{change.member}"
            made = threading.Thread(target=self._run, args=(change,), name=name, daemon=True)
            self._threads[change.member] = made
            # `close` waits for the threads that it finds.
            made.start()

    def look(self) -> None:
        """Devices were lost, perhaps some that leave."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = list(self._threads.values())
        for one in threads:
            one.join(CLOSE_SECONDS)

    # On the thread of a member

    def _run(self, change: MembershipChange) -> None:
        taking, told = _Taking(self._host, change), None
        while self._goes_on(change):
            staying = taking.look()[:MOST_STAYING]
            # A message that was lost is sent again, or the member would wait for nothing.
            if staying != told and change.tell_staying(staying):
                told = staying
            with self._changed:
                self._changed.wait_for(lambda: not self._goes_on(change), PAUSE_SECONDS)

    def _goes_on(self, change: MembershipChange) -> bool:
        leaves = any(one.is_draining and one.lost is None for one in change.leaving)
        is_last = self._threads.get(change.member) is threading.current_thread()
        return leaves and is_last and not self._is_closed


@dataclass(slots=True)
class _Attempts:
    """The attempts to take the values of one session."""

    #: Why they stay, and no other attempt is made before a time.
    why: str = ""
    not_before: float = 0.0
    #: The number of attempts that found commands under way.
    busy: int = 0
    #: The pause after the next other error.
    pause_seconds: float = STAYS_SECONDS

    @property
    def hold_seconds(self) -> float:
        """The time for which the next one lets the session begin no command."""
        attempt = self.busy + 1
        return HOLDS.get(attempt, 0.0 if attempt % LONG_ATTEMPTS else LONG_SECONDS)

    def failed(self, error: HeliographError, seconds: float) -> None:
        """Note an error, after an attempt of some time."""
        self.why, pause = _words(error), PAUSE_SECONDS
        if isinstance(error, SnapshotFailedError):
            self.busy += 1
        else:
            pause, self.pause_seconds = (
                self.pause_seconds,
                min(2 * self.pause_seconds, STAYS_LONGEST_SECONDS),
            )
        self.not_before = time.monotonic() + max(pause, seconds)


class _Taking:
    """The values on one member that drains."""

    def __init__(self, host: Host, change: MembershipChange) -> None:
        self._host, self._member, self._leaving = host, change.member, change.leaving
        #: By the session's number.
        self._attempts: dict[int, _Attempts] = {}

    def look(self) -> tuple[StayingSession, ...]:
        """Take what can go now. Return the sessions that keep values there. Blocks."""
        sessions = [one for one in self._host.sessions if one.closed is None]
        # Those at rest do not wait for the others.
        sessions.sort(key=_is_at_work)
        is_final = not self._has_others()
        found = [(one, self._take(one, is_final=is_final)) for one in sessions]
        return tuple(StayingSession(one.number, one.client, why, is_final) for one, why in found if why)

    def _has_others(self) -> bool:
        """True if a device is there, or may come back, that could take something."""
        away = {name for one in self._host.members if one.state is MemberState.AWAY for name in one.devices}
        names = {one.name for one in self._leaving}
        others = [one for one in self._host.devices if one.name not in names and one.lost is None]
        return any(one.name in away or not one.is_draining for one in others)

    def _take(self, session: Session, *, is_final: bool) -> str:
        """Take the values of a session. Return why they stay, or nothing."""
        names = {one.name for one in self._leaving}
        if not holds(session, names):
            self._attempts.pop(session.number, None)
            return ""
        attempts = self._attempts.setdefault(session.number, _Attempts())
        logged, began = attempts.why, time.monotonic()
        if is_final:
            attempts.why, attempts.not_before = _words(no_others()), 0.0
            return self._stays(session, attempts, logged)
        if began < attempts.not_before:
            return attempts.why
        try:
            self._try_to_take(session, attempts.hold_seconds)
        except Exception as error:
            failure = typed(error, "taking values from a member that drains")
            if session.closed is not None:
                return ""
            attempts.failed(failure, time.monotonic() - began)
            return self._stays(session, attempts, logged)
        return ""

    def _stays(self, session: Session, attempts: _Attempts, logged: str) -> str:
        """Log why the values of a session stay, unless that was logged, and return it."""
        if attempts.why != logged:
            message = "%s keeps what it has on member %s, which drains: %s"
            logger.warning(message, session, self._member, attempts.why, extra=session.log_fields)
        return attempts.why

    def _try_to_take(self, session: Session, hold_seconds: float) -> None:
        if _is_of_head(self._host, session):
            raise UnsupportedError("its client is a head, which knows these devices")
        snapshots = self._host.snapshots
        with nullcontext() if snapshots is None else snapshots.paused(session):
            found = hand_over(session, self._leaving, hold_seconds)
        if found is not None:
            self._tell(session, found)
        if found is not None and snapshots is not None and snapshots.covers(session):
            # The image before names devices that are about to go.
            snapshots.take(session)

    def _tell(self, session: Session, found: HandedOver) -> None:
        """Tell the log and the client."""
        replaced = tuple(ReplacedDevice(*one) for one in found.places.items())
        host = self._host
        change = DeviceChange(
            self._member, daemons=host.daemons, draining=host.is_draining, replaced=replaced
        )
        session.tell_devices(change)
        places = ", ".join(f"{old} to {new}" for old, new in found.places.items())
        message = "%s went from %s: %d bytes and %d plans, in %.2f s"
        facts = session, places, found.size_bytes, found.plans, found.still_seconds
        logger.info(message, *facts, extra=session.log_fields)


def no_others() -> UnsupportedError:
    """The error of values that no device can take."""
    return UnsupportedError(
        "every other device of the pool drains, too, so nothing can take it",
        advice="undo a drain, or drain members one after the other",
    )


def _is_at_work(session: Session) -> bool:
    with session.inside.lock:
        return not session.inside.executor.is_at_rest


def _is_of_head(host: Host, session: Session) -> bool:
    owner = host.images.owners.get(session)
    return owner is not None and HAND_OVER in owner.features


def _words(error: HeliographError) -> str:
    """The reason, and what its client can do."""
    return f"{error.message}; {error.advice}" if error.advice else error.message
