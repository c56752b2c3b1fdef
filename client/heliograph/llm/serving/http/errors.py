"""Errors in the form of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import heliograph as hg
from heliograph.llm.serving.scheduler import QueueFullError

#: Parameters by what the library calls them.
_NAMES = {"schema": "response_format"}
#: Those whose bounds are no context's.
_BOUNDED = ("response_format", "grammar", "regex", "tools")
#: The time after which a refused client may ask again, in seconds.
RETRY_SECONDS = 1


@dataclass(eq=False)
class ApiError(Exception):
    """A reply that refuses a request."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, why: str) -> ApiError:
    """Return the error for a parameter of a body."""
    return ApiError(400, f"{param} {why}", param, "invalid_value")


def from_heliograph(error: hg.HeliographError, params: Mapping[str, object]) -> ApiError:
    """Return the reply to an error. Parameters that its text begins with are named."""
    text = ": ".join(filter(None, (error.args[0] if error.args else str(error), error.advice)))
    first = str(error).split(" ", 1)[0].rstrip(":")
    first = _NAMES.get(first, first)
    again = {"retry-after": str(RETRY_SECONDS)}
    match error:
        case QueueFullError():
            return ApiError(429, text, code="queue_full", headers=again)
        case hg.UnauthenticatedError():
            return ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        case hg.PermissionDeniedError():
            return ApiError(403, text, code="permission_denied")
        case hg.LimitExceededError() if first in _BOUNDED:
            return ApiError(400, text, first, "invalid_value")
        case hg.LimitExceededError():
            return ApiError(400, text, code="context_length_exceeded")
        case hg.InvalidArgumentError() | hg.UnsupportedError():
            return ApiError(400, text, first if first in params else None, "invalid_value")
        case hg.DeadlineExceededError():
            return ApiError(504, text, code="timeout")
        case hg.ConnectionError() | hg.DeviceLostError():
            return ApiError(503, text, code="unavailable", headers=again)
    return ApiError(500, text, code="internal_error")
