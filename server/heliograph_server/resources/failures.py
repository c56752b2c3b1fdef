"""Exceptions of backends as typed errors that can cross the wire. Any thread may call it."""

from __future__ import annotations

import logging

from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InternalError,
    OutOfMemoryError,
)
from heliograph_server.resources.log_fields import NO_FIELDS, LogFields

logger = logging.getLogger(__name__)


def typed(
    error: BaseException, doing: str, *, computing: bool = False, fields: LogFields = NO_FIELDS
) -> HeliographError:
    """Convert an exception to a typed error. Unexpected ones are logged, with `fields`."""
    if isinstance(error, HeliographError):
        return error
    # Log the text alone: a stored record would keep the traceback, and with it everything in its
    # frames.
    logger.error("%s failed: %s: %s", doing, type(error).__name__, str(error), extra=dict(fields))
    logger.debug("the traceback of that failure", exc_info=error, extra=dict(fields))
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{doing}: the host is out of memory", advice="free something")
    kind = ComputeFailedError if computing else InternalError
    return kind(f"{doing} failed: {type(error).__name__}: {error}", advice="the server's log has details")
