"""Turns the exceptions of handlers into gRPC statuses, with the typed error as metadata."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable
from typing import TypeVar

from google.protobuf.message import DecodeError

from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_server.resources.failures import typed

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
