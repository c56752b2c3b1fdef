"""gRPC's reflection service, with the bounds of all calls: slots, sizes, and times of messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from heliograph_proto.errors import LimitExceededError
from heliograph_server.rpc.receiving import first_of, next_of
from heliograph_server.rpc.requests import SMALL_BYTES, Requests, takes_bytes

#: The types of gRPC's reflection package have another descriptor.
_SERVICE: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


class ReflectionService:
    """Describes the services of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._answers: Any = reflection.aio.ReflectionServicer(names)

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, _SERVICE, self)

    @takes_bytes
    async def ServerReflectionInfo(
        self, requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]
    ) -> None:
        async for answer in self._answers.ServerReflectionInfo(_decoded(requests), context):
            await context.write(answer)


async def _decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Yield the requests. Raises LimitExceededError, DeadlineExceededError, DecodeError."""
    message = await first_of(anext(requests, None))
    while message is not None:
        if len(message) > SMALL_BYTES:
            raise LimitExceededError(f"a request of more than {SMALL_BYTES:,} bytes", advice="ask for less")
        yield reflection_pb2.ServerReflectionRequest.FromString(message)
        message = await next_of(anext(requests, None))
