"""Turns the exceptions of handlers into gRPC statuses, with the typed error as metadata."""

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
    """Decorate a handler to report typed errors. Any other becomes INTERNAL and is logged."""

    @functools.wraps(handler)
    async def wrapped(self: object, request: Any, context: aio.ServicerContext[Message, Message]) -> _R:
        try:
            return await handler(self, request, context)
        except (asyncio.CancelledError, aio.BaseError):
            # The call or the server has ended: no client waits, and gRPC reports it itself.
            raise
        except Exception as error:
            # A fresh error without a traceback: gRPC keeps it, and so would keep the handler's
            # message.
            refusal = _typed(error, handler.__name__).anew()
        if (slot := getattr(self, "_slot", None)) is not None:
            slot.refused[refusal.reason] += 1
        await _abort(context, refusal)

    return wrapped


def register(server: aio.Server, service: str, **methods: Any) -> None:
    """Register a service with a server, if protobuf does not encode and decode all its messages."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


def _typed(error: Exception, doing: str) -> HeliographError:
    if isinstance(error, DecodeError):
        return ProtocolError("a message could not be decoded", advice="is the client a Heliograph client?")
    return typed(error, doing)


async def _abort(context: aio.ServicerContext[Message, Message], error: HeliographError) -> NoReturn:
    # gRPC sends the details in a header, which must be short and on one line.
    details = " ".join(error.message.split())[:1000]
    await context.abort(_CODES[code_for(error)], details, error_to_metadata(error))
