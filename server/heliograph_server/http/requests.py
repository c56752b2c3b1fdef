"""Bodies of requests, and statuses of errors."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request

from heliograph_proto.codec import status
from heliograph_proto.codec.status import code_for
from heliograph_proto.errors import DeadlineExceededError, HeliographError, LimitExceededError
from heliograph_server.rpc.receiving import next_of

#: The most time of a whole body; between two parts of it see `rpc.receiving`.
BODY_SECONDS = 600.0
_STATUS = {
    status.INVALID_ARGUMENT: 400,
    status.OUT_OF_RANGE: 400,
    status.FAILED_PRECONDITION: 400,
    status.UNAUTHENTICATED: 401,
    status.PERMISSION_DENIED: 403,
    status.NOT_FOUND: 404,
    status.RESOURCE_EXHAUSTED: 429,
    status.UNIMPLEMENTED: 501,
    status.UNAVAILABLE: 503,
    status.DEADLINE_EXCEEDED: 504,
}


def status_of(error: HeliographError) -> int:
    """The status of a reply to an error."""
    return _STATUS.get(code_for(error), 500)


async def read_body(
    request: Request, most_bytes: int, count: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read the body of a request. `count` gets the number of bytes of each part, and may refuse it.
    Raises LimitExceededError, DeadlineExceededError, and Starlette's ClientDisconnect."""
    parts, size = [], 0
    stream = request.stream()
    end = time.monotonic() + BODY_SECONDS
    while (part := await next_of(anext(stream, None))) is not None:
        parts.append(part)
        size += len(part)
        count(len(part))
        if time.monotonic() > end:
            raise DeadlineExceededError(f"the body did not come within {BODY_SECONDS:g} s")
        if size > most_bytes:
            raise LimitExceededError(
                f"the body has more than {most_bytes:,} bytes", advice="send smaller requests"
            )
    return parts[0] if len(parts) == 1 else b"".join(parts)
