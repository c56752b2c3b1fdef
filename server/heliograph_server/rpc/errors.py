"""How an exception leaves a handler: as a gRPC status with the typed error beside it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from heliograph_proto.codec.status import code_for, error_to_metadata
from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_server.resources.failures import typed

logger = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_R = TypeVar("_R")


def refusals(handler: Callable[..., Awaitable[_R]]) -> Callable[..., Awaitable[_R]]:
    """Lets a handler raise typed errors; anything else becomes INTERNAL and a line in the log."""

    @functools.wraps(handler)
    async def wrapped(self: object, request: Any, context: aio.ServicerContext[Message, Message]) -> _R:
        try:
            return await handler(self, request, context)
        except (asyncio.CancelledError, aio.BaseError):
            # The call or the server has ended: there is nobody to answer, and gRPC says so itself.
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
