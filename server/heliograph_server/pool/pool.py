"""A pool: the daemons of a source, joined as they answer, and retried when they are lost.

    source ─▸ list ─▸ a slot each, with a thread: join ─▸ wait for loss ─▸ report ─▸ join again
                                                    │
                                       the host, which gets new and lost devices

No query of a pool waits for a member.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

import heliograph as hg
from heliograph.head.members import connect_as_head, end_earlier
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph_backends.registry import Registry
from heliograph_proto.addresses import Credentials, Shown, nothing_shown
from heliograph_proto.devices import DeviceChange, MemberInfo, MemberState
from heliograph_proto.errors import (
    ConfigurationError,
    DrainingError,
    HeliographError,
    MemberLostError,
    UnavailableError,
)
from heliograph_proto.sessions import WantedBytes
from heliograph_server.links.blocking import BlockingPeers
from heliograph_server.pool.discovery import ListedMember, MembershipSource, StaticSource, first_twice
from heliograph_server.pool.joining import (
    check_change,
    check_daemons,
    check_devices,
    check_lives,
    pause_seconds,
)
from heliograph_server.pool.link_survey import HERE, LinkSurvey
from heliograph_server.pool.member import Member
from heliograph_server.pool.remote.answers import MAX_REASON, printable
from heliograph_server.pool.remote.device import RemoteDevice
from heliograph_server.pool.remote.memory import RemoteBuffer
from heliograph_server.resources.measurements import HostMeasurements
from heliograph_server.resources.membership import Changed, MembershipChange, Reachability
from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: The default time after which a silent member is lost.
SILENCE_SECONDS = 3.0
#: The default time for which a member with a broken connection is waited for.
LEASE_SECONDS = 10.0
#: The time that one attempt to join may take.
JOIN_SECONDS = 3.0
#: A member that was present for so long is retried at once after its loss.
STEADY_SECONDS = 5.0
#: The most reasons for absence that are logged until the member is present for a while.
MAX_LOGGED_REASONS = 8
#: The time that `close` waits for each member, for all in parallel.
CLOSE_SECONDS = 6.0

_DRAINING_ADVICE = "it joins again when it is restarted, or undo its drain: heliograph drain --undo"
_AWAY_ADVICE = "check the network to it; it is lost unless it answers within --pool-lease-seconds"
_LOST_ADVICE = "check the daemon and the network, and restart the daemon if needed"

#: Opens a session at a URL, within so many seconds, with a silence, credentials, and the two times of
#: `connect_as_head`. Raises the errors of `hg.connect`.
Connect: TypeAlias = Callable[[str, float, float, Credentials, float, float], hg.Session]
#: A change of the devices of one incarnation of a member.
_News: TypeAlias = tuple[Member, DeviceChange]


class SessionMemory(Protocol):
    """Remembers the sessions with members over a restart of this head. Thread-safe."""

    @property
    def earlier(self) -> Mapping[str, EarlierSession]:
        """The sessions of the head before, by the member's name."""

    def keep(self, name: str, incarnation: bytes, secret: bytes) -> None:
        """Remember the session with a member."""


class EarlierSession(Protocol):
    """A session with one incarnation of a member."""

    @property
    def incarnation(self) -> bytes: ...

    @property
    def secret(self) -> bytes: ...


