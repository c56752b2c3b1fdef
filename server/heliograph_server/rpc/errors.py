"""Turns the exceptions of handlers into gRPC statuses, with the typed error as metadata."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from heliograph_proto.codec.status import code_for, error_to_metadata
from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_server.resources.failures import typed

_CODES = {code.value[0]: code for code in grpc.StatusCode}


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
    await context.abort(_CODES[code_for(error)], details, error_to_metadata(error))
