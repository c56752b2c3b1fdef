"""A pool: the daemons that a source names, joined as they answer, and tried again when they are lost.

    source ─▸ listed ─▸ a slot each, with a thread: join ─▸ wait for its loss ─▸ tell ─▸ join again
                                                      │
                                    the host, which is told of devices that came, or are gone

What is asked of a pool is answered without waiting for any member.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

import heliograph as hg
from heliograph.head.members import connect_as_head
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph_backends.registry import Registry
from heliograph_proto.addresses import Credentials, Shown, nothing_shown
from heliograph_proto.devices import DeviceChange, MemberInfo, MemberState
from heliograph_proto.errors import ConfigurationError, HeliographError, MemberLostError, UnavailableError
from heliograph_server.links.blocking import BlockingPeers
from heliograph_server.pool.discovery import ListedMember, MembershipSource, StaticSource, first_twice
from heliograph_server.pool.joining import (
    check_change,
    check_daemons,
    check_devices,
    check_lives,
    pause_seconds,
)
from heliograph_server.pool.link_survey import HERE, LinkObserver, LinkSurvey
from heliograph_server.pool.member import Member
from heliograph_server.pool.remote.answers import MAX_REASON, printable
from heliograph_server.pool.remote.device import RemoteDevice
from heliograph_server.resources.membership import Changed, MembershipChange, Reachability
from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: A member that says nothing for so long is lost, unless somebody says otherwise.
SILENCE_SECONDS = 3.0
#: How long one attempt to join may take.
JOIN_SECONDS = 3.0
#: A member that was there for so long is tried again at once when it is lost.
STEADY_SECONDS = 5.0
#: Reasons why a member is not there that are logged until it is there for a while.
MAX_TOLD = 8
#: How long the end waits for each member, all at the same time.
CLOSE_SECONDS = 6.0

_LOST_ADVICE = "look whether it still runs and at the network in between, and start it again"

#: Opens a session: the URL, the seconds that may take, the silence, and what is shown. Raises what
#: `hg.connect` does.
Connect: TypeAlias = Callable[[str, float, float, Credentials], hg.Session]
#: What a member, in one of its lives, tells of its devices.
_News: TypeAlias = tuple[Member, DeviceChange]


class Pool:
    """Thread-safe. What `heliograph_server.resources.membership.Membership` asks for."""

    def __init__(
        self,
        source: MembershipSource,
        silence_seconds: float = SILENCE_SECONDS,
        connect: Connect = connect_as_head,
        shown: Shown = nothing_shown,
    ) -> None:
        """`shown`: what members are shown, whenever one is connected with."""
        self._source = source
        self._shown = shown
        self.silence_seconds = silence_seconds
        self._connect = connect
        self._incarnation = b""
        self._changed: Changed = lambda change: None
        self._links: LinkObserver | None = None
        self._surveyor: LinkSurvey | None = None
        self._lock = threading.Condition()
        #: In the order of the list, then those that are in it no more, as long as they answer.
        self._slots: list[_Slot] = []
        self._wanted: tuple[ListedMember, ...] = ()
        self._refused: tuple[MemberInfo, ...] = ()
        self._told: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool of {', '.join(slot.name for slot in self._slots) or 'nobody'}>"

    # What there is

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        """Those of all members that are ready, in the order of the members."""
        with self._lock:
            return tuple(device for slot in self._slots for device in slot.devices)

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """All that are, or are to be."""
        with self._lock:
            return (*(slot.info for slot in self._slots), *self._refused)

    @property
    def reaches(self) -> tuple[Reachability, ...]:
        """Who of those that are ready can reach whom, as far as is known: first this process, which reaches
        everybody, then each member."""
        ready = self._ready()
        from_here = [Reachability(HERE, one.name, True) for one in ready]
        pairs = [one.site.reach(other.site) for one in ready for other in ready if one is not other]
        return (*from_here, *pairs)

    @property
    def daemons(self) -> tuple[bytes, ...]:
        """The incarnations of all daemons behind the members, and theirs."""
        with self._lock:
            return tuple(dict.fromkeys(one for slot in self._slots for one in slot.daemons))

    def _ready(self) -> list[Member]:
        with self._lock:
            return [slot.member for slot in self._slots if slot.member is not None]

    def why_missing(self, device: str) -> HeliographError | None:
        """Why a member that would have a device of this name does not offer it; None if none would."""
        with self._lock:
            for slot in self._slots:
                if device.casefold().startswith(f"{slot.name.casefold()}/"):
                    return slot.why_missing
        return None

    def wait(self, is_enough: Callable[[Pool], bool], seconds: float) -> bool:
        """Waits until members have come to what is enough, or the time is over; whether they did."""
        with self._lock:
            return self._lock.wait_for(lambda: is_enough(self), seconds)

    # Its life

    def start(self, incarnation: bytes, changed: Changed, links: LinkObserver | None = None) -> None:
        """Begins to look for members, of a head with this incarnation. `changed` comes from any thread, of
        one member one at a time. `ways`: who wants to know the ways between them."""
        self._incarnation, self._changed, self._links = incarnation, changed, links
        self._surveyor = LinkSurvey(self._ready, links) if links is not None else None
        self._source.start(self._listed, self._source_failed)

    def close(self) -> None:
        """Lets go of all members. Idempotent."""
        with self._lock:
            self._closed = True
            slots = list(self._slots)
        self._source.close()
        if self._surveyor is not None:
            self._surveyor.close()
        for slot in slots:
            slot.leave()
        for slot in slots:
            slot.join(CLOSE_SECONDS)

    def _source_failed(self, error: HeliographError) -> None:
        with self._lock:
            is_news = str(error) not in self._told
            self._told.add(str(error))
        if is_news:
            logger.warning("members: %s", error)

    def _listed(self, listed: Sequence[ListedMember]) -> None:
        """These are to be the members, from now on."""
        accepted: list[ListedMember] = []
        refused: list[MemberInfo] = []
        for one in listed:
            if first_twice([*(other.name for other in accepted), one.name]) is None:
                accepted.append(one)
            else:
                advice = "give each member a name of its own: NAME=HOST:PORT"
                why = "another has its name"
                refused.append(MemberInfo(one.name, one.url, MemberState.JOINING, why, advice=advice))
        with self._lock:
            self._told.clear()
            if self._closed:
                return
            news = [one for one in refused if one not in self._refused]
            self._refused, self._wanted = tuple(refused), tuple(accepted)
            self._fill()
            for slot in self._slots:
                slot.look_again()
        for info in news:
            logger.warning("member %s at %s is refused: %s", info.name, info.address, info.why)

    def _fill(self) -> None:
        """A slot for everybody in the list whose name is free. Under the lock."""
        known = {slot.listed: slot for slot in self._slots}
        taken = {slot.name.casefold() for slot in self._slots}
        for one in self._wanted:
            if one not in known and one.name.casefold() not in taken:
                known[one] = _Slot(self, one)
                known[one].start()
        places = {one: place for place, one in enumerate(self._wanted)}
        self._slots = sorted(known.values(), key=lambda slot: places.get(slot.listed, len(places)))

    # What slots ask for

    def connect(self, listed: ListedMember) -> hg.Session:
        """A session with a daemon. Raises what `hg.connect` does."""
        return self._connect(listed.url, JOIN_SECONDS, self.silence_seconds, self._shown(listed.url))

    def admit(self, slot: _Slot, member: Member) -> None:
        """A daemon has answered: it is a member from now on. Raises ConfigurationError and ProtocolError for
        one that cannot be."""
        check_devices(member.session.info.devices)
        member.begin()
        with self._lock:
            others = {one.name: one.daemons for one in self._slots if one is not slot}
            check_lives(member.session.info, self._incarnation, others)
            slot.member = member
            self._lock.notify_all()
        self._changed(MembershipChange(member.name, appeared=member.devices))
        if self._surveyor is not None:
            self._surveyor.look()

    def lose(self, slot: _Slot, member: Member, cause: HeliographError) -> None:
        """A member is no longer there."""
        with self._lock:
            slot.member = None
            closed = self._closed
            self._lock.notify_all()
        if not closed:
            self._source.refresh()
        if self._links is not None:
            self._links.forget_site(member.name)
        self._changed(MembershipChange(member.name, lost=member.devices, why=cause.message))

    def change(self, slot: _Slot, member: Member, told: DeviceChange) -> None:
        """Devices of a member that is a head itself came, or are gone. Raises ConfigurationError for one that
        got this head among its members."""
        check_daemons(told.daemons, self._incarnation)
        check_change(told, [one.member_name for one in member.devices])
        with self._lock:
            appeared, lost = member.change(told)
            self._lock.notify_all()
        self._changed(MembershipChange(member.name, appeared, lost, told.why))

    def goes_on(self, slot: _Slot) -> bool:
        """Whether a slot without a member is still wanted; else it is over, and another may have its name."""
        with self._lock:
            if not self._closed and slot.listed in self._wanted:
                return True
            self._slots = [one for one in self._slots if one is not slot]
            if not self._closed:
                self._fill()
            self._lock.notify_all()
            return False

    def attempted(self) -> None:
        """A slot has tried."""
        with self._lock:
            self._lock.notify_all()

    @property
    def is_settled(self) -> bool:
        """Whether everybody has joined, or failed to at least once."""
        return all(slot.member is not None or slot.has_failed for slot in self._slots)


class _Slot:
    """One listed daemon, and the thread that looks after it."""

    def __init__(self, pool: Pool, listed: ListedMember) -> None:
        self._pool = pool
        self.listed = listed
        self.name = listed.name
        #: Guarded by the pool's lock.
        self.member: Member | None = None
        self._why: HeliographError | None = None
        self._was_ready = False
        self._is_leaving = False
        self.has_failed = False
        #: Reasons that were logged since it was ready last.
        self._told: set[str] = set()
        #: What wakes the thread: its member's loss, news of it, or None for the end.
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
        if self.member is not None:
            names = tuple(device.name for device in self.member.devices)
            server = self.member.session.info.server
            return MemberInfo(self.name, self.listed.url, MemberState.READY, devices=names, server=server)
        state = MemberState.LOST if self._was_ready else MemberState.JOINING
        if self._why is None:
            return MemberInfo(self.name, self.listed.url, state, "it has not answered yet")
        # What a client is to do then is no help to who looks after the pool.
        is_lost = isinstance(self._why, MemberLostError)
        advice = _LOST_ADVICE if is_lost else self._why.advice
        why = printable(self._why.message, MAX_REASON)
        return MemberInfo(self.name, self.listed.url, state, why, advice=advice)

    @property
    def why_missing(self) -> HeliographError | None:
        if self.member is not None:
            return None
        if isinstance(self._why, MemberLostError):
            return self._why
        why = self._why.message if self._why is not None else "it has not answered yet"
        return MemberLostError(
            f"member {self.name} at {self.listed.url} is not there: {why}",
            advice="compile for other devices, or wait for it: session.watch()",
        )

    # From other threads

    def start(self) -> None:
        self._thread.start()

    def look_again(self) -> None:
        """The list is another one. Who is in it no more is used as long as it answers."""
        if self.member is None:
            self._events.put(None)

    def leave(self) -> None:
        """It is not used any more."""
        self._is_leaving = True
        self._events.put(None)

    def _tell(self, member: Member, news: DeviceChange) -> None:
        """A member, in one of its lives, has other devices now."""
        self._events.put((member, news))

    def join(self, seconds: float) -> None:
        """Waits for its thread."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # In its own thread

    def _run(self) -> None:
        attempt = 0
        while self._pool.goes_on(self):
            member = self._try_to_join()
            if member is not None and self._stay(member) >= STEADY_SECONDS:
                attempt = 0
                self._told.clear()
            else:
                # Also one that joins and is lost again and again.
                self._rest(pause_seconds(attempt, random.random()))
                attempt += 1

    def _rest(self, seconds: float) -> None:
        try:
            self._events.get(timeout=seconds)
        except Empty:
            pass

    def _try_to_join(self) -> Member | None:
        member: Member | None = None
        try:
            member = Member(self.name, self._pool.connect(self.listed))
            member.when_lost(self._events.put)
            member.when_changed(partial(self._tell, member))
            self._pool.admit(self, member)
        except HeliographError as error:
            self._failed(error)
        except Exception as defect:
            logger.exception("member %s could not join", self.name)
            self._why = ConfigurationError(f"it could not join: {defect}")
        else:
            self._why, self._was_ready = None, True
            logger.info("member %s at %s joined with %s", self.name, self.listed.url, _names(member))
            return member
        if member is not None:
            member.close()
        self.has_failed = True
        self._pool.attempted()
        return None

    def _failed(self, error: HeliographError) -> None:
        """It did not join, or is lost, for a reason that is logged once."""
        self._why = error
        key = f"{type(error).__name__} {error.message}"
        # Who says something else each time fills no log.
        if key not in self._told and len(self._told) < MAX_TOLD and not self._is_leaving:
            self._told.add(key)
            where = "" if isinstance(error, MemberLostError) else f"member {self.name} at {self.listed.url}: "
            logger.warning("%s%s", where, printable(" ".join(error.in_a_line().split()), MAX_REASON))

    def _stay(self, member: Member) -> float:
        """Until it is lost, or is to be left; how many seconds that was."""
        began = time.monotonic()
        try:
            while not self._is_leaving and member.lost is None:
                event = self._events.get()
                # What a life says last may come after it: names of devices are those of the next one too.
                if isinstance(event, tuple) and event[0] is member and member.lost is None:
                    self._pool.change(self, member, event[1])
        except HeliographError as error:
            member.lose(error)
        lived = time.monotonic() - began
        self._let_go(member)
        return lived

    def _let_go(self, member: Member) -> None:
        error = member.lose(hg.SessionClosedError("it is used no more"))
        self._failed(error)
        self._pool.lose(self, member, error)
        with contextlib.suppress(Empty):
            while True:
                # What came for this member ends no pause before the next one.
                self._events.get_nowait()
        member.close()


def _names(member: Member) -> str:
    return ", ".join(device.member_name for device in member.devices)


def open_pool_of(urls: Sequence[str], timeout: float, credentials: Credentials = NO_CREDENTIALS) -> Host:
    """A host with the devices of these daemons alone, which are all shown the same, once all have answered
    that do at once.

    Raises ConfigurationError for two of one name, and UnavailableError when none has answered after `timeout`
    seconds, which says why of each.
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
