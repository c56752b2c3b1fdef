"""Health by grpc.health.v1, on the daemon's addresses and, in the clear, on an address for probes alone.

| service | SERVING |
|---|---|
| `live` | from the first answer on, also while devices start and while work is drained; no longer when |
|        | every device is lost until a restart, which nothing else heals |
| `ready` | while sessions are accepted: not before the devices are there, not while draining, and only if |
|         | some device, its own or a member's, is not lost |
| `""` and each service | as `ready` |

A daemon whose event loop is stuck answers nothing, so a probe of `live` fails by its own time limit. A head
that waits for members is ready as long as it has a device itself; clients learn of members as they join.

Probes need no token, so a watcher that does not read must not hold up a status change. gRPC's own servicer
sets a status under a lock that a watcher has while its answer is written, and so cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heliograph_proto.addresses import Address
from heliograph_server.config.sockets import host_and_port
from heliograph_server.daemon.listening import bind, probe_options

#: The most who watch at once, of all connections.
MOST_WATCHERS = 1000

Context: TypeAlias = "aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
#: What types for gRPC's health know nothing of.
_LISTS: Any = health_pb2


class HealthAnswers(health_pb2_grpc.HealthServicer):
    """What is said of each service, by name. Lives on one event loop."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._watchers: set[asyncio.Event] = set()

    def __repr__(self) -> str:
        return f"<HealthAnswers of {len(self._said)} services to {len(self._watchers)} watchers>"

    def say(self, service: str, status: int) -> None:
        """From now on this is said of a service; watchers are told as they read. Waits for nobody."""
        self._said[service] = status
        for changed in self._watchers:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if (status := self._said.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _response(status)

    async def List(self, request: Message, context: aio.ServicerContext[Message, Message]) -> Message:
        found = {name: _response(status) for name, status in self._said.items()}
        answer: Message = _LISTS.HealthListResponse(statuses=found)
        return answer

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if len(self._watchers) >= MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHERS} watch already")
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            await self._tell(request.service, changed, context)
        finally:
            self._watchers.discard(changed)

    async def _tell(self, service: str, changed: asyncio.Event, context: Context) -> None:
        told: int | None = None
        while True:
            # Whatever is said while this is written is looked at afterwards.
            changed.clear()
            status = self._said.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                try:
                    await context.write(_response(status))
                except Exception as error:
                    logger.debug("a watcher of health is gone: %s", type(error).__name__)
                    return
            told = status
            await changed.wait()


def _response(status: int) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(status=status)


logger = logging.getLogger(__name__)

LIVE, READY = "live", "ready"
#: How often it is looked whether devices were lost or came, and whether somebody else drained the host.
PULSE_SECONDS = 0.5
#: How long probes under way may take once the daemon ends.
STOP_SECONDS = 0.5
_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class HealthOfHost(Protocol):
    """What is asked of a `Host`."""

    @property
    def is_accepting(self) -> bool:
        """Whether a session could be opened now."""

    @property
    def is_beyond_help(self) -> bool:
        """Whether only a restart brings a device back."""


class Health:
    """The health of a daemon, from before its devices start until it has ended.

    `services`: names that are answered as `ready` is. `listen`: HOST:PORT of a server that answers nothing
    else, in the clear; empty: none. Raises ConfigurationError for one that is no such text.
    """

    def __init__(self, services: Sequence[str], listen: str = "") -> None:
        self._names = ("", *services, READY)
        self._listen = host_and_port(listen, "health_listen") if listen else None
        self._answers = HealthAnswers()
        self._server: aio.Server | None = None
        self._host: HealthOfHost | None = None
        self._told: dict[str, bool] = {}
        self._pulse: asyncio.Task[None] | None = None
        #: Where probes alone are answered, with the port that was chosen; None: nowhere.
        self.address: Address | None = None

    def add_to(self, server: aio.Server) -> None:
        """Has a server answer grpc.health.v1."""
        health_pb2_grpc.add_HealthServicer_to_server(self._answers, server)

    async def start(self) -> None:
        """Says that the daemon lives and is not ready, and listens for probes. Raises ConfigurationError."""
        await self._tell()
        if self._listen is None:
            return
        self._server = aio.server(options=[("grpc.so_reuseport", 0), *probe_options()])
        self.add_to(self._server)
        self.address = bind(self._server, self._listen)
        await self._server.start()
        logger.info("health is answered at %s", str(self.address).removeprefix("grpc://"))

    async def follow(self, host: HealthOfHost) -> None:
        """From now on says what is true of a host, whose devices may be lost and come back."""
        self._host = host
        await self._tell()
        self._pulse = asyncio.ensure_future(self._follow())

    async def look(self) -> None:
        """Says at once what is true of the host now: that it drains, or does no more."""
        await self._tell()

    async def stop(self) -> None:
        """Ends the server of probes. Idempotent."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            await self._tell()

    async def _tell(self) -> None:
        host = self._host
        is_ready = host is not None and host.is_accepting
        said = dict.fromkeys(self._names, is_ready) | {LIVE: host is None or not host.is_beyond_help}
        for name, is_serving in said.items():
            if self._told.get(name) is not is_serving:
                self._told[name] = is_serving
                self._answers.say(name, _STATUS[is_serving])
