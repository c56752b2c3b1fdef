"""grpc.health.v1, answered such that nobody who asks can hold up what is said: probes need no token.

gRPC's own servicer sets a status under a lock that a watcher has while its answer is written, so that one who
does not read it stops a daemon from draining.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

logger = logging.getLogger(__name__)

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
