"""A daemon whose devices are used here, in one of its lives: one session, and what it is good for.

    joining ──(it answered, and its devices make sense)──▸ ready ──(its session ended)──▸ lost

A daemon that comes back is another member: nothing that belonged to the one before ever reaches it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import heliograph as hg
from heliograph.head import members
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph_proto import TICKETS
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.devices import DeviceChange, MemberState
from heliograph_proto.errors import DeadlineExceededError, HeliographError, MemberLostError, UnavailableError
from heliograph_server.pool.discovery import member_name
from heliograph_server.pool.remote.answers import MAX_REASON, printable
from heliograph_server.pool.remote.device import RemoteDevice
from heliograph_server.pool.remote.intake import RemoteIntake
from heliograph_server.pool.remote.site import RemoteSite

#: How long a daemon may take to answer.
CONNECT_SECONDS = 10.0

#: How long one that did not answer is not asked the like again.
MUTE_SECONDS = 10.0

_ADVICE = "compile for other devices; its own are here again when it answers"


class Member:
    """Thread-safe. Owns the session; `close`, or closing the last of its devices, ends that."""

    def __init__(self, name: str, session: hg.Session) -> None:
        self.name = name
        self.session = session
        self.state = MemberState.JOINING
        self._lock = threading.Lock()
        self._error: MemberLostError | None = None
        self._closed = False
        #: What it did not answer in time, and until when it is not asked again.
        self._mute: DeadlineExceededError | None = None
        self._mute_until = 0.0
        self._watchers: list[Callable[[Member], None]] = []
        #: How contents come to it past this process; None where the daemon is too old for that.
        self.intake = RemoteIntake(self) if TICKETS in session.info.features else None
        #: In the order in which the daemon lists them.
        self.devices: tuple[RemoteDevice, ...] = ()
        self._open: set[RemoteDevice] = set()
        self._news: Callable[[DeviceChange], None] = lambda change: None
        members.when_changed(session, lambda change: self._news(change))
        #: As a host that runs partitions of graphs.
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
        """Which life of the daemon it is."""
        return self.session.info.incarnation

    def begin(self, names: Sequence[str] = ()) -> None:
        """Makes it ready, with all of the daemon's devices or those that are named. Raises
        UnknownDeviceError, and MemberLostError when it is gone already."""
        found = [self.session.device(name) for name in names] if names else self.session.devices
        found = [one for one in found if not one.lost]
        self.devices = tuple(RemoteDevice(f"{self.name}/{one.name}", self, one) for one in found)
        with self._lock:
            self._open = set(self.devices)
            if self._error is None:
                self.state = MemberState.READY
        self.check()

    def when_changed(self, told: Callable[[DeviceChange], None]) -> None:
        """From now on tells of devices that come to the daemon, or are gone from it. It must not block."""
        self._news = told

    def change(self, change: DeviceChange) -> tuple[tuple[RemoteDevice, ...], tuple[RemoteDevice, ...]]:
        """The daemon, a head itself, has other devices now: those that came, and those that are gone."""
        lost = tuple(one for one in self.devices if one.member_name in change.lost)
        for one in lost:
            why = printable(change.why, MAX_REASON)
            one.lose(MemberLostError(f"{one.name} is lost: {why}", advice=_ADVICE))
        came = [one.name for one in change.appeared]
        kept = [one for one in self.devices if one not in lost and one.member_name not in came]
        found = [self.session.device(name) for name in came]
        appeared = tuple(RemoteDevice(f"{self.name}/{one.name}", self, one) for one in found)
        with self._lock:
            self.devices = (*kept, *appeared)
            self._open = set(self.devices)
        return appeared, lost

    # Its loss

    @property
    def lost(self) -> MemberLostError | None:
        """Why it is no longer there, if it is not."""
        return self._error

    def check(self) -> None:
        """Raises MemberLostError when it is lost."""
        if self._error is not None:
            raise self._error.at(self._error.origin)

    def lose(self, cause: HeliographError) -> MemberLostError:
        """It does not answer any more: whatever is asked of it fails from now on. Idempotent."""
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
        """Calls this once it is lost, from any thread; at once if it is. It must not block or raise."""
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
        """Around whatever is asked of it: errors on their way to our own clients.

        Those of a member that is lost say so; of others the number of a command there, which means nothing
        here, gives way to that of our own command.
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
        """Around questions that it answers at once if it does at all: what it did not answer in time is not
        asked again for a while. Raises DeadlineExceededError."""
        if self._mute is not None and time.monotonic() < self._mute_until:
            raise self._mute.at(self._mute.origin)
        try:
            yield
        except DeadlineExceededError as error:
            self._mute, self._mute_until = error, time.monotonic() + MUTE_SECONDS
            raise
        self._mute = None

    def ours(self, error: HeliographError) -> HeliographError:
        """An error on its way to our own clients: see `edge`."""
        is_gone = self.session.closed or isinstance(error, UnavailableError)
        if is_gone and not isinstance(error, MemberLostError) and (self._error or not self._closed):
            found = self.lose(error)
            return found.at(found.origin)
        return error.at(replace(error.origin, sequence=0)) if error.origin.sequence else error

    # The end

    def leave(self, device: RemoteDevice) -> None:
        """A device is not used any more. With the last one the session ends."""
        with self._lock:
            self._open.discard(device)
            is_last = not self._open
        if is_last:
            self.close()

    def close(self) -> None:
        """Ends the session, at once if it is lost. Idempotent."""
        self._closed = True
        self.session.close()


def join(
    url: str,
    names: Sequence[str] = (),
    timeout: float = CONNECT_SECONDS,
    credentials: Credentials = NO_CREDENTIALS,
) -> Member:
    """A member at a URL, ready, with those of its devices, or all. What `credentials` do not say is as
    `hg.connect` has it. Raises what that does, UnknownDeviceError."""
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
