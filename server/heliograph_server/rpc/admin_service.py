"""AdminService: the calls of operators, whose rights the interceptor checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace

from grpc import aio

from heliograph_proto.codec import encode, encode_all
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
)
from heliograph_proto.sessions import KeptStateStatus, Snapshot
from heliograph_proto.v1 import admin_pb2, device_pb2
from heliograph_server.resources.principals import Principal, current_principal
from heliograph_server.rpc.audit import AuditedService
from heliograph_server.rpc.operators import Operators
from heliograph_server.rpc.requests import Context, Requests
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.status import list_sessions, take_snapshot
from heliograph_server.telemetry.audit import AuditLog
from heliograph_server.telemetry.logs import log_level

#: The default, least and most time between two snapshots.
INTERVAL_MS, LEAST_MS, MOST_MS = 1000, 100, 3_600_000
#: The most concurrent calls of Watch.
MOST_WATCHERS = 32


class AdminService:
    """Watches the host, ends sessions, drains the daemon, sets the log level.

    Devices are asked for their memory on the threads of `askers`; backends are loaded on those of
    `closers`. `why_not` returns the error of a principal that may no longer watch. Every call is
    recorded in `audit`.
    """

    def __init__(
        self,
        slot: HostSlot,
        draining: Draining,
        operators: Operators,
        askers: Executor,
        closers: Executor,
        why_not: Callable[[Principal], HeliographError | None],
        audit: AuditLog,
        kept_states: Callable[[], tuple[KeptStateStatus, ...]] = tuple,
    ) -> None:
        """`kept_states` returns the states of other daemons."""
        self._kept_states = kept_states
        self._slot = slot
        self._why_not = why_not
        self._audit = audit
        self._draining = draining
        self._operators = operators
        self._askers = askers
        self._closers = closers
        self._watchers = 0

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        audited = AuditedService(self, self._audit)
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        requests.serve(server, service, audited, is_operators=True)

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._askers, list_sessions, self._slot.host)
        return admin_pb2.ListSessionsResponse(sessions=encode_all(found, admin_pb2.SessionStatus))

    async def EndSession(
        self, request: admin_pb2.EndSessionRequest, context: Context
    ) -> admin_pb2.EndSessionResponse:
        await self._operators.end_session(request.number, request.reason)
        return admin_pb2.EndSessionResponse()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        seconds, move_to = request.deadline_ms / 1e3, request.move_to
        status = await self._operators.drain(seconds, stay=request.stay, move_to=move_to)
        return admin_pb2.DrainResponse(drain=encode(status, admin_pb2.DrainStatus))

    async def UndoDrain(
        self, request: admin_pb2.UndoDrainRequest, context: Context
    ) -> admin_pb2.UndoDrainResponse:
        return admin_pb2.UndoDrainResponse(
            drain=encode(await self._operators.undo_drain(), admin_pb2.DrainStatus)
        )

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        return admin_pb2.SetLogLevelResponse(previous=self._operators.set_log_level(request.level))

    async def ListBackends(
        self, request: admin_pb2.ListBackendsRequest, context: Context
    ) -> admin_pb2.ListBackendsResponse:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._askers, self._slot.host.backends.list)
        return admin_pb2.ListBackendsResponse(backends=encode_all(found, admin_pb2.BackendUse))

    async def UnloadBackend(
        self, request: admin_pb2.UnloadBackendRequest, context: Context
    ) -> admin_pb2.UnloadBackendResponse:
        # Goes on even if the operator hangs up.
        unloading = self._closers.submit(self._slot.host.backends.unload, request.name)
        found = await asyncio.shield(asyncio.wrap_future(unloading))
        return admin_pb2.UnloadBackendResponse(backend=encode(found, device_pb2.Backend))

    async def LoadBackend(
        self, request: admin_pb2.LoadBackendRequest, context: Context
    ) -> admin_pb2.LoadBackendResponse:
        loading = self._closers.submit(self._slot.host.backends.load, request.source, tuple(request.devices))
        found = await asyncio.shield(asyncio.wrap_future(loading))
        return admin_pb2.LoadBackendResponse(backend=encode(found, device_pb2.Backend))

    async def Watch(self, request: admin_pb2.WatchRequest, context: Context) -> None:
        interval_ms = request.interval_ms or INTERVAL_MS
        if not LEAST_MS <= interval_ms <= MOST_MS:
            advice = f"choose {LEAST_MS} to {MOST_MS:,} ms"
            raise InvalidArgumentError(f"an interval of {interval_ms:,} ms", advice=advice)
        if self._watchers >= MOST_WATCHERS:
            raise LimitExceededError(f"{MOST_WATCHERS} clients watch already", advice="end one of them")
        self._watchers += 1
        try:
            await self._send_snapshots(context, interval_ms / 1e3)
        finally:
            self._watchers -= 1

    async def _send_snapshots(self, context: Context, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        before: Snapshot | None = None
        while not self._draining.hung_up.is_set():
            if (error := self._why_not(current_principal())) is not None:
                raise error
            began, host = loop.time(), self._slot.host
            before = await loop.run_in_executor(
                self._askers,
                take_snapshot,
                host,
                self._draining.status,
                log_level(),
                before,
                self._kept_states(),
            )
            await context.write(encode(before, admin_pb2.Snapshot))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, began + seconds - loop.time())):
                    await self._draining.hung_up.wait()
        if before is not None and self._draining.is_stopping and not context.done():
            # How the drain has ended.
            await context.write(encode(replace(before, drain=self._draining.status), admin_pb2.Snapshot))
