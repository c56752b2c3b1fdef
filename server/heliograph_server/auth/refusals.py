"""Ends a gRPC call with a typed error, as status and metadata."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
from grpc import aio

from heliograph_proto.codec.status import code_for, error_to_metadata
from heliograph_proto.errors import HeliographError

_CODES = {code.value[0]: code for code in grpc.StatusCode}


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
