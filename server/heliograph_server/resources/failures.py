"""Exceptions of backends as typed errors that can cross the wire. Any thread."""

from __future__ import annotations

import logging

from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InternalError,
    OutOfMemoryError,
)
from heliograph_server.resources.log_fields import NOBODY, LogFields

logger = logging.getLogger(__name__)


def typed(
    error: BaseException, doing: str, *, computing: bool = False, fields: LogFields = NOBODY
) -> HeliographError:
    """What was raised as a value that can cross the wire; logs what was not expected, as of `fields`."""
    if isinstance(error, HeliographError):
        return error
    # As text: whoever keeps the record would keep the traceback, and with it what the frames hold.
    logger.error("%s failed: %s: %s", doing, type(error).__name__, str(error), extra=dict(fields))
    logger.debug("the traceback of that failure", exc_info=error, extra=dict(fields))
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{doing}: the host's memory does not suffice", advice="free something")
    kind = ComputeFailedError if computing else InternalError
    return kind(f"{doing} failed: {type(error).__name__}: {error}", advice="the server's log says more")
