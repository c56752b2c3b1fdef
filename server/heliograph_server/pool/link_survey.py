"""The ways between members, measured in the background once both are there: what placement and relays go by.

    a member joins ─▸ pairs that nobody measured ─▸ each asked in its turn: round trip, bandwidth, or no way

One pair at a time and a few megabytes each, so that whoever works already hardly notices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from heliograph_proto.errors import HeliographError
from heliograph_server.pool.member import Member

logger = logging.getLogger(__name__)

#: What a measurement of bandwidth carries each way.
PROBE_BYTES = 2 * 2**20
#: Round trips from here to a member, of which the shortest counts.
TRIPS = 4
TRIP_SECONDS = 2.0
#: How long the end waits for the measurement that is under way.
CLOSE_SECONDS = 4.0
#: The site of this process's own devices.
HERE = ""


class LinkObserver(Protocol):
    """Who wants to know; `heliograph_server.resources.measurements.Measurements` is one. Thread-safe."""

    def note_link(self, a: str, b: str, round_trip_s: float, bytes_per_s: float = 0.0) -> None:
        """The way between two sites takes so long there and back, and carries so much; 0: not known."""

    def forget_site(self, name: str) -> None:
        """A site is gone."""


class LinkSurvey:
    """A thread that measures as long as there is something new. `members`: those that are ready."""

    def __init__(self, members: Callable[[], Sequence[Member]], links: LinkObserver) -> None:
        self._members = members
        self._links = links
        self._changed = threading.Event()
        self._closed = False
        #: Pairs of lives that were asked, and those of them that found a way.
        self._asked: set[tuple[bytes, bytes]] = set()
        self._found: set[tuple[bytes, bytes]] = set()
        self._thread = threading.Thread(target=self._run, name="heliograph-survey", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Surveyor, {len(self._asked)} ways asked>"

    def look(self) -> None:
        """Members came or are gone."""
        self._changed.set()

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._closed = True
        self._changed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self._forget()
            for one, other in self._pairs():
                if self._closed:
                    return
                self._asked.add((one.incarnation, other.incarnation if other is not None else b""))
                try:
                    self._measure(one, other)
                except HeliographError as error:
                    # It is lost, or on its way to that.
                    logger.debug("no measurement from %s: %s", one.name, error.message)
                except Exception:
                    logger.exception("a way from %s could not be measured", one.name)
            if self._closed:
                return

    def _forget(self) -> None:
        """Lives that are over are not asked again."""
        lives = {one.incarnation for one in self._members()} | {b""}
        self._asked = {pair for pair in self._asked if lives.issuperset(pair)}
        self._found &= self._asked

    def _pairs(self) -> Iterator[tuple[Member, Member | None]]:
        """Those that nobody asked yet; None: this process. First the ways from here, which cost least."""
        while not self._closed:
            members = self._members()
            wanted = [(one, None) for one in members if (one.incarnation, b"") not in self._asked]
            found: Sequence[tuple[Member, Member | None]] = wanted or [
                (one, other)
                for one in members
                for other in members
                if one is not other and (one.incarnation, other.incarnation) not in self._asked
            ]
            if not found:
                return
            yield found[0]

    def _measure(self, one: Member, other: Member | None) -> None:
        if other is None:
            self._links.note_link(HERE, one.name, _round_trip_seconds(one))
            return
        # Both directions are alike for what is carried; whether there is a way is asked in each.
        is_known = (other.incarnation, one.incarnation) in self._found
        found = one.site.look_for(other.site, 0 if is_known else PROBE_BYTES)
        if found is None:
            return
        self._found.add((one.incarnation, other.incarnation))
        if not is_known:
            round_trip_s, bytes_per_s = found
            self._links.note_link(one.name, other.name, round_trip_s, bytes_per_s)


def _round_trip_seconds(member: Member) -> float:
    """The shortest of a few. Raises what asking does."""
    found = []
    for _ in range(TRIPS):
        begun = time.perf_counter()
        member.session.synchronize(timeout=TRIP_SECONDS)
        found.append(time.perf_counter() - begun)
    return min(found)
