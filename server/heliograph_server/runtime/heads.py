"""The heads of pools among the clients of a daemon that drains.

A head takes its values to other daemons meanwhile, and tells which of its sessions keep values
here. The daemon waits for that as for running work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from heliograph_proto import HAND_OVER
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.sessions import StayingSession
from heliograph_server.runtime.opening import printable
from heliograph_server.session.session import Session

if TYPE_CHECKING:
    from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: The most sessions that stay, in a head's message and in a drain's status.
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
        """A head tells which of its sessions keep values here. Nothing is kept without a drain.

        Raises InvalidArgumentError for a session that is not a head's, and LimitExceededError.
        """
        if not self._hands_over(session):
            raise InvalidArgumentError(
                f'this session has not the feature "{HAND_OVER}"', advice="open it with that, as heads do"
            )
        if len(staying) > MOST_STAYING:
            raise LimitExceededError(f"{len(staying)} sessions stay; {MOST_STAYING} are the most at once")
        if not self._host.is_draining:
            return
        clean = tuple(
            replace(one, client=printable(one.client), why=printable(one.why, MOST_CHARACTERS))
            for one in staying
        )
        with self._lock:
            before = self._told.get(session, ())
            self._told[session] = clean
        for one in clean:
            if one.final and one not in before:
                message = "session %d of %s at the pool's head has values here that end with this daemon: %s"
                logger.warning(message, one.number, one.client, one.why)

    def waits_for(self, session: Session) -> bool:
        """True if a session is that of a head that has values here which may go, or has not told so
        far."""
        if not self._hands_over(session) or session.closed is not None:
            return False
        with self._lock:
            told = self._told.get(session)
        return told is None or not all(one.final for one in told)

    def _hands_over(self, session: Session) -> bool:
        owner = self._host.images.owners.get(session)
        return owner is not None and HAND_OVER in owner.features

    @property
    def staying(self) -> tuple[StayingSession, ...]:
        """The sessions of heads whose values stay here so far, at most `MOST_STAYING` of all. None
        without a drain."""
        if not self._host.is_draining:
            return ()
        with self._lock:
            told = [told for session, told in self._told.items() if not session.closed]
        return tuple(islice(chain.from_iterable(told), MOST_STAYING))
