"""A member: one incarnation of a daemon whose devices are used here, over one session.

    joining ──(it answers, and its devices are valid)──▸ ready ──(its session ends)──▸ lost

A daemon that returns is another member: no object of the earlier one reaches it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import heliograph as hg
from heliograph.head import members
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph_proto import TICKETS
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.devices import DeviceChange, MemberState, Usage
from heliograph_proto.errors import DeadlineExceededError, HeliographError, MemberLostError, UnavailableError
from heliograph_proto.sessions import StayingSession, TakenBytes, WantedBytes
from heliograph_server.pool.discovery import member_name
from heliograph_server.pool.remote.answers import MAX_REASON, lie, printable
from heliograph_server.pool.remote.device import RemoteDevice
from heliograph_server.pool.remote.intake import RemoteIntake
from heliograph_server.pool.remote.memory import RemoteBuffer
from heliograph_server.pool.remote.site import RemoteSite

logger = logging.getLogger(__name__)

#: The time that a daemon has to answer.
CONNECT_SECONDS = 10.0

#: The time for which a query that was not answered in time is not repeated.
MUTE_SECONDS = 10.0

_ADVICE = "compile for other devices; its devices return when it answers"


class Member:
    """One member. Thread-safe. Owns the session; `close`, or closing its last device, ends that."""

    def __init__(self, name: str, session: hg.Session) -> None:
        self.name = name
        self.session = session
        self.state = MemberState.JOINING
        self._lock = threading.Lock()
        self._error: MemberLostError | None = None
        self._closed = False
        #: The error of a query without a timely answer, and the time until which none is sent.
        self._timeout_error: DeadlineExceededError | None = None
        self._no_query_until = 0.0
        self._watchers: list[Callable[[Member], None]] = []
        #: The secret of the session that an earlier life of this head had with it, until it is taken up.
        self.earlier = b""
        #: Direct uploads of contents to the member. None if the daemon is too old.
        self.intake = RemoteIntake(self) if TICKETS in session.info.features else None
        #: True while the daemon drains.
        self.is_draining = False
        #: In the order in which the daemon lists them.
        self.devices: tuple[RemoteDevice, ...] = ()
        self._open: set[RemoteDevice] = set()
        self._news: Callable[[DeviceChange], None] = lambda change: None
        members.when_changed(session, lambda change: self._news(change))
        #: The member as a host that runs partitions of graphs.
        self.site = RemoteSite(self)
        members.when_lost(session, self._session_ended)

    def __repr__(self) -> str:
        return f"<Member {self.name} at {self.url}, {self.state.value}: {len(self.devices)} devices>"

    @property
    def url(self) -> str:
        """The daemon's address."""
        return self.session.address

    @property
    def incarnation(self) -> bytes:
        """The incarnation of the daemon."""
        return self.session.info.incarnation

    def begin(self, names: Sequence[str] = ()) -> None:
        """Make it ready, with all of the daemon's devices or the named ones.

        Raises UnknownDeviceError, and MemberLostError if it is lost already.
        """
        found = [self.session.device(name) for name in names] if names else self.session.devices
        found = [one for one in found if not one.lost]
        self.devices = tuple(RemoteDevice(f"{self.name}/{one.name}", self, one) for one in found)
        with self._lock:
            self._open = set(self.devices)
            if self._error is None:
                self.state = MemberState.READY
        self.check()

    def when_changed(self, callback: Callable[[DeviceChange], None]) -> None:
        """Set the callback for devices that appear on the daemon or are lost from it. It must not
        block."""
        self._news = callback

    def change(self, change: DeviceChange) -> tuple[tuple[RemoteDevice, ...], tuple[RemoteDevice, ...]]:
        """Apply a change of the daemon's drain, or of its devices if it is itself a head.

        Return the new devices, and those that are lost.
        """
        self.is_draining = change.draining
        lost = tuple(one for one in self.devices if one.member_name in change.lost)
        for one in lost:
            why = printable(change.why, MAX_REASON)
            one.lose(MemberLostError(f"{one.name} is lost: {why}", advice=_ADVICE))
        names = [one.name for one in change.appeared]
        kept = [one for one in self.devices if one not in lost and one.member_name not in names]
        found = [self.session.device(name) for name in names]
        appeared = tuple(RemoteDevice(f"{self.name}/{one.name}", self, one) for one in found)
        with self._lock:
            self.devices = (*kept, *appeared)
            self._open = set(self.devices)
        return appeared, lost

    # Loss

    @property
    def why_away(self) -> HeliographError | None:
        """The error with which its connection broke, while it is connected to again."""
        return members.why_away(self.session)

    @property
    def lost(self) -> MemberLostError | None:
        """The error if it is lost."""
        return self._error

    def check(self) -> None:
        """Raise MemberLostError if it is lost."""
        if self._error is not None:
            raise self._error.at(self._error.origin)

    def lose(self, cause: HeliographError) -> MemberLostError:
        """Mark it as lost: all further requests fail. Idempotent."""
        why = printable(cause.message, MAX_REASON)
        error = MemberLostError(f"member {self.name} at {self.url} is lost: {why}", advice=_ADVICE)
        with self._lock:
            if self._error is not None:
                return self._error
            self._error, self.state = error, MemberState.LOST
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self)
        return error

    def when_lost(self, watcher: Callable[[Member], None]) -> None:
        """Call `watcher` once when it is lost, from any thread; at once if it is. It must not block
        or raise."""
        with self._lock:
            if self._error is None:
                self._watchers.append(watcher)
                return
        watcher(self)

    def _session_ended(self, cause: HeliographError) -> None:
        if not self._closed:
            self.lose(cause)

    @contextmanager
    def edge(self) -> Iterator[None]:
        """A context for requests to the member, which converts errors for our own clients.

        Errors of a lost member become MemberLostError. In others the sequence number of the
        member's command, meaningless here, is replaced by that of our own command.
        """
        self.check()
        try:
            yield
        except HeliographError as error:
            ours = self.ours(error)
            if ours is error:
                raise
            raise ours from None

    @contextmanager
    def patience(self) -> Iterator[None]:
        """A context for queries that a healthy member answers at once. A query that times out is
        not repeated for a while. Raises DeadlineExceededError."""
        if self._timeout_error is not None and time.monotonic() < self._no_query_until:
            raise self._timeout_error.at(self._timeout_error.origin)
        try:
            yield
        except DeadlineExceededError as error:
            self._timeout_error, self._no_query_until = error, time.monotonic() + MUTE_SECONDS
            raise
        self._timeout_error = None

    def ours(self, error: HeliographError) -> HeliographError:
        """Convert an error for our own clients; see `edge`."""
        # With a lease, a connection that broke says nothing about the member.
        is_gone = self.session.closed or (
            isinstance(error, UnavailableError) and not self.session.info.lease_ms
        )
        if is_gone and not isinstance(error, MemberLostError) and (self._error or not self._closed):
            found = self.lose(error)
            return found.at(found.origin)
        return error.at(replace(error.origin, sequence=0)) if error.origin.sequence else error

    def tell_staying(self, staying: Sequence[StayingSession]) -> bool:
        """Tell the daemon, which drains, which sessions keep values there. False if it was not
        told: its connection broke, or it refused."""
        try:
            members.tell_handover(self.session, staying)
        except HeliographError as error:
            why = printable(error.message, MAX_REASON)
            logger.debug("%s was not told what stays on it: %s", self.name, why)
            return False
        return True

    # An earlier life of this head

    def take_up(self, wanted: Sequence[WantedBytes]) -> list[tuple[int, RemoteBuffer]]:
        """Take the memory with wanted bytes that the member kept, and have it free the rest.

        Return the buffers with their places in `wanted`; none if the member kept nothing.
        """
        earlier, self.earlier = self.earlier, b""
        if not earlier:
            return []
        mine = {device.name: device for device in self.devices}
        places = [place for place, one in enumerate(wanted) if not one.device or one.device in mine]
        there = [self._as_there(wanted[place], mine) for place in places]
        try:
            if there:
                found = members.take_up(self.session, earlier, there)
                return [(places[place], self._adopted(*one)) for place, one in found.items()]
        except HeliographError as error:
            logger.info("%s kept nothing for this head: %s", self.name, printable(error.message, MAX_REASON))
        members.end_earlier(self.session, earlier)
        return []

    def _as_there(self, want: WantedBytes, mine: Mapping[str, RemoteDevice]) -> WantedBytes:
        return replace(want, device=mine[want.device].member_name) if want.device else want

    def _adopted(self, buffer: hg.Buffer, taken: TakenBytes) -> RemoteBuffer:
        """Raises ProtocolError for a device or a buffer type that the member does not have."""
        for device in self.devices:
            for memory in (device.buffer_type, *device.extra_buffer_types):
                if (device.member_name, memory.name) == (taken.device, taken.buffer_type):
                    return RemoteBuffer(memory, buffer, buffer.size_bytes, Usage.ANY)
        raise lie(f"it took up memory of {printable(taken.device)}, which it does not list")

    def let_go(self) -> None:
        """Leave the session, which the member keeps for its lease."""
        self._closed = True
        members.leave(self.session)

    # The end

    def leave(self, device: RemoteDevice) -> None:
        """Stop using a device. The session ends with the last one."""
        with self._lock:
            self._open.discard(device)
            is_last = not self._open
        if is_last:
            self.close()

    def close(self) -> None:
        """End the session, at once if the member is lost. Idempotent."""
        self._closed = True
        self.session.close()


def join(
    url: str,
    names: Sequence[str] = (),
    timeout: float = CONNECT_SECONDS,
    credentials: Credentials = NO_CREDENTIALS,
) -> Member:
    """Open a member at a URL, ready, with the named devices or all.

    Missing credentials have the defaults of `hg.connect`. Raises the errors of that, and
    UnknownDeviceError.
    """
    address = parse_address(url)
    session = hg.connect(
        url,
        timeout=timeout,
        token=credentials.token or None,
        ca=credentials.ca or None,
        certificate=credentials.certificate or None,
        key=credentials.key or None,
    )
    member = Member(member_name(address), session)
    try:
        member.begin(names)
    except BaseException:
        member.close()
        raise
    return member
