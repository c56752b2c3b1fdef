"""The host: devices, and the sessions that share them.

Any thread. Opening and closing may block, so the event loop leaves them to others.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import Protocol

from heliograph_backends.contract import Device
from heliograph_proto import DIRECT_WEIGHTS, FEATURES, VERSION_MAX, VERSION_MIN, WATCH, __version__
from heliograph_proto.devices import (
    BackendInfo,
    DeviceChange,
    DeviceList,
    Link,
    MemberInfo,
    Memory,
    OpAnswer,
    OpQuery,
    PlacementInfo,
)
from heliograph_proto.errors import (
    ConfigurationError,
    DrainingError,
    HeliographError,
    LimitExceededError,
    SessionClosedError,
    UnavailableError,
    VersionMismatchError,
)
from heliograph_proto.sessions import DeviceStatus, Limits, Quota, SessionInfo, TenantUsage
from heliograph_proto.types import TensorType
from heliograph_server.compile.services import SessionServices
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.resources.device_queue import DeviceLock, DeviceShares
from heliograph_server.resources.failures import typed
from heliograph_server.resources.measurements import HostMeasurements
from heliograph_server.resources.membership import Membership, MembershipChange, SessionDevices
from heliograph_server.resources.memories import query_ops, query_placement
from heliograph_server.resources.principals import ANYBODY, Principal
from heliograph_server.resources.quotas import Holding, QuotaKind, QuotaShare, Tenants
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines, Timer
from heliograph_server.runtime.listing import describe, memory_of, status_of
from heliograph_server.runtime.upload_tickets import Admissions
from heliograph_server.session.run_timeline import RunObserver, Tracing
from heliograph_server.session.session import CLOSE_SECONDS, Session, SessionIdentity
from heliograph_server.session.staging import Staging
from heliograph_server.session.statistics import SessionCounts, SessionStatistics
from heliograph_server.weights.cache_writer import CacheWriter
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.store import ContentStore, tenant_of

logger = logging.getLogger(__name__)

SERVER = f"heliograph/{__version__}"
#: The most sessions at once.
MAX_SESSIONS = 1000
#: How long a client may take, while the host drains, to ask for a result after it was told of it.
LINGER_SECONDS = 0.25


class DeviceRegistry(Protocol):
    """What the host needs of `heliograph_backends.registry.Registry`."""

    @property
    def devices(self) -> Sequence[Device]: ...

    @property
    def backends(self) -> Sequence[BackendInfo]: ...

    def device(self, name: str = "") -> Device: ...

    def acquire(self) -> Sequence[Device]: ...

    def release(self, devices: Sequence[Device]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HostStatistics(SessionStatistics):
    """What all sessions hold now. All zero when there are none."""

    sessions: int = 0
    timers: int = 0
    #: Open ends of edges to other daemons, and bytes that are held for these.
    edges: int = 0
    exchanged_bytes: int = 0


class Host:
    """Devices and sessions of this process. Thread-safe. Owns the registry: `close` closes it.

    Raises ConfigurationError when there is no device.
    """

    def __init__(
        self,
        registry: DeviceRegistry,
        limits: Limits | None = None,
        store: ContentStore | None = None,
        pool: Membership | None = None,
    ) -> None:
        """`pool`: devices of other daemons, behind those of the registry. The host owns it."""
        if not registry.devices and pool is None:
            whys = "; ".join(f"{one.name}: {one.why}" for one in registry.backends if one.why)
            raise ConfigurationError(f"there is no device ({whys or 'no backend was asked for'})")
        self.limits = limits or Limits()
        #: What is asked of devices without a session, by the bytes of the questions.
        self.questions = Staging(self.limits.in_flight_bytes, "questions")
        #: Of devices and of the ways between their sites: whoever measures tells it.
        self.measurements = HostMeasurements()
        #: Another one means that another life of the server answers.
        self.incarnation = secrets.token_bytes(16)
        #: Values that come from other daemons, and go to them.
        self.exchange = LiveExchange(self.limits)
        #: Those who are told of every run. Whoever is to be, joins before sessions are opened.
        self.observers: list[RunObserver] = []
        #: What makes spans of what is traced; None: nothing. It joins likewise.
        self.tracing: Tracing | None = None
        self._registry = registry
        self._pool = pool
        self.store = store or ContentStore()
        #: Writes contents to the cache, if there is one.
        self.cache_writer = (
            CacheWriter(self.store, self.store.cache) if self.store.cache is not None else None
        )
        #: Contents that come by tickets.
        self.admissions = Admissions()
        self._device_locks: dict[str, DeviceLock] = {}
        self._tenants = Tenants()
        #: Of those whom the daemon does not know by name, all together.
        self._quota = Quota()
        self._deadlines = Deadlines()
        self._room = MemoryReclaim()
        for giver in (self.store, self.cache_writer):
            if giver is not None:
                self._room.join(giver)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._reapers: dict[bytes, Timer] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._closed = False
        #: What sessions did that have ended.
        self._past = SessionCounts()
        #: How often a member that was ready was lost.
        self.lost_members = 0
        self._started = time.monotonic()
        if pool is not None:
            pool.start(self.incarnation, self._devices_changed, self.measurements)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._draining else "open"
        return f"<Host {state}: {len(self._devices)} devices, {len(self._sessions)} sessions>"

    def statistics(self) -> HostStatistics:
        parts = [one.statistics() for one in self._all_sessions()]
        names = [field.name for field in fields(SessionStatistics)]
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return HostStatistics(
            sessions=len(parts),
            timers=self._deadlines.pending,
            edges=self.exchange.open_edges,
            exchanged_bytes=self.exchange.budget.held_bytes,
            **sums,
        )

    def counts(self) -> SessionCounts:
        """What all sessions have done so far, also those that have ended."""
        with self._changed:
            past, present = self._past, list(self._sessions.values())
            return reduce(SessionCounts.plus, (one.counts for one in present), past)

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new sessions."""
        return self._draining

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """Of its pool; none without one."""
        return tuple(self._pool.members) if self._pool is not None else ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """By priority; those of members last."""
        return self._devices

    # Devices

    @property
    def _devices(self) -> tuple[Device, ...]:
        """By priority: those of this host first, then those of its members."""
        return (*self._registry.devices, *(self._pool.devices if self._pool is not None else ()))

    def _device(self, name: str) -> Device:
        """By name, in upper or lower case; "" is the first. Raises UnknownDeviceError, and why a member that
        would have it does not."""
        pooled = self._pool.devices if self._pool is not None else ()
        found = next((one for one in pooled if one.name.casefold() == name.casefold()), None)
        if found is not None:
            return found
        if (error := self._why_missing(name)) is not None:
            raise error
        if not name and pooled and not self._registry.devices:
            return pooled[0]
        return self._registry.device(name)

    def _why_missing(self, name: str) -> HeliographError | None:
        return self._pool.why_missing(name) if self._pool is not None else None

    def device_list(self) -> DeviceList:
        """All devices, and the backends and members behind them, with what could not start."""
        found = describe(self._devices, self._room)
        return DeviceList(found, tuple(self._registry.backends), SERVER, members=self.members)

    def links(self) -> tuple[Link, ...]:
        """Between the members of the pool that are ready, and from here to them; none without a pool."""
        reaches = self._pool.reaches if self._pool is not None else ()
        return tuple(self.measurements.way(one.a, one.b, one.reachable, one.why) for one in reaches)

    def memory(self, name: str = "") -> Memory:
        """A device's memory, now. Raises UnknownDeviceError, MemberLostError."""
        return memory_of(self._device(name), self._room)

    def query_ops(self, device: str, queries: Sequence[OpQuery]) -> tuple[OpAnswer, ...]:
        """Whether a device can run nodes like these. Raises UnknownDeviceError."""
        return query_ops(self._device(device), queries)

    def query_placement(self, device: str, buffer_type: str, tensors: Sequence[TensorType]) -> PlacementInfo:
        """What tensors would take of a device. Raises UnknownDeviceError, InvalidArgumentError."""
        return query_placement(self._device(device), buffer_type, tensors)

    def _devices_changed(self, change: MembershipChange) -> None:
        """Devices of a member came, or are gone. From the pool's threads, one change at a time."""
        with self._changed:
            self.lost_members += bool(change.lost)
            for device in change.appeared:
                self._device_locks.setdefault(device.name, DeviceLock())
        told = DeviceChange(
            change.member,
            describe(change.appeared, self._room),
            tuple(device.name for device in change.lost),
            change.why,
            self._daemons,
        )
        for session in self._all_sessions():
            session.change_devices(change, told)
        if change.lost:
            self.store.forget_lost()

    @property
    def _daemons(self) -> tuple[bytes, ...]:
        return tuple(self._pool.daemons) if self._pool is not None else ()

    # Tenants

    def tenants(self) -> tuple[TenantUsage, ...]:
        """What each tenant has, by name; those that had a session since the host began."""
        return self._tenants.usages()

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Another quota of a tenant, "" for all without a name, for what comes next; what is there stays."""
        if not tenant:
            self._quota = quota
        self._tenants.change(tenant, quota)

    @property
    def is_accepting(self) -> bool:
        """Whether a session can be opened, and would have a device."""
        with self._changed:
            is_open = not self._draining and not self._closed
        return is_open and any(one.lost is None for one in self._devices)

    @property
    def is_beyond_help(self) -> bool:
        """Whether all devices are lost, and some of this host's, which come back with a restart alone."""
        return bool(self._registry.devices) and all(one.lost is not None for one in self._devices)

    # Sessions

    @property
    def _features(self) -> tuple[str, ...]:
        """What it knows. Where contents will lie is worth a question only if some memory is elsewhere."""
        is_direct = self._pool is not None or any(one.intake is not None for one in self._registry.devices)
        return tuple(one for one in FEATURES if one != DIRECT_WEIGHTS or is_direct)

    def open_session(
        self,
        client: str = "",
        versions: tuple[int, int] = (VERSION_MIN, VERSION_MAX),
        features: Sequence[str] = FEATURES,
        secret: bytes = b"",
        principal: Principal = ANYBODY,
    ) -> SessionInfo:
        """A new session, which must be attached in time. `secret`: of its tenant, if it has one; `principal`:
        who opens it.

        Raises InvalidArgumentError, DrainingError, VersionMismatchError, LimitExceededError.
        """
        version = _common_version(versions)
        tenant = tenant_of(secret, principal.tenant) if secret else b""
        token = secrets.token_bytes(16)
        agreed = tuple(one for one in self._features if one in features)
        own = self._registry.acquire()
        try:
            session = self._add_session(token, client, own, tenant, WATCH in agreed, principal)
        except BaseException:
            self._registry.release(own)
            raise
        try:
            # Afterwards: what changes meanwhile the session is told.
            described = describe(session.devices, self._room)
        except BaseException as error:
            session.close(typed(error, "describing devices"))
            raise
        return SessionInfo(
            session=token,
            version=version,
            features=agreed,
            limits=self.limits,
            incarnation=self.incarnation,
            server=SERVER,
            devices=described,
            is_head=self._pool is not None,
            daemons=self._daemons,
        )

    def _add_session(
        self,
        token: bytes,
        client: str,
        own: Sequence[Device],
        tenant: bytes,
        watches: bool,
        principal: Principal,
    ) -> Session:
        # Who is added then is told of every change that is not in its devices.
        with self._changed:
            self._check_room()
            if not principal.tenant:
                principal = replace(principal, quota=self._quota)
            account = self._tenants.account(principal)
            found = (*own, *(self._pool.devices if self._pool is not None else ()))
            if not found:
                raise UnavailableError(
                    "the server has no device any more",
                    advice="load a backend, restart it, or start its members",
                )
            for device in found:
                self._device_locks.setdefault(device.name, DeviceLock())
            devices = SessionDevices(found, self._why_missing)
            holding = Holding(account)
            holding.take(QuotaKind.SESSIONS)
            share = self._tenants.enter(account, tenant)
            services = SessionServices(
                limits=self.limits,
                devices=devices,
                device_locks=DeviceShares(self._device_locks, share),
                deadlines=self._deadlines,
                room=self._room,
                exchange=self.exchange,
                contents=SessionWeights(
                    devices.present, self._room, self.store, tenant, self.cache_writer, account
                ),
                times=self.measurements.of_tenant(tenant),
                holding=holding,
            )
            session = Session(
                SessionIdentity(next(self._numbers), _printable(client), principal, watches),
                services,
                lambda _session: self._forget(token, own, holding, share),
                self.observers,
                self.tracing,
            )
            self._sessions[token] = session
            seconds = self.limits.attach_timeout_ms / 1e3
            self._reapers[token] = self._deadlines.after(seconds, lambda: self._reap(session))
        return session

    def session(self, token: bytes, principal: Principal | None = None) -> Session:
        """Raises SessionClosedError for a token that names none, or none any more, or, where it matters who
        asks, one of another tenant: the same words for all."""
        with self._changed:
            found = self._sessions.get(token)
        if found is None or (principal is not None and found.principal.tenant != principal.tenant):
            raise SessionClosedError("the session is unknown or was closed", advice="open another")
        return found

    def end_sessions(self, why: Callable[[Principal], HeliographError | None]) -> None:
        """Ends, on threads of their own, the sessions of whoever there is an error for."""
        for session in self._all_sessions():
            if (error := why(session.principal)) is not None and session.closed is None:
                logger.info("%s is ended: %s", session, error.message)
                ending = threading.Thread(target=session.close, args=(error,), name="heliograph-end")
                ending.start()

    def _check_room(self) -> None:
        if self._draining:
            raise DrainingError(
                "the server is draining, and takes no new session", advice="try later, or elsewhere"
            )
        if len(self._sessions) >= MAX_SESSIONS:
            raise LimitExceededError(f"{MAX_SESSIONS} sessions are open", advice="try later")

    def _reap(self, session: Session) -> None:
        if not session.is_attached:
            logger.info("%s: the command stream did not come in time", session, extra=session.log_fields)
            error = SessionClosedError("the command stream did not come in time", advice="open another")
            # Closing may wait for a compile, which the timer thread must not.
            threading.Thread(target=session.close, args=(error,), name="heliograph-reaper").start()

    def _forget(self, token: bytes, devices: Sequence[Device], holding: Holding, share: QuotaShare) -> None:
        self._registry.release(devices)
        holding.close()
        self._tenants.leave(share)
        with self._changed:
            if (session := self._sessions.pop(token, None)) is not None:
                self._past = self._past.plus(replace(session.counts, runs_waiting=0, runs_running=0))
            if (reaper := self._reapers.pop(token, None)) is not None:
                self._deadlines.cancel(reaper)
            self._changed.notify_all()

    def _all_sessions(self) -> list[Session]:
        with self._changed:
            return list(self._sessions.values())

    @property
    def sessions(self) -> Sequence[Session]:
        """Those that are open, by number."""
        return sorted(self._all_sessions(), key=lambda one: one.number)

    @property
    def uptime_seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started

    def devices_now(self) -> tuple[DeviceStatus, ...]:
        """All devices with their memory and how long they were busy; asking may take as long as a lost member
        may say nothing."""
        return tuple(status_of(one, self._room, self._device_locks.get(one.name)) for one in self._devices)

    # The end

    def drain(self) -> None:
        """From now on refuses new sessions. Idempotent."""
        with self._changed:
            self._draining = True
        for session in self._all_sessions():
            session.watch(self._notify)

    def wait_quiet(self, timeout: float) -> bool:
        """After `drain`: waits until no session has work, `timeout` seconds at most. Whether so.

        A client asks for large results once it knows that their run has ended, so for that moment the last
        word is not spoken: all sessions must have been quiet for LINGER_SECONDS.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while self._changed.wait_for(self._is_quiet, max(0.0, end - time.monotonic())):
                if self._closed or not self._sessions:
                    return True
                came = partial(self._came_since, self._commands())
                if not self._changed.wait_for(came, LINGER_SECONDS):
                    return True
        return False

    def undo_drain(self) -> None:
        """New sessions are welcome again, unless it is closed. Idempotent."""
        with self._changed:
            self._draining = self._closed
            self._changed.notify_all()

    @property
    def busy_sessions(self) -> int:
        """How many have work."""
        return sum(not one.is_quiet for one in self._all_sessions())

    def hurry(self) -> None:
        """Ends `wait_quiet`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        return (
            self._closed or not self._draining or all(session.is_quiet for session in self._sessions.values())
        )

    def _came_since(self, commands: int) -> bool:
        return self._closed or self._commands() != commands

    def _commands(self) -> int:
        """How many commands came so far of sessions that are there."""
        return sum(session.commands for session in self._sessions.values())

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close_sessions(self, error: HeliographError) -> None:
        """Ends all sessions at once, each within its bound."""
        closers = [
            threading.Thread(target=one.close, args=(error,), name="heliograph-close")
            for one in self._all_sessions()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(3 * CLOSE_SECONDS)

    def close(self) -> None:
        """Ends all sessions, threads and devices. Idempotent."""
        self.drain()
        self.close_sessions(DrainingError("the server is shutting down", advice="try later, or elsewhere"))
        self.hurry()
        self.exchange.close()
        if self.cache_writer is not None:
            self.cache_writer.close()
        self.store.close()
        self.admissions.close()
        self._deadlines.close()
        if self._pool is not None:
            self._pool.close()
        self._registry.close()


def _common_version(versions: tuple[int, int]) -> int:
    lowest, highest = versions
    if lowest > VERSION_MAX or highest < VERSION_MIN or lowest > highest:
        raise VersionMismatchError(
            f"the client speaks versions {lowest} to {highest}, this server {VERSION_MIN} to {VERSION_MAX}",
            advice="upgrade one side",
        )
    return min(highest, VERSION_MAX)


def _printable(client: str) -> str:
    """A name that is safe in a log."""
    return "".join(one if one.isprintable() else "?" for one in client[:100])
