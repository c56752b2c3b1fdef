"""The daemon: a gRPC server around a host, from its start to its end.

    starting ──(devices ready)──▸ serving ──(SIGTERM, SIGINT, an operator)──▸ draining ──▸ stopped

Ports are bound first, so that a mistake shows at once. `health` reports "ready" from the start of
the devices until draining begins. Draining lets running work end, for `drain_seconds` at most; a
second signal cuts it short. `runtime.draining` has the drain of an operator.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from grpc import aio
from grpc_reflection.v1alpha import reflection

from heliograph.transport.handshake import PING_PART
from heliograph_backends.host_memory.buffers import machine_memory_bytes
from heliograph_backends.registry import open_registry
from heliograph_proto.addresses import Address, Shown, nothing_shown
from heliograph_proto.codec import packing
from heliograph_proto.sessions import Quota
from heliograph_proto.v1 import (
    admin_pb2,
    bulk_pb2,
    command_pb2,
    device_pb2,
    keeper_pb2,
    model_pb2,
    peer_pb2,
    plan_pb2,
    session_pb2,
)
from heliograph_server.auth.access import Access
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.config.config import ServerConfig, Sources
from heliograph_server.config.sockets import unbind
from heliograph_server.daemon.garbage import collect_garbage, take_over, trim_memory
from heliograph_server.daemon.health import Health
from heliograph_server.daemon.reflection import ReflectionService
from heliograph_server.daemon.reload import Configuration, FileWatch
from heliograph_server.daemon.systemd import ServiceManager
from heliograph_server.gateways.listeners import Gateways
from heliograph_server.links.aio import LoopPeers
from heliograph_server.links.handing import hand_over
from heliograph_server.links.keeping import KeeperMedium
from heliograph_server.links.links import PoolCredentials
from heliograph_server.resources.membership import Membership
from heliograph_server.resources.peer_rules import PeerRules, rules_of
from heliograph_server.rpc.admin_service import AdminService
from heliograph_server.rpc.audit import Refusals
from heliograph_server.rpc.bulk.service import BulkService
from heliograph_server.rpc.command_service import CommandService
from heliograph_server.rpc.command_socket.sockets import CommandSockets
from heliograph_server.rpc.device_service import DeviceService, ModelService
from heliograph_server.rpc.direct.port import DirectPort
from heliograph_server.rpc.direct.transfers import DirectTransfers
from heliograph_server.rpc.keeping.service import KeeperService
from heliograph_server.rpc.listening import bind, connection_options
from heliograph_server.rpc.operators import Operators
from heliograph_server.rpc.peer_service import PeerService
from heliograph_server.rpc.plan_service import PlanService
from heliograph_server.rpc.requests import Requests
from heliograph_server.rpc.session_service import SessionService
from heliograph_server.rpc.shared_memory_service import MemoryService
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.host import Host, shut_down
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.keeper import Keeper
from heliograph_server.session.staging import HEADER_BYTES
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.links import KeptLinks
from heliograph_server.state.medium import Medium
from heliograph_server.state.snapshots import Snapshots
from heliograph_server.state.store import StateStore
from heliograph_server.telemetry.audit import AuditLog, reloaded
from heliograph_server.telemetry.process_facts import server_facts
from heliograph_server.telemetry.telemetry import Telemetry
from heliograph_server.telemetry.traces import Traces
from heliograph_server.web.listener import Dashboard
from heliograph_server.weights.disk_cache import DiskCache
from heliograph_server.weights.model_files import ModelFiles
from heliograph_server.weights.store import ContentStore

logger = logging.getLogger(__name__)

#: Names of the services for health and reflection.
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (session_pb2, "SessionService"),
        (device_pb2, "DeviceService"),
        (plan_pb2, "PlanService"),
        (bulk_pb2, "BulkService"),
        (command_pb2, "CommandService"),
        (model_pb2, "ModelService"),
        (peer_pb2, "PeerService"),
        (keeper_pb2, "KeeperService"),
        (admin_pb2, "AdminService"),
    )
)

BULK_THREADS = 4
#: Threads that forward contents to other daemons, each to one daemon that may be slow.
RELAY_THREADS = 16
#: Threads that end sessions.
CLOSE_THREADS = 16
#: Threads that query the memory of devices, which may be on a slow host.
ASK_THREADS = 8
#: Threads that answer long queries about ops and tensors.
LISTEN_THREADS = 2
#: Threads that list and describe models, which may read large files.
READ_THREADS = 2
#: Threads that write values from other daemons to slow devices.
MOVE_THREADS = 2
#: Threads that decode large requests. Python runs one at a time.
DECODE_THREADS = 1
#: Threads that move bytes of direct connections.
DIRECT_THREADS = 4
#: Threads that hand sessions to other daemons, that send copies ahead, and that restore theirs.
LEAVE_THREADS, PREPARE_THREADS, TAKE_THREADS = 4, 4, 8
#: Threads that make memory for the states of other daemons.
KEEP_THREADS = 2
#: How long calls may take to end once their sessions are closed.
STOP_SECONDS = 2.0
#: How long work may take to end after the second signal.
HURRY_SECONDS = 5.0
STARTER = "heliograph-start"


def server_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """gRPC's options: message size, no shared ports, and keepalive that detects a lost client."""
    ping_ms = round(config.silence_seconds * PING_PART * 1e3)
    answer_ms = round(config.silence_seconds * (1 - PING_PART) * 1e3)
    # A piece of an upload may be larger than any other message.
    most_bytes = max(config.limits.message_bytes, config.limits.chunk_bytes + HEADER_BYTES)
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Heads of pools and other daemons ping this one often.
        ("grpc.http2.min_ping_interval_without_data_ms", 20),
        # grpcio obeys keepalive_timeout_ms only together with this option.
        ("grpc.http2.ping_timeout_ms", answer_ms),
    ]


