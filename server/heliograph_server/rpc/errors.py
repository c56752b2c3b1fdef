"""Turns the exceptions of handlers into gRPC statuses, with the typed error as metadata."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto.codec.status import code_for, error_to_metadata
from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_server.resources.failures import typed

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_R = TypeVar("_R")


async def forgetting(work: Awaitable[_R]) -> _R:
    """Await work. An error that it raises refers to none of its local variables.

    Tasks and their errors refer to each other, so the messages in those variables would otherwise
    stay until the garbage collector runs.
    """
    try:
        return await work
    except HeliographError as error:
        del work
        # Other tasks may raise the same one. Their frames must not be cleared: a coroutine that
        # waits would end.
        error.__traceback__ = None
        raise
    except BaseException as error:
        del work
        traceback.clear_frames(error.__traceback__)
        raise


def refusal_of(error: Exception, doing: str) -> HeliographError:
    """Return the typed error for an exception of a handler. Unexpected ones are logged.

    It is a fresh one without a traceback: gRPC keeps it, and so would keep the handler's message.
    """
    if isinstance(error, DecodeError):
        return ProtocolError("a message could not be decoded", advice="is the client a Heliograph client?")
    return typed(error, doing).anew()


async def abort(context: aio.ServicerContext[Any, Any], error: HeliographError) -> NoReturn:
    """End a call with an error."""
    # gRPC sends the details in a header, which must be short and on one line.
    details = " ".join(error.message.split())[:1000]
    try:
        await context.abort(_CODES[code_for(error)], details, error_to_metadata(error))
    except aio.InternalError:
        raise call_is_over() from None


def call_is_over() -> asyncio.CancelledError:
    """Return the error of a handler whose call ended under a write.

    gRPC would log its own as a defect, with a traceback that keeps the whole server.
    """
    return asyncio.CancelledError("the call is over")
