"""The host: devices, and the sessions that share them.

Any thread may call it. Opening and closing may block, so the event loop uses other threads for
them.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce

from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto import (
    DIRECT_WEIGHTS,
    FEATURES,
    HAND_OVER,
    LEASE,
    VERSION_MAX,
    VERSION_MIN,
    __version__,
)
from heliograph_proto.codec import packing
from heliograph_proto.devices import (
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
    DrainingError,
    HeliographError,
    SessionClosedError,
    UnavailableError,
)
from heliograph_proto.sessions import (
    DeviceStatus,
    Limits,
    Quota,
    SessionInfo,
    SessionSnapshot,
    StayingSession,
    TenantUsage,
)
from heliograph_proto.types import TensorType
from heliograph_server.compile.services import SessionServices
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.resources.device_queue import DeviceLock, DeviceShares
from heliograph_server.resources.failures import typed
from heliograph_server.resources.measurements import HostMeasurements
from heliograph_server.resources.membership import (
    Membership,
    MembershipChange,
    Reachability,
    SessionDevices,
)
from heliograph_server.resources.memories import query_ops, query_placement
from heliograph_server.resources.principals import ANYBODY, Principal
from heliograph_server.resources.quotas import Account, Holding, QuotaKind, QuotaShare, Tenants
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines, Timer
from heliograph_server.runtime.activity import SessionActivity
from heliograph_server.runtime.backends import HostBackends
from heliograph_server.runtime.handing import Handing
from heliograph_server.runtime.heads import Heads
from heliograph_server.runtime.images import SessionImages
from heliograph_server.runtime.listing import describe, memory_of, status_of
from heliograph_server.runtime.moves import Moves
from heliograph_server.runtime.opening import Opening, common_version, no_device
from heliograph_server.runtime.quiet import wait_quiet
from heliograph_server.runtime.upload_tickets import Admissions
from heliograph_server.session.run_timeline import RunObserver, Tracing
from heliograph_server.session.session import CLOSE_SECONDS, Session
from heliograph_server.session.staging import Staging
from heliograph_server.session.statistics import SessionCounts, SessionStatistics
from heliograph_server.state.owners import owner_of
from heliograph_server.state.snapshots import (
    ASKED_SECONDS,
    Snapshots,
    digest_of_secret,
    not_durable,
    recover,
)
from heliograph_server.weights.cache_writer import CacheWriter
from heliograph_server.weights.store import ContentStore, tenant_of

logger = logging.getLogger(__name__)

SERVER = f"heliograph/{__version__}"
#: The most for all tenants together, unless the configuration says otherwise.
MOST_IN_ALL = Quota(sessions=1000)
#: The quota of a host that serves its own process only.
NO_QUOTA = Quota(sessions=0)
#: The advice for sessions that end with their daemon.
GONE = "connect again, here later or elsewhere, compile and run: all data of the session is gone"


def shut_down() -> DrainingError:
    """Return the error of the sessions that end with their daemon."""
    return DrainingError("the server has shut down", advice=GONE)


@dataclass(frozen=True, slots=True)
class HostStatistics(SessionStatistics):
    """The resources that all sessions hold now. All zero without sessions."""

    sessions: int = 0
    timers: int = 0
    #: Open ends of edges to other daemons.
    edges: int = 0


class Host:
    """The devices and sessions of this process. Thread-safe. Owns the registry: `close` closes it.

    Raises ConfigurationError when there is no device.
    """

    #: The longest time for which a session outlives a broken connection.
    lease_seconds = 0.0
    #: Takes snapshots of durable sessions; None: this host keeps no state. Set before sessions are opened.
    snapshots: Snapshots | None = None

    def __init__(
        self,
        registry: Registry,
        limits: Limits | None = None,
        store: ContentStore | None = None,
        pool: Membership | None = None,
        total: Quota = MOST_IN_ALL,
    ) -> None:
        """`pool` has devices of other daemons, which follow those of the registry. The host owns
        it. `total`: the sessions and staged bytes of all tenants together."""
        if not registry.devices and pool is None:
            raise no_device(registry)
        self.limits = limits or Limits()
        #: Memory of requests without a session, such as questions about devices, by tenant.
        self._questions: dict[str, Staging] = {}
        #: Measurements of devices and of the links between their sites.
        self.measurements = HostMeasurements()
        #: Identifies this run of the server, or its time after a drain that ended all sessions.
        self.incarnation = secrets.token_bytes(16)
        #: Values from and to other daemons.
        self.exchange = LiveExchange(self.limits)
        #: Observers of every run. They are added before sessions are opened.
        self.observers: list[RunObserver] = []
        #: Creates spans for traced runs; None: no tracing. Set before sessions are opened.
        self.tracing: Tracing | None = None
        self._registry, self._pool = registry, pool
        self.store = store or ContentStore()
        #: Writes contents to the cache, if there is one.
        self.cache_writer = (
            CacheWriter(self.store, self.store.cache) if self.store.cache is not None else None
        )
        #: Contents that are uploaded by tickets.
        self.admissions = Admissions()
        self._device_locks: dict[str, DeviceLock] = {}
        self._tenants = Tenants(total)
        #: The quota that all tenants without a name share.
        self._quota = NO_QUOTA
        self._deadlines = Deadlines()
        self._room = MemoryReclaim(self.store, self.cache_writer)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._reapers: dict[bytes, Timer] = {}
        #: Sessions of images, those that go elsewhere, and values between heads and members that drain.
        self.images, self.moves = SessionImages(self), Moves(self)
        self.heads, self.handing = Heads(self), Handing(self)
        self._numbers = itertools.count(1)
        self._draining, self._closed, self._activity = False, False, SessionActivity()
        #: Lost devices of this host that sessions know of. They stay listed, with the reason.
        self._known_lost: set[Device] = set()
        #: Totals of sessions that have ended.
        self._past = SessionCounts()
        #: The number of losses of ready members.
        self.lost_members = 0
        self._started = time.monotonic()
        #: Lists, unloads and loads backends.
        self.backends = HostBackends(
            registry, self._changed, self._all_sessions, self._devices_changed, self._room.make
        )
        if pool is not None:
            pool.start(lambda: self.incarnation, self._devices_changed, self.measurements)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._draining else "open"
        return f"<Host {state}: {len(self.devices)} devices, {len(self._sessions)} sessions>"

    def statistics(self) -> HostStatistics:
        parts = [one.statistics() for one in self._all_sessions()]
        names = [field.name for field in fields(SessionStatistics)]
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return HostStatistics(
            sessions=len(parts),
            timers=self._deadlines.pending,
            edges=self.exchange.open_edges,
            **sums,
        )

    def counts(self) -> SessionCounts:
        """The totals of all sessions, including those that have ended."""
        with self._changed:
            past, present = self._past, list(self._sessions.values())
            return reduce(SessionCounts.plus, (one.counts for one in present), past)

    @property
    def is_draining(self) -> bool:
        """True if it accepts no new sessions."""
        return self._draining

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """The members of its pool. Empty without a pool."""
        return tuple(self._pool.members) if self._pool is not None else ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices by priority: those of this host first, then those of its members."""
        return (*self._registry.devices, *(self._pool.devices if self._pool is not None else ()))

    # Devices
    def _device(self, name: str) -> Device:
        """Return a device by name, ignoring case; "" is the first.

        Raises UnknownDeviceError, and the reason why a member does not offer the device.
        """
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
        """All devices, backends and members, with the reasons for those that could not start."""
        found = describe(self.devices, self._room)
        return DeviceList(found, tuple(self._registry.backends), SERVER, members=self.members)

    def links(self) -> tuple[Link, ...]:
        """The links between ready members of the pool, and from here to them. Empty without a
        pool."""
        reaches = self._pool.reaches if self._pool is not None else ()
        status = self.measurements.link_status
        return tuple(status(one.a, one.b, one.reachable, one.why, one.seconds) for one in reaches)

    @property
    def relayed(self) -> tuple[Reachability, ...]:
        """The pairs of its pool's members between which this host relays values."""
        return tuple(self._pool.relayed) if self._pool is not None else ()

    def memory(self, name: str = "") -> Memory:
        """A device's memory now. Raises UnknownDeviceError, MemberLostError."""
        return memory_of(self._device(name), self._room)

    def memory_for(self, name: str, principal: Principal) -> Memory:
        """Return a device's memory now, of which the caller's quota may leave less. Raises as
        `memory`."""
        found = self.memory(name)
        left = self.account(principal).left(QuotaKind.MEMORY)
        return found if left is None else replace(found, free_bytes=min(found.free_bytes, left))

    def query_ops(self, device: str, queries: Sequence[OpQuery]) -> tuple[OpAnswer, ...]:
        """The device's support of each of these nodes. Raises UnknownDeviceError."""
        return query_ops(self._device(device), queries)

    def query_placement(self, device: str, buffer_type: str, tensors: Sequence[TensorType]) -> PlacementInfo:
        """The sizes of tensors on a device. Raises UnknownDeviceError, InvalidArgumentError."""
        return query_placement(self._device(device), buffer_type, tensors)

    def _devices_changed(self, change: MembershipChange) -> None:
        """Apply a change of members' devices, or of a backend's. Called from the pool's threads,
        one change of a member at a time."""
        if change.leaving:
            self.handing.begin(change)
        with self._changed:
            self.lost_members += bool(change.lost and change.member)
            for device in change.appeared:
                self._device_locks.setdefault(device.name, DeviceLock())
        device_change = DeviceChange(
            change.member,
            describe(change.appeared, self._room),
            tuple(device.name for device in change.lost),
            change.why,
            self.daemons,
            self._draining,
        )
        sessions = self._all_sessions()
        # Sessions have lost the devices of an unloaded backend already.
        changed = [one for one in sessions if one.change_devices(change) or not change.member]
        change.applied()
        for session in changed:
            session.tell_devices(device_change)
        if change.lost:
            self.store.forget_lost()
            self.handing.look()

    def _found_lost(self) -> None:
        """Tell all sessions of the devices of this host that are lost, once each."""
        with self._changed:
            found = [one for one in self._registry.devices if one.lost is not None]
            news = [one for one in found if one not in self._known_lost]
            self._known_lost.update(news)
        for device in news:
            why = device.lost.message if device.lost is not None else ""
            logger.error("%s; it stays listed until the daemon restarts", why)
            change = DeviceChange("", (), (device.name,), why, self.daemons, self._draining)
            for session in self._all_sessions():
                session.tell_devices(change)

    @property
    def daemons(self) -> tuple[bytes, ...]:
        return tuple(self._pool.daemons) if self._pool is not None else ()

    # Tenants

    def account(self, principal: Principal) -> Account:
        """Return the account of a caller."""
        return self._tenants.account(principal.tenant, principal.quota if principal.tenant else self._quota)

    def questions(self, principal: Principal) -> Staging:
        """Return what counts the memory of a caller's requests without a session. Event loop
        only."""
        if (found := self._questions.get(principal.tenant)) is None:
            most_bytes, holding = self.limits.most_request_bytes, Holding(self.account(principal))
            found = self._questions[principal.tenant] = Staging(most_bytes, "questions", holding)
        return found

    def tenants(self) -> tuple[TenantUsage, ...]:
        """The usage of each tenant that made a call, by name."""
        return self._tenants.usages()

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Change the quota of a tenant; "" is all without a name. It limits new usage; existing
        usage stays."""
        if not tenant:
            self._quota = quota
        self._tenants.change(tenant, quota)

    @property
    def is_accepting(self) -> bool:
        """True if a session can be opened, and would have a device."""
        with self._changed:
            is_open = not self._draining and not self._closed
        return is_open and any(one.lost is None for one in self.devices)

    @property
    def is_beyond_help(self) -> bool:
        """True if all devices are lost, including some of this host, which only a restart brings
        back."""
        return bool(self._registry.devices) and all(one.lost is not None for one in self.devices)

    # Sessions

    @property
    def features(self) -> tuple[str, ...]:
        """The supported features. Direct uploads are among them only if some memory is on another
        daemon."""
        is_direct = self._pool is not None or any(one.intake is not None for one in self._registry.devices)
        always = (one for one in FEATURES if one != DIRECT_WEIGHTS or is_direct)
        return (*always, HAND_OVER, *packing.features())

    def open_session(
        self,
        client: str = "",
        versions: tuple[int, int] = (VERSION_MIN, VERSION_MAX),
        features: Sequence[str] = FEATURES,
        secret: bytes = b"",
        principal: Principal = ANYBODY,
        lease_ms: int = 0,
        durable: bool = False,
        snapshot_ms: int = 0,
    ) -> SessionInfo:
        """Open a session, which must be attached in time.

        `secret` identifies its tenant, if it has one; `principal` is the caller. `lease_ms` is the
        lease that the client wishes for. `durable`: take snapshots of it, if this host keeps state.
        Raises InvalidArgumentError, DrainingError, VersionMismatchError, LimitExceededError.
        """
        durable = durable and self.snapshots is not None
        version = common_version(versions)
        tenant = tenant_of(secret, principal.tenant) if secret else b""
        token = secrets.token_bytes(16)
        agreed = tuple(one for one in self.features if one in features)
        granted_ms = min(lease_ms, round(self.lease_seconds * 1e3)) if LEASE in agreed else 0
        opening = Opening(token, client, tenant, agreed, principal, granted_ms / 1e3, is_durable=durable)
        session = self.add_session(opening)
        owner = owner_of(session, tenant, principal, agreed, version, snapshot_ms, granted_ms)
        self.images.owners[session] = owner
        if durable and self.snapshots is not None:
            self.snapshots.enter(session, digest_of_secret(token), owner)
            self.snapshots.begin(session)
        try:
            # After the session was added, which receives all later changes.
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
            daemons=self.daemons,
            durable=durable,
            lease_ms=granted_ms,
        )

    def snapshot(self, session: Session, wait_seconds: float = ASKED_SECONDS) -> SessionSnapshot:
        """As `Snapshots.take`. Raises UnsupportedError, too, if this host keeps no state."""
        if self.snapshots is None:
            raise not_durable()
        return self.snapshots.take(session, wait_seconds)

    # Sessions of another daemon

    def recover(self) -> None:
        """Restore the sessions that an earlier daemon left on disk, before clients are served. Each
        keeps its handles and waits for its client. Blocks."""
        if self.snapshots is not None:
            recover(self.snapshots, self._pool, self._registry.devices, self.images.reopen)

    def _take_restored(self, token: bytes) -> Session | None:
        """Give a restored session the secret that its client shows. Lock held."""
        place = self.images.claim(token)
        session = self._sessions.pop(place, None) if place is not None else None
        if session is None or place is None:
            return None
        self._sessions[token] = session
        if (reaper := self._reapers.pop(place, None)) is not None:
            self._reapers[token] = reaper
        return session

    def add_session(self, opening: Opening) -> Session:
        """Add a session. Raises the errors of `open_session`."""
        own = self._registry.acquire()
        try:
            return self._session_on(own, opening)
        except BaseException:
            self._registry.release(own)
            raise

    def _session_on(self, own: Sequence[Device], opening: Opening) -> Session:
        # Under the lock: a session that is added here receives every change that its devices lack.
        with self._changed:
            if self._draining:
                raise DrainingError(
                    "the server is draining and accepts no new sessions", advice="try later, or elsewhere"
                )
            account = self.account(opening.principal)
            principal = replace(opening.principal, quota=account.quota)
            # A backend may have been unloaded or loaded meanwhile. The first one is the default.
            found = tuple(sorted(self.devices, key=lambda one: one.is_draining))
            if not found:
                raise UnavailableError(
                    "the server has no devices left",
                    advice="load a backend, restart it, or start its members",
                )
            for device in found:
                self._device_locks.setdefault(device.name, DeviceLock())
            devices = SessionDevices(found, self._why_missing)
            holding = Holding(account)
            holding.take(QuotaKind.SESSIONS)
            share = self._tenants.enter(account, opening.tenant)
            services = SessionServices(
                limits=self.limits,
                devices=devices,
                device_locks=DeviceShares(self._device_locks, share),
                deadlines=self._deadlines,
                room=self._room,
                exchange=self.exchange,
                contents=opening.weights(devices.present, self._room, self.store, self.cache_writer, account),
                times=self.measurements.of_tenant(opening.tenant),
                holding=holding,
                flow=share,
                found_lost=self._found_lost,
                keeps_requests=opening.is_durable or opening.may_move or self._pool is not None,
                is_leased=opening.lease_seconds > 0,
            )
            session = Session(
                opening.identity(next(self._numbers), principal),
                services,
                lambda session: self._forget(session, own, holding, share),
                self.observers,
                self.tracing,
            )
            self._sessions[opening.token] = session
            if not opening.is_restored:
                seconds = self.limits.attach_timeout_ms / 1e3
                self._reapers[opening.token] = self._deadlines.after(seconds, lambda: self.reap(session))
        return session

    def session(self, token: bytes, principal: Principal | None = None) -> Session:
        """Return an open session. Raises SessionClosedError for an unknown or closed one.

        With a principal, sessions of other tenants count as unknown: the answer is the same.
        """
        with self._changed:
            found = self._sessions.get(token)
            if found is None:
                found = self._take_restored(token)
        has_left = found is None or found.closed is not None
        if has_left and (moved := self.moves.where(token, principal)) is not None:
            raise moved
        if found is None and self.snapshots is not None and self.snapshots.has_kept(digest_of_secret(token)):
            raise UnavailableError(
                "the daemon is drained; the session stays on disk, and goes on with the next one",
                advice="attach again in a moment",
            )
        if found is None or (principal is not None and found.principal.tenant != principal.tenant):
            raise SessionClosedError("the session is unknown or was closed", advice="open another")
        return found

    def end_sessions(self, error_of: Callable[[Principal], HeliographError | None]) -> None:
        """End the sessions of those principals that have an error, each on a thread of its own."""
        for session in self._all_sessions():
            if (error := error_of(session.principal)) is not None and session.closed is None:
                logger.info("%s is ended: %s", session, error.message)
                ending = threading.Thread(target=session.close, args=(error,), name="heliograph-end")
                ending.start()

    def drop_unmatched_transfers(self) -> None:
        """End what has waited for its other half since the last call: see `Session`."""
        for session in self._all_sessions():
            session.drop_unmatched_transfers()

    def reap(self, session: Session) -> None:
        """End a session whose client has not attached in time."""
        if not session.is_attached and session.closed is None:
            logger.info("%s: the command stream was not opened in time", session, extra=session.log_fields)
            error = SessionClosedError("the command stream was not opened in time", advice="open another")
            # Closing may wait for a compile; the timer thread must not.
            threading.Thread(target=session.close, args=(error,), name="heliograph-reaper").start()

    def _forget(
        self, session: Session, devices: Sequence[Device], holding: Holding, share: QuotaShare
    ) -> None:
        if self.snapshots is not None:
            self.snapshots.leave(session)
        self._registry.release(devices)
        holding.close()
        self._tenants.leave(share)
        with self._changed:
            # A restored session has got another token since.
            token = next((token for token, one in self._sessions.items() if one is session), b"")
            if self._sessions.pop(token, None) is not None:
                self._past = self._past.plus(replace(session.counts, runs_waiting=0, runs_running=0))
            if (reaper := self._reapers.pop(token, None)) is not None:
                self._deadlines.cancel(reaper)
            self.images.forget(session, token)
            self.moves.forget(session)
            self._changed.notify_all()

    def token_of(self, session: Session) -> bytes | None:
        """Return the secret of a session; None if no client has shown it since a restart."""
        with self._changed:
            found = next((token for token, one in self._sessions.items() if one is session), None)
        return None if found is None or self.images.is_unclaimed(found) else found

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Make a call on a thread of its own after a time, unless the host is closed before."""
        start = lambda: threading.Thread(target=call, name="heliograph-later").start()  # noqa: E731
        self._deadlines.after(seconds, start)

    def _all_sessions(self) -> list[Session]:
        with self._changed:
            return list(self._sessions.values())

    @property
    def sessions(self) -> Sequence[Session]:
        """The open sessions, by number."""
        return sorted(self._all_sessions(), key=lambda one: one.number)

    @property
    def uptime_seconds(self) -> float:
        """The time in seconds since the host was created."""
        return time.monotonic() - self._started

    def devices_now(self) -> tuple[DeviceStatus, ...]:
        """The status of all devices. May take as long as the silence after which a member is
        lost."""
        return tuple(status_of(one, self._room, self._device_locks.get(one.name)) for one in self.devices)

    def busy_seconds(self) -> dict[str, float]:
        """The total time in which each device that sessions have used computed, by its name."""
        with self._changed:
            locks = list(self._device_locks.items())
        return {name: one.busy_seconds for name, one in locks}

    # Draining and closing

    def drain(self) -> None:
        """Refuse new sessions from now on. Idempotent."""
        with self._changed:
            is_news, self._draining = not self._draining, True
            if is_news:
                self.heads.begin()
        for session in self._all_sessions():
            session.watch(self._notify)
        if is_news:
            self._tell_draining()

    def _tell_draining(self) -> None:
        """Tell the clients that watch devices, such as heads, whether this host drains."""
        change = DeviceChange("", daemons=self.daemons, draining=self._draining)
        for session in self._all_sessions():
            session.tell_devices(change)

    def wait_quiet(self, timeout: float) -> bool:
        """After `drain`, wait until no session has work, and no head has values here, at most
        `timeout` seconds. Return True if so."""
        is_over = lambda: self._closed  # noqa: E731
        return wait_quiet(self._changed, self._sessions.values, self._is_quiet, is_over, timeout)

    def undo_drain(self) -> None:
        """Accept new sessions again, unless the host is closed. Idempotent."""
        with self._changed:
            self._draining = self._closed
            self._changed.notify_all()
        self._tell_draining()

    def count_busy(self) -> int:
        """The number of sessions with work, or that have sent a command since an earlier count, in
        the last second."""
        return self._activity.count_busy(self._all_sessions())

    def hurry(self) -> None:
        """End `wait_quiet` at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_quiet(self, session: Session) -> bool:
        return not self._draining or (session.is_quiet and not self.heads.waits_for(session))

    def told_by_head(self, session: Session, staying: Sequence[StayingSession]) -> None:
        """As `Heads.tell`."""
        self.heads.tell(session, staying)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close_sessions(self, error: HeliographError, *, ends: bool = True) -> None:
        """End all sessions in parallel, and wait for their work. `ends`: the daemon ends too."""
        if self.snapshots is not None:
            self.snapshots.keep_all(self._pool if ends else None)
        closers = [
            threading.Thread(target=one.close, args=(error,), name="heliograph-close")
            for one in self._all_sessions()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(2 * CLOSE_SECONDS)

    def close(self) -> None:
        """End all sessions, threads and devices. Idempotent."""
        self.drain()
        self.close_sessions(shut_down())
        self.handing.close()
        self.hurry()
        self.exchange.close()
        if self.cache_writer is not None:
            self.cache_writer.close()
        self.store.close()
        self.admissions.close()
        self._deadlines.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self._pool is not None:
            self._pool.close()
        self._registry.close()
