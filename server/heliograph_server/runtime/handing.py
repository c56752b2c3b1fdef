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
from typing import TYPE_CHECKING

from heliograph_proto import HAND_OVER
from heliograph_proto.devices import DeviceChange, ReplacedDevice
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

#: The time that commands under way have to end, at each attempt.
STILL_SECONDS = 10.0
#: The pauses between two looks: while commands are under way, and while nothing else helps soon.
BUSY_PAUSE_SECONDS, STAYS_PAUSE_SECONDS = 0.2, 2.0
#: The time for which `close` waits for a thread.
CLOSE_SECONDS = 2 * STILL_SECONDS


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
                self._changed.wait_for(lambda: not self._goes_on(change), taking.pause_seconds)

    def _goes_on(self, change: MembershipChange) -> bool:
        leaves = any(one.is_draining and one.lost is None for one in change.leaving)
        is_last = self._threads.get(change.member) is threading.current_thread()
        return leaves and is_last and not self._is_closed


class _Taking:
    """The values on one member that drains."""

    def __init__(self, host: Host, change: MembershipChange) -> None:
        self._host, self._member, self._leaving = host, change.member, change.leaving
        #: By the session's number: the reason that was logged, and the time of the next attempt.
        self._logged: dict[int, str] = {}
        self._not_before: dict[int, float] = {}
        self._why: dict[int, str] = {}
        self.pause_seconds = BUSY_PAUSE_SECONDS

    def look(self) -> tuple[StayingSession, ...]:
        """Take what can go now. Return the sessions that keep values there. Blocks."""
        sessions = [one for one in self._host.sessions if one.closed is None]
        found = [(one, self._take(one)) for one in sessions]
        return tuple(StayingSession(one.number, one.client, why) for one, why in found if why)

    def _take(self, session: Session) -> str:
        """Take the values of a session. Return why they stay, or nothing."""
        names = {one.name for one in self._leaving}
        if not holds(session, names):
            return ""
        if time.monotonic() < self._not_before.get(session.number, 0.0):
            return self._why[session.number]
        try:
            why = self._try_to_take(session)
        except Exception as error:
            failure = typed(error, "taking values from a member that drains")
            if session.closed is not None:
                return ""
            why, pause = _words(failure), STAYS_PAUSE_SECONDS
            if isinstance(failure, SnapshotFailedError):
                pause = BUSY_PAUSE_SECONDS
            self._not_before[session.number] = time.monotonic() + pause
        if why and self._logged.get(session.number) != why:
            message = "%s keeps what it has on member %s, which drains: %s"
            logger.warning(message, session, self._member, why, extra=session.log_fields)
        self._logged[session.number] = self._why[session.number] = why
        return why

    def _try_to_take(self, session: Session) -> str:
        if _is_of_head(self._host, session):
            raise UnsupportedError("its client is a head, which knows these devices")
        snapshots = self._host.snapshots
        with nullcontext() if snapshots is None else snapshots.paused(session):
            found = hand_over(session, self._leaving, STILL_SECONDS)
        if found is not None:
            self._tell(session, found)
        if found is not None and snapshots is not None and snapshots.covers(session):
            # The image before names devices that are about to go.
            snapshots.take(session)
        return ""

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


def _is_of_head(host: Host, session: Session) -> bool:
    owner = host.images.owners.get(session)
    return owner is not None and HAND_OVER in owner.features


def _words(error: HeliographError) -> str:
    """The reason, and what its client can do."""
    return f"{error.message}; {error.advice}" if error.advice else error.message
