"""The heads of pools among the clients of a daemon that drains.

A head takes its values to other daemons meanwhile, and tells which of its sessions keep values
here. The daemon waits for that as for running work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from heliograph_proto import HAND_OVER
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import StayingSession
from heliograph_server.runtime.opening import printable
from heliograph_server.session.session import Session

if TYPE_CHECKING:
    from heliograph_server.runtime.host import Host

#: The most sessions of a head that stay, in one message.
MOST_STAYING = 1000
#: The most characters of a reason.
MOST_CHARACTERS = 500


class Heads:
    """The heads among a host's clients, and what they have told. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._told: WeakKeyDictionary[Session, tuple[StayingSession, ...]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Heads: {len(self._told)} have told what stays>"

    def begin(self) -> None:
        """Wait for all heads from now on: a drain begins."""
        with self._lock:
            self._told.clear()

    def tell(self, session: Session, staying: Sequence[StayingSession]) -> None:
        """A head tells which of its sessions keep values here. Raises LimitExceededError."""
        if len(staying) > MOST_STAYING:
            raise LimitExceededError(f"{len(staying)} sessions stay; {MOST_STAYING} are the most at once")
        clean = tuple(
            replace(one, client=printable(one.client), why=printable(one.why, MOST_CHARACTERS))
            for one in staying
        )
        with self._lock:
            self._told[session] = clean

    def waits_for(self, session: Session) -> bool:
        """True if a session is that of a head that has values here, or has not told so far."""
        owner = self._host.images.owners.get(session)
        if owner is None or HAND_OVER not in owner.features or session.closed is not None:
            return False
        with self._lock:
            return self._told.get(session) != ()

    @property
    def staying(self) -> tuple[StayingSession, ...]:
        """The sessions of heads whose values stay here so far."""
        with self._lock:
            return tuple(one for session, told in self._told.items() if not session.closed for one in told)
