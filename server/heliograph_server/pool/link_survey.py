"""Background measurements of the links between members, for placement and relays.

    a member joins ─▸ unmeasured pairs ─▸ one at a time: round trip, bandwidth, or no link
    relayed pairs, every ten seconds ────▸ one at a time: still no link, or one again

Each measurement sends a few megabytes, so that running work is hardly affected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from heliograph_proto.errors import HeliographError
from heliograph_server.pool.member import Member
from heliograph_server.resources.measurements import HostMeasurements

logger = logging.getLogger(__name__)

#: The bytes of a bandwidth measurement each way.
PROBE_BYTES = 2 * 2**20
#: Round trips from here to a member, of which the shortest counts.
TRIPS = 4
TRIP_SECONDS = 2.0
#: The interval at which it looks for relayed links whose next probe is due.
LOOK_SECONDS = 2.0
#: The time that `close` waits for the current measurement.
CLOSE_SECONDS = 4.0
#: The site of this process's own devices.
HERE = ""


class LinkSurvey:
    """A thread that measures new pairs of members. `members` returns those that are ready."""

    def __init__(self, members: Callable[[], Sequence[Member]], links: HostMeasurements) -> None:
        self._members = members
        self._links = links
        self._changed = threading.Event()
        self._closed = False
        #: Pairs of incarnations that were measured, and those of them with a link.
        self._measured: set[tuple[bytes, bytes]] = set()
        self._linked: set[tuple[bytes, bytes]] = set()
        self._thread = threading.Thread(target=self._run, name="heliograph-survey", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LinkSurvey, {len(self._measured)} pairs measured>"

    def look(self) -> None:
        """Look for new pairs, after members came or left."""
        self._changed.set()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed = True
        self._changed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            if self._changed.wait(LOOK_SECONDS):
                self._changed.clear()
                self._forget()
                for one, other in self._pairs():
                    self._measured.add((one.incarnation, other.incarnation if other is not None else b""))
                    self._try_to_measure(one, other)
            for one, other in self._relayed():
                self._try_to_measure(one, other)

    def _try_to_measure(self, one: Member, other: Member | None) -> None:
        if self._closed:
            return
        try:
            self._measure(one, other)
        except HeliographError as error:
            # The member is lost, or about to be.
            logger.debug("no measurement from %s: %s", one.name, error.message)
        except Exception:
            logger.exception("a link from %s could not be measured", one.name)

    def _relayed(self) -> list[tuple[Member, Member]]:
        """Relayed links whose next probe is due."""
        members = self._members()
        lives = {one.incarnation: one for one in members}
        return [(one, lives[key]) for one in members for key in one.site.due() if key in lives]

    def _forget(self) -> None:
        """Forget incarnations that are gone."""
        members = self._members()
        lives = {one.incarnation for one in members} | {b""}
        for one in members:
            one.site.forget(lives)
        self._measured = {pair for pair in self._measured if lives.issuperset(pair)}
        self._linked &= self._measured

    def _pairs(self) -> Iterator[tuple[Member, Member | None]]:
        """Pairs that are not measured yet; None is this process. Links from here come first: they
        cost least."""
        while not self._closed:
            members = self._members()
            from_here = [(one, None) for one in members if (one.incarnation, b"") not in self._measured]
            found: Sequence[tuple[Member, Member | None]] = from_here or [
                (one, other)
                for one in members
                for other in members
                if one is not other and (one.incarnation, other.incarnation) not in self._measured
            ]
            if not found:
                return
            yield found[0]

    def _measure(self, one: Member, other: Member | None) -> None:
        if other is None:
            self._links.note_link(HERE, one.name, _round_trip_seconds(one))
            return
        # Bandwidth is the same in both directions; reachability is checked in each.
        is_known = (other.incarnation, one.incarnation) in self._linked
        found = one.site.look_for(other.site, 0 if is_known else PROBE_BYTES)
        if found is None:
            return
        self._linked.add((one.incarnation, other.incarnation))
        if not is_known:
            round_trip_s, bytes_per_s = found
            self._links.note_link(one.name, other.name, round_trip_s, bytes_per_s)


def _round_trip_seconds(member: Member) -> float:
    """The shortest of a few round trips. Raises the errors of the session."""
    found = []
    for _ in range(TRIPS):
        begun = time.perf_counter()
        member.session.synchronize(timeout=TRIP_SECONDS)
        found.append(time.perf_counter() - begun)
    return min(found)