class Daemon:
    """One gRPC server and its host. `open_host` starts the devices; it blocks."""

    def __init__(self, config: ServerConfig, open_host: Callable[[], Host] | None = None) -> None:
        #: The states of other daemons.
        self.keeper = Keeper(config.kept_state_size, config.kept_state_seconds, secrets.token_bytes(16))
        self._open_host = open_host or (lambda: open_host_of(config, self.keeper.identity))
        self._slot = HostSlot(most_calls=config.max_calls)
        self.telemetry = Telemetry(config, self._slot)
        sizes = {
            "bulk": BULK_THREADS,
            "close": CLOSE_THREADS,
            "ask": ASK_THREADS,
            "listen": LISTEN_THREADS,
            "read": READ_THREADS,
            "relay": RELAY_THREADS,
            "leave": LEAVE_THREADS,
            "prepare": PREPARE_THREADS,
            "take": TAKE_THREADS,
            "move": MOVE_THREADS,
            "decode": DECODE_THREADS,
            "keep": KEEP_THREADS,
            "direct": DIRECT_THREADS,
        }
        self._pools = {name: ThreadPoolExecutor(count, f"heliograph-{name}") for name, count in sizes.items()}
        self._keeping = KeeperService(
            self.keeper, self._pools["keep"], config.limits.chunk_bytes, lambda: self._config.quota
        )
        self._turns = CompileTurns()
        self._server: aio.Server | None = None
        self._sockets = CommandSockets()
        self._memory = MemoryService(self._slot, self._sockets)
        self._transfers = DirectTransfers(self._pools["direct"])
        self._direct = DirectPort(self._sockets, self._transfers.take, config.silence_seconds)
        self.health = Health(SERVICES, config.health_listen)
        #: Files that are read again when they change, and on SIGHUP.
        self.watch = FileWatch(on_reload=lambda *found: self.audit.record(reloaded(*found)))
        self.telemetry.facts.reloads = self.watch.outcomes
        self.telemetry.facts.failing = self.watch.failing
        self.telemetry.facts.kept = self._keeping.figures
        self.configuration = Configuration(config, self._reconfigure)
        self.draining = Draining(self._slot, lambda: self._config.drain_seconds, self.health.update)
        #: The addresses that it listens at, with their actual ports.
        self.addresses: tuple[Address, ...] = ()
        self._facts: Mapping[str, str] = {}
        #: The credentials presented to other daemons; read at the start.
        self._shown: Shown = nothing_shown
        self._peers: LoopPeers | None = None
        self._peer_service: PeerService | None = None
        #: Tasks that give memory back from time to time.
        self._keepers: list[asyncio.Task[None]] = []
        self.host: Host | None = None
        #: The actions of operators; in its file, if there is one, once it starts.
        self.audit = AuditLog()
        #: Tokens, certificates and quotas, once it starts.
        self.access: Access | None = None
        self._traces = Traces(config.traces)
        #: The listeners for clients of other systems.
        self.gateways = Gateways(config, self._slot, self._turns)
        self.operators = Operators(self._slot, self.draining, self._pools["close"])
        self.dashboard = Dashboard(config, self._slot, self.draining, self.gateways.models)

    def __repr__(self) -> str:
        return f"<Daemon at {', '.join(map(str, self.addresses)) or 'no address yet'}: {self.host}>"

    @property
    def _config(self) -> ServerConfig:
        return self.configuration.now

    async def start(self) -> None:
        """Bind, serve, and start the devices. Raises ConfigurationError; `stop` cleans up."""
        self._shown = pool_credentials(self._config)
        _peer_rules(self._config)  # mistakes show at once
        self.access = Access(self._config, self._slot.refused)
        self.audit = AuditLog(self._config.audit_log)
        if self.access.gate is not None:
            self.access.gate.on_refused = Refusals(self.audit).record
        self.telemetry.facts.certificate_expiry = self.access.certificate_expiry
        for kind, file in self.access.files:
            self.watch.add(kind, file)
        self.watch.start()
        self._server = aio.server(
            interceptors=self.access.interceptors,
            options=server_options(self._config) + connection_options(self._config),
        )
        self._add_services(self._server)
        await self.health.start()
        for address in self._config.addresses:
            self.addresses += (bind(self._server, address, self.access.credentials(address)),)
        self.gateways.bind(self.access)
        self.dashboard.bind(self.access, self.operators, self.audit)
        self.telemetry.facts.models = self.gateways.models
        self.telemetry.start()
        if self._config.shared_memory:
            self._memory.start(self.addresses)
        if self._config.direct_connections >= 0:
            self._direct.start(self.addresses, self._config.direct_connections)
        self._facts = server_facts(self._why_not_shared())
        await self._server.start()
        self.host = await asyncio.wrap_future(_in_own_thread(self._open_host))
        self._peers = LoopPeers(
            asyncio.get_running_loop(),
            self._pools["move"],
            self._config.pool_silence_seconds,
            shown=self._shown,
            lease_seconds=self._config.pool_lease_seconds,
        )
        self.host.exchange.use(self._peers)
        self.host.moves.give = partial(hand_over, self._shown)
        self._reconfigure(self._config)
        self.telemetry.watch(self.host)
        self._traces.join(self.host, self.addresses)
        await asyncio.to_thread(self.host.recover)
        self._slot.fill(self.host)
        self.access.watch(self.host)
        await self.health.follow(self.host)
        await self.gateways.start()
        await self.dashboard.start()
        self._keepers.append(asyncio.create_task(trim_memory(self._is_busy)))
        self._keepers.append(asyncio.create_task(_drop_unmatched(self.host)))

    def collect_garbage(self) -> None:
        """Begin to make full collections of garbage, which Python then makes no more itself."""
        self._keepers.append(asyncio.create_task(collect_garbage(self._is_busy)))

    def _is_busy(self) -> bool:
        return self._slot.host.count_busy() > 0

    def _reconfigure(self, config: ServerConfig) -> None:
        """Apply the live settings. There may be no devices yet."""
        if self.host is not None and self.host.store.cache is not None:
            self.host.store.cache.quota_bytes = config.cache_size
        if self.host is not None:
            self.host.exchange.rules = _peer_rules(config)
            self.host.lease_seconds = config.lease
        if self.access is not None:
            self.access.use_quota(config.quota, self.host)

    def _why_not_shared(self) -> str:
        return self._memory.why_not if self._config.shared_memory else "it is off in the configuration"

    def _add_services(self, server: aio.Server) -> None:
        pools = self._pools
        assert self.access is not None
        requests = Requests(self._slot, pools["decode"])
        facts = lambda: self._facts  # noqa: E731
        compile_seconds = lambda: self._config.compile_seconds  # noqa: E731
        hidden = () if self._config.compression else packing.features()
        peers = PeerService(
            self._slot, pools["move"], pools["take"], lambda address: self._shown(address), self._direct
        )
        self._peer_service = peers
        for service in (
            SessionService(
                self._slot,
                pools["ask"],
                pools["close"],
                pools["leave"],
                pools["prepare"],
                self._memory.offer,
                self._direct.offer,
                hidden,
            ),
            DeviceService(self._slot, pools["ask"], pools["listen"], facts),
            PlanService(self._slot, self._turns, pools["listen"], compile_seconds),
            BulkService(self._slot, pools["bulk"], pools["relay"]),
            ModelService(self._slot, pools["read"]),
            CommandService(self._slot, pools["close"], pools["decode"], self._sockets),
            peers,
            self._keeping,
            AdminService(
                self._slot,
                self.draining,
                self.operators,
                pools["ask"],
                pools["close"],
                self.access.why_not,
                self.audit,
                self._keeping.status,
            ),
            ReflectionService((*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME)),
        ):
            service.add_to(server, requests)
        self.health.add_to(server)

    async def drain(self) -> bool:
        """Refuse new sessions and wait up to `drain_seconds` for running work. True if it has
        ended."""
        await self.draining.stopping()
        if self.host is None:
            return True
        is_quiet = await asyncio.to_thread(self.host.wait_quiet, self._config.drain_seconds)
        if not is_quiet:
            self.draining.interrupt()
        return is_quiet

    def hang_up(self) -> None:
        """Read the files again, and open the audit log again."""
        self.audit.reopen()
        self.watch.look(at_once=True)

    def hurry(self) -> None:
        """End `drain` at once."""
        if self.host is not None:
            self.host.hurry()

    async def stop(self) -> None:
        """End all sessions, the server, the devices and the threads."""
        await self.watch.stop()
        self.telemetry.stop()
        self.draining.hung_up.set()
        for keeper in self._keepers:
            keeper.cancel()
        await self.dashboard.stop()
        await self.gateways.stop()
        if self.host is not None:
            await asyncio.to_thread(self.host.close_sessions, shut_down())
        self._memory.close()
        self._direct.close()
        if self.access is not None:
            await self.access.close()
        if self._peers is not None:
            await self._peers.closed()
        if self._server is not None:
            await self._end_peers()
            await self._server.stop(STOP_SECONDS)
        if self.host is not None:
            await asyncio.to_thread(self.host.close)
        await asyncio.to_thread(self._traces.close)
        self.audit.close()
        for address in self.addresses:
            unbind(address)
        await asyncio.to_thread(self._turns.close)
        for pool in self._pools.values():
            await asyncio.to_thread(pool.shutdown)
        await self.health.stop()

    async def _end_peers(self) -> None:
        """End the streams of other daemons, which would keep the server for STOP_SECONDS."""
        if self._peer_service is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._peer_service.hang_up()
                await self._keeping.hang_up()