class Pool:
    """The members of a pool: a `Membership`. Thread-safe."""

    def __init__(
        self,
        source: MembershipSource,
        silence_seconds: float = SILENCE_SECONDS,
        connect: Connect = connect_as_head,
        shown: Shown = nothing_shown,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`shown` returns the credentials presented to a member at each connection.
        `lease_seconds`: the time for which a member with a broken connection is waited for."""
        self._source = source
        self._shown = shown
        self.silence_seconds = silence_seconds
        self._lease_seconds = lease_seconds
        #: The time for which members keep what they hold for this head while it restarts.
        self._kept_seconds = 0.0
        self._memory: SessionMemory | None = None
        #: True until what members kept for the head before was taken up.
        self._takes_up = False
        self._connect = connect
        self._incarnation: Callable[[], bytes] = bytes
        self._changed: Changed = lambda change: None
        self._links: HostMeasurements | None = None
        self._survey: LinkSurvey | None = None
        self._lock = threading.Condition()
        #: In the order of the list, followed by members that left the list and still answer.
        self._slots: list[_Slot] = []
        self._accepted: tuple[ListedMember, ...] = ()
        self._refused: tuple[MemberInfo, ...] = ()
        self._logged: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool of {', '.join(slot.name for slot in self._slots) or 'no members'}>"

    # Queries

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        """The devices of all ready members, in the order of the members."""
        with self._lock:
            return tuple(device for slot in self._slots for device in slot.devices)

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """All members, including those that are not ready."""
        with self._lock:
            return (*(slot.info for slot in self._slots), *self._refused)

    @property
    def reaches(self) -> tuple[Reachability, ...]:
        """The known reachability among ready members: first from this process, which reaches all of
        them, then from each member."""
        ready = self._ready()
        from_here = [Reachability(HERE, one.name, True) for one in ready]
        pairs = [one.site.reach(other.site) for one in ready for other in ready if one is not other]
        return (*from_here, *pairs)

    @property
    def relayed(self) -> tuple[Reachability, ...]:
        """The pairs of ready members whose first cannot fetch values from the second."""
        ready = self._ready()
        names = {one.incarnation: one.name for one in ready}
        found = [(key, one) for member in ready for key, one in member.site.relayed().items()]
        return tuple(replace(one, b=names[key]) for key, one in found if key in names)

    @property
    def daemons(self) -> tuple[bytes, ...]:
        """The incarnations of all members and of the daemons behind them."""
        with self._lock:
            return tuple(dict.fromkeys(one for slot in self._slots for one in slot.daemons))

    def _ready(self) -> list[Member]:
        with self._lock:
            return [slot.member for slot in self._slots if slot.member is not None]

    def why_missing(self, device: str) -> HeliographError | None:
        """The reason why a member does not offer a device of this name. None if no member has
        one."""
        with self._lock:
            for slot in self._slots:
                if device.casefold().startswith(f"{slot.name.casefold()}/"):
                    return slot.why_missing
        return None

    def wait(self, is_enough: Callable[[Pool], bool], seconds: float) -> bool:
        """Wait until a condition holds, at most so many seconds. Return True if it holds."""
        with self._lock:
            return self._lock.wait_for(lambda: is_enough(self), seconds)

    def await_devices(self, names: Collection[str]) -> None:
        """As `Membership.await_devices`."""
        wanted = {name.casefold() for name in names}
        seconds = max(JOIN_SECONDS, self._lease_seconds)
        self.wait(lambda _: wanted <= {one.name.casefold() for one in self.devices}, seconds)

    # A restart of this head

    def remember(self, memory: SessionMemory, kept_seconds: float) -> None:
        """Remember the sessions with members, which keep for so long what they hold. Called before
        `start`; `take_up` follows that."""
        self._memory, self._kept_seconds, self._takes_up = memory, kept_seconds, True

    def take_up(self, wanted: Sequence[WantedBytes]) -> list[tuple[int, RemoteBuffer]]:
        """As `Membership.take_up`."""
        found = [one for member in self._ready() for one in member.take_up(wanted)]
        with self._lock:
            self._takes_up = False
        for late in self._ready():
            late.take_up(())
        return found

    def let_go(self) -> None:
        """As `Membership.let_go`."""
        with self._lock:
            self._closed = True
        for member in self._ready():
            member.let_go()

    def welcome(self, member: Member, left: tuple[bytes, bytes]) -> None:
        """End the session that was lost with a connection, and remember the new one.

        `left`: the incarnation and the secret of the lost session; empty without one."""
        memory = self._memory
        earlier = None if memory is None else memory.earlier.get(member.name)
        if memory is not None:
            memory.keep(member.name, member.incarnation, member.session.info.session)
        if left[0] == member.incarnation:
            end_earlier(member.session, left[1])
        elif earlier is not None and earlier.incarnation == member.incarnation and not left[0]:
            with self._lock:
                if self._takes_up:
                    member.earlier = earlier.secret
                    return
            end_earlier(member.session, earlier.secret)

    # Starting and closing

    def start(
        self, incarnation: Callable[[], bytes], changed: Changed, links: HostMeasurements | None = None
    ) -> None:
        """Begin to look for members, for a head with this incarnation.

        `changed` may be called from any thread, but for one member only by one at a time. `links`
        receives the measurements of links.
        """
        self._incarnation, self._changed, self._links = incarnation, changed, links
        self._survey = LinkSurvey(self._ready, links) if links is not None else None
        self._source.start(self._listed, self._source_failed)

    def close(self) -> None:
        """Release all members. Idempotent."""
        with self._lock:
            self._closed = True
            slots = list(self._slots)
        self._source.close()
        if self._survey is not None:
            self._survey.close()
        for slot in slots:
            slot.leave()
        for slot in slots:
            slot.join(CLOSE_SECONDS)

    def _source_failed(self, error: HeliographError) -> None:
        with self._lock:
            is_news = str(error) not in self._logged
            self._logged.add(str(error))
        if is_news:
            logger.warning("members: %s", error)

    def _listed(self, listed: Sequence[ListedMember]) -> None:
        """Replace the list of members."""
        accepted: list[ListedMember] = []
        refused: list[MemberInfo] = []
        for one in listed:
            if first_twice([*(other.name for other in accepted), one.name]) is None:
                accepted.append(one)
            else:
                advice = "give each member a name of its own: NAME=HOST:PORT"
                why = "another member has its name"
                refused.append(MemberInfo(one.name, one.url, MemberState.JOINING, why, advice=advice))
        with self._lock:
            self._logged.clear()
            if self._closed:
                return
            news = [one for one in refused if one not in self._refused]
            self._refused, self._accepted = tuple(refused), tuple(accepted)
            self._fill()
            for slot in self._slots:
                slot.look_again()
        for info in news:
            logger.warning("member %s at %s is refused: %s", info.name, info.address, info.why)

    def _fill(self) -> None:
        """Create a slot for every listed member whose name is free. Called under the lock."""
        known = {slot.listed: slot for slot in self._slots}
        taken = {slot.name.casefold() for slot in self._slots}
        for one in self._accepted:
            if one not in known and one.name.casefold() not in taken:
                known[one] = _Slot(self, one)
                known[one].start()
        places = {one: place for place, one in enumerate(self._accepted)}
        self._slots = sorted(known.values(), key=lambda slot: places.get(slot.listed, len(places)))

    # Called by the slots

    def connect(self, listed: ListedMember) -> hg.Session:
        """Open a session with a daemon. Raises the errors of `hg.connect`."""
        shown = self._shown(listed.url)
        times = self._lease_seconds, self._kept_seconds
        return self._connect(listed.url, JOIN_SECONDS, self.silence_seconds, shown, *times)

    def admit(self, slot: _Slot, member: Member) -> None:
        """Make a daemon that answered a member. Raises ConfigurationError and ProtocolError if it
        cannot be one."""
        check_devices(member.session.info.devices)
        member.begin()
        with self._lock:
            others = {one.name: one.daemons for one in self._slots if one is not slot}
            check_lives(member.session.info, self._incarnation(), others)
            slot.member = member
            self._lock.notify_all()
        known = partial(self._known, slot)
        self._changed(MembershipChange(member.name, appeared=member.devices, applied=known))
        known()
        if self._survey is not None:
            self._survey.look()

    def _known(self, slot: _Slot) -> None:
        """Note that all sessions have the devices of a slot's member. Idempotent."""
        with self._lock:
            slot.is_known = True
            self._lock.notify_all()

    def lose(self, slot: _Slot, member: Member, cause: HeliographError) -> None:
        """Remove a lost member."""
        with self._lock:
            slot.member, slot.is_known = None, False
            closed = self._closed
            self._lock.notify_all()
        if not closed:
            self._source.refresh()
        if self._links is not None:
            self._links.forget_site(member.name)
        self._changed(MembershipChange(member.name, lost=member.devices, why=cause.message))

    def change(self, member: Member, change: DeviceChange) -> None:
        """Apply a change of a member's drain, or of its devices if it is itself a head.

        Raises ConfigurationError if that head now has this one among its members.
        """
        check_daemons(change.daemons, self._incarnation())
        check_change(change, [one.member_name for one in member.devices])
        with self._lock:
            was_draining = member.is_draining
            appeared, lost = member.change(change)
            self._lock.notify_all()
        if change.draining is not was_draining:
            what = "drains: new plans avoid it" if change.draining else "drains no more: new plans use it"
            logger.info("member %s at %s %s", member.name, member.url, what)
        leaving = member.devices if change.draining and not was_draining else ()
        if appeared or lost or leaving:
            tell = member.tell_staying
            self._changed(
                MembershipChange(member.name, appeared, lost, change.why, leaving=leaving, tell_staying=tell)
            )

    def keeps(self, slot: _Slot) -> bool:
        """True if a slot without a member is still listed. Otherwise the slot is removed, and its
        name is free."""
        with self._lock:
            if not self._closed and slot.listed in self._accepted:
                return True
            self._slots = [one for one in self._slots if one is not slot]
            if not self._closed:
                self._fill()
            self._lock.notify_all()
            return False

    def attempted(self) -> None:
        """Note that a slot's attempt to join failed."""
        with self._lock:
            self._lock.notify_all()

    @property
    def is_settled(self) -> bool:
        """True if every listed member has joined or failed at least once."""
        return all(slot.is_known or slot.has_failed for slot in self._slots)


class _Slot:
    """One listed daemon, and the thread that handles it."""

    def __init__(self, pool: Pool, listed: ListedMember) -> None:
        self._pool = pool
        self.listed = listed
        self.name = listed.name
        #: Guarded by the pool's lock.
        self.member: Member | None = None
        #: True once all sessions have the devices of the member.
        self.is_known = False
        self._why: HeliographError | None = None
        self._was_ready = False
        self._is_leaving = False
        self.has_failed = False
        #: The incarnation and the secret of the last session, which a lost member may still hold.
        self._left = b"", b""
        #: Reasons that were logged since the member was last ready.
        self._logged: set[str] = set()
        #: Wakes the thread: a lost member, a change of its devices, or None for the end.
        self._events: SimpleQueue[Member | _News | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"heliograph-member-{self.name}", daemon=True)

    def __repr__(self) -> str:
        return f"<_Slot {self.name}: {self.member or self._why or 'joining'}>"

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        return self.member.devices if self.member is not None else ()

    @property
    def daemons(self) -> tuple[bytes, ...]:
        if self.member is None:
            return ()
        return self.member.incarnation, *self.member.session.info.daemons

    @property
    def info(self) -> MemberInfo:
        if self.member is not None and self.is_known:
            return self._info_of(self.member)
        state = MemberState.LOST if self._was_ready else MemberState.JOINING
        if isinstance(self._why, DrainingError):
            state = MemberState.DRAINING
        if self._why is None:
            return MemberInfo(self.name, self.listed.url, state, "it has not answered yet")
        # The advice for a client does not help the operator of the pool.
        is_lost = isinstance(self._why, MemberLostError)
        advice = _LOST_ADVICE if is_lost else self._why.advice
        if state is MemberState.DRAINING:
            advice = _DRAINING_ADVICE
        why = printable(self._why.message, MAX_REASON)
        return MemberInfo(self.name, self.listed.url, state, why, advice=advice)

    def _info_of(self, member: Member) -> MemberInfo:
        names = tuple(device.name for device in member.devices)
        info = MemberInfo(
            self.name, self.listed.url, MemberState.READY, devices=names, server=member.session.info.server
        )
        if (broke := member.why_away) is not None:
            why = printable(broke.message, MAX_REASON)
            return replace(info, state=MemberState.AWAY, why=why, advice=_AWAY_ADVICE)
        if not member.is_draining:
            return info
        why = "it drains: its work goes on, and new plans avoid it"
        return replace(info, state=MemberState.DRAINING, why=why, advice=_DRAINING_ADVICE)

    @property
    def why_missing(self) -> HeliographError | None:
        if self.member is not None:
            return None
        if isinstance(self._why, MemberLostError):
            return self._why
        why = self._why.message if self._why is not None else "it has not answered yet"
        return MemberLostError(
            f"member {self.name} at {self.listed.url} is not available: {why}",
            advice="compile for other devices, or wait for it with session.watch()",
        )

    # Called by other threads

    def start(self) -> None:
        self._thread.start()

    def look_again(self) -> None:
        """End the pause before the next attempt, after the list has changed."""
        if self.member is None:
            self._events.put(None)

    def leave(self) -> None:
        """Stop using the member."""
        self._is_leaving = True
        self._events.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # On the slot's thread

    def _run(self) -> None:
        attempt = 0
        while self._pool.keeps(self):
            member = self._try_to_join()
            if member is not None and self._serve(member) >= STEADY_SECONDS:
                attempt = 0
                self._logged.clear()
            else:
                # Including a member that joins and is lost again and again.
                with contextlib.suppress(Empty):
                    self._events.get(timeout=pause_seconds(attempt, random.random()))
                attempt += 1

    def _try_to_join(self) -> Member | None:
        member: Member | None = None
        try:
            member = Member(self.name, self._pool.connect(self.listed))
            member.when_lost(self._events.put)
            current = member
            member.when_changed(lambda change: self._events.put((current, change)))
            self._pool.welcome(member, self._left)
            self._pool.admit(self, member)
        except HeliographError as error:
            self._failed(error)
        except Exception as defect:
            logger.exception("member %s could not join", self.name)
            self._why = ConfigurationError(f"it could not join: {defect}")
        else:
            self._why, self._was_ready = None, True
            names = ", ".join(device.member_name for device in member.devices)
            logger.info("member %s at %s joined with %s", self.name, self.listed.url, names)
            return member
        if member is not None:
            member.close()
        self.has_failed = True
        self._pool.attempted()
        return None

    def _failed(self, error: HeliographError) -> None:
        """Set and log the reason why it did not join or was lost. Each reason is logged once."""
        self._why = error
        key = f"{type(error).__name__} {error.message}"
        # A bound, in case the message differs each time.
        if key not in self._logged and len(self._logged) < MAX_LOGGED_REASONS and not self._is_leaving:
            self._logged.add(key)
            where = "" if isinstance(error, MemberLostError) else f"member {self.name} at {self.listed.url}: "
            logger.warning("%s%s", where, printable(" ".join(error.in_a_line().split()), MAX_REASON))

    def _serve(self, member: Member) -> float:
        """Handle changes until the member is lost or left. Return the seconds for which it was
        present."""
        began = time.monotonic()
        try:
            while not self._is_leaving and member.lost is None:
                event = self._events.get()
                # Changes of an earlier member may arrive late, and its devices have the same names.
                if isinstance(event, tuple) and event[0] is member and member.lost is None:
                    self._pool.change(member, event[1])
        except HeliographError as error:
            member.lose(error)
        lived = time.monotonic() - began
        cause = member.lose(hg.SessionClosedError("it is no longer used"))
        self._left = member.incarnation, member.session.info.session
        self._failed(cause)
        self._pool.lose(self, member, cause)
        with contextlib.suppress(Empty):
            while True:
                # Events of this member must not end the pause before the next attempt.
                self._events.get_nowait()
        member.close()
        return lived


def open_pool_of(urls: Sequence[str], timeout: float, credentials: Credentials = NO_CREDENTIALS) -> Host:
    """Open a host with only the devices of these daemons, all with the same credentials. Waits
    until all that answer promptly have answered.

    Raises ConfigurationError for two of the same name. Raises UnavailableError, with the reason for
    each, if none has answered after `timeout` seconds.
    """
    pool = Pool(StaticSource.parse(",".join(urls)), shown=lambda _: credentials)
    host = Host(Registry(), pool=pool)
    host.exchange.use(BlockingPeers(shown=lambda _: credentials))
    try:
        pool.wait(lambda one: bool(one.devices) and one.is_settled, timeout)
        if not pool.devices:
            whys = "; ".join(f"{one.name}: {one.why}" for one in pool.members)
            raise UnavailableError(f"no daemon of the pool answers: {whys}", advice="start one of them")
    except BaseException:
        host.close()
        raise
    return host
