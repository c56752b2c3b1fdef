"""How an exception leaves a handler: as a gRPC status with the typed error beside it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from heliograph_proto.errors import HeliographError, ProtocolError, UnavailableError
from heliograph_proto.status import code_for, error_to_metadata
from heliograph_server.access import current_principal
from heliograph_server.core.execution import typed
from heliograph_server.core.runtime import Host, Session

logger = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_R = TypeVar("_R")


class HostSlot:
    """Where services find the host, once the devices are ready."""

    def __init__(self, host: Host | None = None) -> None:
        self._host = host
        #: How many calls were refused, by the reason of the error. The event loop's.
        self.refused: Counter[int] = Counter()

    def fill(self, host: Host) -> None:
        self._host = host

    @property
    def is_filled(self) -> bool:
        """Whether the devices are ready."""
        return self._host is not None

    @property
    def host(self) -> Host:
        """Raises UnavailableError while the devices are starting."""
        if self._host is None:
            raise UnavailableError("the server is starting its devices", advice="try again in a moment")
        return self._host

    def session(self, token: bytes) -> Session:
        """A session of whoever makes the call. Raises SessionClosedError, UnavailableError."""
        return self.host.session(token, current_principal())


def refusals(handler: Callable[..., Awaitable[_R]]) -> Callable[..., Awaitable[_R]]:
    """Lets a handler raise typed errors; anything else becomes INTERNAL and a line in the log."""

    @functools.wraps(handler)
    async def wrapped(self: object, request: Any, context: aio.ServicerContext[Message, Message]) -> _R:
        try:
            return await handler(self, request, context)
        except (asyncio.CancelledError, aio.AbortError):
            raise
        except Exception as error:
            # Without what there was on its way, such as the message: gRPC keeps what it is told here.
            refusal = _typed(error, handler.__name__).anew()
        if (slot := getattr(self, "_slot", None)) is not None:
            slot.refused[refusal.reason] += 1
        await _abort(context, refusal)

    return wrapped


def register(server: aio.Server, service: str, **methods: Any) -> None:
    """Has a server call the methods of a service whose messages are not all protobuf's to read and write."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


def _typed(error: Exception, doing: str) -> HeliographError:
    if isinstance(error, DecodeError):
        return ProtocolError("a message could not be decoded", advice="is the client a Heliograph client?")
    return typed(error, doing)


async def _abort(context: aio.ServicerContext[Message, Message], error: HeliographError) -> NoReturn:
    # gRPC carries the details in a header, where long texts and line ends do harm.
    details = " ".join(error.message.split())[:1000]
    await context.abort(_CODES[code_for(error)], details, error_to_metadata(error))