async def _drop_unmatched(host: Host) -> None:
    """End transfers without their other half, from time to time."""
    while True:
        await asyncio.sleep(host.limits.upload_idle_ms / 1e3)
        await asyncio.to_thread(host.drop_unmatched_transfers)


def open_host_of(config: ServerConfig, own: bytes = b"") -> Host:
    """Load the backends and start the devices. Raises ConfigurationError.

    `own`: the identity of this daemon's keeper, which cannot keep its own state.

    This also probes the backends that are not used, as the event loop cannot wait for that later.
    """
    # The quick parts come first, so that their mistakes show at once.
    cache = DiskCache(Path(config.cache), config.cache_size) if config.cache else None
    models = ModelFiles(Path(config.models)) if config.models else None
    store = StateStore(_medium_of(config, own)) if config.state else None
    try:
        pool = _pool_of(config, store) if config.pool else None
        registry = open_registry(config.devices, config.backends, probe=True)
        host = Host(registry, config.limits, ContentStore(cache, models), pool, total_of(config))
    except BaseException:
        if store is not None:
            store.close()
        raise
    if store is not None:
        host.snapshots = Snapshots(store, config.snapshot_seconds, config.snapshot_runs)
    return host


def _medium_of(config: ServerConfig, own: bytes) -> Medium:
    """The place of the state. Raises ConfigurationError."""
    place = config.state_elsewhere
    if place is None:
        return FolderMedium(Path(config.state))
    shown, silence_seconds = pool_credentials(config), config.pool_silence_seconds
    return KeeperMedium(place.address, place.name, shown, own=own, silence_seconds=silence_seconds)


