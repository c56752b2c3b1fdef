"""Health by grpc.health.v1, on the daemon's addresses and on a plain-text address for probes.

| service | SERVING |
|---|---|
| `live` | from the first answer on, also while devices start and while draining; until |
|        | only a restart can bring a device back |
| `ready` | while sessions are accepted: after the start of the devices, not while draining, |
|         | and only if some device, of the daemon or a member, is not lost |
| `""` and each service | as `ready` |

A daemon with a blocked event loop does not answer, so a probe of `live` fails by its own timeout. A
head that waits for members is ready as long as it has a device of its own; clients learn of members
as they join.

Probes need no token, so a watcher that does not read must not delay a change of status. gRPC's own
servicer holds a lock while it writes to a watcher, and sets a status under the same lock, so it
cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2

from heliograph_proto.addresses import Address
from heliograph_server.auth.refusals import abort
from heliograph_server.config.sockets import host_and_port
from heliograph_server.rpc.errors import refusal_of
from heliograph_server.rpc.listening import bind, probe_options
from heliograph_server.rpc.receiving import first_of

logger = logging.getLogger(__name__)

#: The most watchers over all connections.
MOST_WATCHERS = 1000
LIVE, READY = "live", "ready"
#: How often the state of the host is checked: lost and new devices, and drains of other origin.
PULSE_SECONDS = 0.5
#: How long probes in progress may take once the daemon ends.
STOP_SECONDS = 0.5
_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}

Context: TypeAlias = "aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
#: The types of gRPC's health package lack the List method.
_LISTS: Any = health_pb2
_SERVICE: Any = _LISTS.DESCRIPTOR.services_by_name["Health"]


class HealthAnswers:
    """The status of each service, by name. Lives on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._watchers: set[asyncio.Event] = set()

    def __repr__(self) -> str:
        return f"<HealthAnswers of {len(self._statuses)} services to {len(self._watchers)} watchers>"

    def set_status(self, service: str, status: int) -> None:
        """Set the status of a service, and notify watchers without waiting for them."""
        self._statuses[service] = status
        for changed in self._watchers:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if (status := self._statuses.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _response(status)

    async def List(self, request: Message, context: aio.ServicerContext[Message, Message]) -> Message:
        found = {name: _response(status) for name, status in self._statuses.items()}
        answer: Message = _LISTS.HealthListResponse(statuses=found)
        return answer

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if len(self._watchers) >= MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHERS} watch already")
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            await self._write_changes(request.service, changed, context)
        finally:
            self._watchers.discard(changed)

    async def _write_changes(self, service: str, changed: asyncio.Event, context: Context) -> None:
        written: int | None = None
        while True:
            # A change during the write below is seen in the next turn.
            changed.clear()
            status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != written:
                try:
                    await context.write(_response(status))
                except Exception as error:
                    logger.debug("a watcher of health is gone: %s", type(error).__name__)
                    return
            written = status
            await changed.wait()


def _response(status: int) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(status=status)


def _handler(method: Any, answer: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    """A handler that takes its one message in bounded time, and refuses bytes that are none."""
    kind = GetMessageClass(method.input_type)

    async def receive(_: object, context: Context) -> Any:
        try:
            message: Any = await first_of(context.read())
            request = kind.FromString(b"" if message is aio.EOF else message)
        except Exception as error:
            refusal = refusal_of(error, method.name)
        else:
            return await answer(request, context)
        await abort(context, refusal)

    make = (
        grpc.stream_stream_rpc_method_handler
        if method.server_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(receive, None, GetMessageClass(method.output_type).SerializeToString)


class HealthOfHost(Protocol):
    """The health of a `Host`."""

    @property
    def is_accepting(self) -> bool:
        """True if a session could be opened now."""

    @property
    def is_beyond_help(self) -> bool:
        """True if only a restart can bring a device back."""


class Health:
    """The health of a daemon, from before the start of its devices until its end.

    `services`: names with the status of `ready`. `listen`: HOST:PORT of a server for probes only,
    in plain text; empty: none. Raises ConfigurationError for another text.
    """

    def __init__(self, services: Sequence[str], listen: str = "") -> None:
        self._names = ("", *services, READY)
        self._listen = host_and_port(listen, "health_listen") if listen else None
        self._answers = HealthAnswers()
        self._server: aio.Server | None = None
        self._host: HealthOfHost | None = None
        self._known: dict[str, bool] = {}
        self._pulse: asyncio.Task[None] | None = None
        #: The address for probes only, with its actual port; None without one.
        self.address: Address | None = None

    def add_to(self, server: aio.Server) -> None:
        """Add grpc.health.v1 to a server. Its calls have no slots, since a probe has no tenant."""
        methods = {one.name: _handler(one, getattr(self._answers, one.name)) for one in _SERVICE.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, methods),))

    async def start(self) -> None:
        """Report the daemon as live and not ready, and listen for probes. Raises
        ConfigurationError."""
        await self.update()
        if self._listen is None:
            return
        self._server = aio.server(options=[("grpc.so_reuseport", 0), *probe_options()])
        self.add_to(self._server)
        self.address = bind(self._server, self._listen)
        await self._server.start()
        logger.info("health at %s", str(self.address).removeprefix("grpc://"))

    async def follow(self, host: HealthOfHost) -> None:
        """Report the state of a host from now on; its devices may be lost and come back."""
        self._host = host
        await self.update()
        self._pulse = asyncio.ensure_future(self._follow())

    async def stop(self) -> None:
        """End the server for probes. Idempotent."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            await self.update()

    async def update(self) -> None:
        """Report the current state of the host at once."""
        host = self._host
        is_ready = host is not None and host.is_accepting
        found = dict.fromkeys(self._names, is_ready) | {LIVE: host is None or not host.is_beyond_help}
        for name, is_serving in found.items():
            if self._known.get(name) is not is_serving:
                self._known[name] = is_serving
                self._answers.set_status(name, _STATUS[is_serving])