def total_of(config: ServerConfig) -> Quota:
    """Return the most sessions and staged bytes of all tenants together."""
    least = 2 * config.limits.in_flight_bytes
    staging_bytes = config.staging_size or max(machine_memory_bytes() // 8, least)
    return Quota(sessions=config.max_sessions, staging_bytes=staging_bytes)


def _peer_rules(config: ServerConfig) -> PeerRules:
    """The daemons that sessions may name. Raises ConfigurationError."""
    is_local = all(one.is_loopback for one in config.addresses)
    return rules_of(config.pool_peers, asks=bool(config.tokens or config.tls_client_ca), is_local=is_local)


def _pool_of(config: ServerConfig, store: StateStore | None) -> Membership:
    """The daemons whose devices are offered too, whose sessions are kept in the store. Raises
    ConfigurationError."""
    # Imported on demand, as it imports the client.
    from heliograph_server.pool.discovery import open_source
    from heliograph_server.pool.pool import Pool

    pool = Pool(
        open_source(config.pool),
        config.pool_silence_seconds,
        shown=pool_credentials(config),
        lease_seconds=config.pool_lease_seconds,
    )
    if store is not None:
        pool.remember(KeptLinks(store), config.lease)
    return pool


def pool_credentials(config: ServerConfig) -> PoolCredentials:
    """The credentials presented to members, and to daemons that values are exchanged with.

    Raises ConfigurationError.
    """
    files = config.pool_token, config.pool_ca, config.pool_certificate, config.pool_key
    return PoolCredentials(*files, insecure=config.insecure)


def _in_own_thread(open_host: Callable[[], Host]) -> Future[Host]:
    """Start the devices in a thread that the end of the process does not wait for.

    On a new machine they compile kernels for a minute, which cannot be interrupted. A host that
    comes too late is closed.
    """
    opening: Future[Host] = Future()

    def run() -> None:
        try:
            host = open_host()
        except BaseException as error:  # passed to the caller, who waits for it
            if opening.set_running_or_notify_cancel():
                opening.set_exception(error)
            return
        if opening.set_running_or_notify_cancel():
            opening.set_result(host)
        else:
            host.close()

    threading.Thread(target=run, name=STARTER, daemon=True).start()
    return opening


def is_starting() -> bool:
    """True if a thread still starts devices."""
    return any(thread.name == STARTER for thread in threading.enumerate())


class Signals:
    """The signals of the process. The first SIGTERM or SIGINT starts a drain, the second one cuts
    it short. SIGHUP reads the files again.

    HURRY_SECONDS after the second signal, the process ends with its work unfinished. SIGHUP of a
    closed terminal acts like SIGTERM.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._on_second: Callable[[], None] = lambda: None
        self._on_hang_up: Callable[[], None] = lambda: None
        # With nohup, the process outlives its terminal.
        self._has_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def install(self, numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self._arrived, number)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def on_second(self, callback: Callable[[], None]) -> None:
        self._on_second = callback

    def on_hang_up(self, callback: Callable[[], None]) -> None:
        self._on_hang_up = callback

    def _hung_up(self) -> None:
        if self._has_terminal and not _has_terminal():
            self._arrived(signal.SIGHUP)
            return
        logger.info("SIGHUP: reading the files again")
        self._on_hang_up()

    def _arrived(self, number: signal.Signals) -> None:
        what = "ending at once" if self.stop.is_set() else "draining; a second signal ends it at once"
        logger.info("%s: %s", number.name, what)
        if self.stop.is_set():
            self._on_second()
            asyncio.get_running_loop().call_later(HURRY_SECONDS, _give_up)
        self.stop.set()


def _has_terminal() -> bool:
    """True if the process has an open terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _give_up() -> None:
    logger.error("work did not end within %.0f s after the second signal; exiting", HURRY_SECONDS)
    leave(1)


def leave(status: int) -> NoReturn:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


async def serve(
    config: ServerConfig, ready: Callable[[Daemon], None] | None = None, sources: Sources | None = None
) -> None:
    """Serve until a signal comes. `ready` is called once it listens and the devices are ready.

    `sources`: the sources of the configuration, whose file is read again when it changes.
    """
    signals = Signals()
    signals.install()
    daemon = Daemon(config)
    signals.on_second(daemon.hurry)
    manager = ServiceManager(os.environ)
    signals.on_hang_up(lambda: manager.reload(daemon.hang_up))
    try:
        if sources is not None:
            daemon.configuration.follow(sources, daemon.watch)
        if not await _started(daemon, signals.stop):
            logger.info("stopping before the devices are ready")
            return
        # Before the daemon says that it is ready: the collection holds up its first clients.
        take_over()
        if ready is not None:
            ready(daemon)
        daemon.collect_garbage()
        manager.ready(f"serving at {', '.join(map(str, daemon.addresses))}")
        signalled = await _wait_for_end(signals.stop, daemon.draining.over)
        seconds = daemon.configuration.now.drain_seconds
        manager.stopping(seconds if signalled else 0.0)
        if signalled:
            await daemon.drain()
    finally:
        await daemon.stop()
        await manager.close()
        logger.info("stopped")


async def _wait_for_end(signal: asyncio.Event, drained: asyncio.Event) -> bool:
    """Wait for a signal or the end of an operator's drain. True if it was a signal."""
    waiting = [asyncio.ensure_future(one.wait()) for one in (signal, drained)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return not drained.is_set()


async def _started(daemon: Daemon, stop: asyncio.Event) -> bool:
    """Start a daemon, unless `stop` is set first. Returns True if it started. Raises the errors of
    `start`."""
    starting = asyncio.ensure_future(daemon.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
