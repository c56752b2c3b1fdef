"""Records every call of a service in the audit log: served calls here, and refused ones from the
interceptor."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from heliograph_proto.codec.status import code_for
from heliograph_proto.errors import HeliographError
from heliograph_proto.v1 import admin_pb2
from heliograph_server.resources.principals import Principal, current_principal
from heliograph_server.telemetry.audit import Action, AuditLog

#: The prefix of the methods that the interceptor reports.
_AUDITED = f"/{admin_pb2.DESCRIPTOR.services_by_name['AdminService'].full_name}/"
_CODES: dict[Any, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
#: The most refused calls that are recorded in a minute.
MOST_REFUSALS, MINUTE = 10, 60.0


class AuditedService:
    """A service whose every method is recorded when its call ends."""

    def __init__(self, service: object, audit: AuditLog) -> None:
        self._service, self._audit = service, audit

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self._service, name)
        return _audited(name, handler, self._audit) if name[:1].isupper() else handler


class Refusals:
    """Records refused calls of operators' methods, so many a minute: other callers must not fill
    the log."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit, self._clock = audit, clock
        self._began = float("-inf")
        self._count = self._omitted = 0

    def record(self, method: str, principal: Principal, peer: str, error: HeliographError) -> None:
        """Record a call that the interceptor refused, if it is one of an operator's methods."""
        if not method.startswith(_AUDITED):
            return
        if (now := self._clock()) - self._began >= MINUTE:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > MOST_REFUSALS:
            self._omitted += 1
            return
        arguments = {"refused_unrecorded": self._omitted} if self._omitted else {}
        self._omitted = 0
        name = method.removeprefix(_AUDITED)
        self._audit.record(Action(name, "refused", principal, peer, arguments, error.message))


def _audited(name: str, handler: Callable[..., Any], audit: AuditLog) -> Callable[..., Any]:
    @functools.wraps(handler)
    async def calling(request: Any, context: Any) -> Any:
        try:
            answer = await handler(request, context)
        except BaseException as error:
            _record(audit, name, request, context, error)
            raise
        _record(audit, name, request, context)
        return answer

    return calling


def _record(
    audit: AuditLog, name: str, request: Any, context: Any, error: BaseException | None = None
) -> None:
    arguments = (
        MessageToDict(request, preserving_proto_field_name=True) if isinstance(request, Message) else {}
    )
    outcome, why = "ok", ""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        outcome = "cancelled"
    elif isinstance(error, HeliographError):
        outcome, why = "failed", f"{_CODES[code_for(error)].name.lower()}: {error.message}"
    elif error is not None:
        outcome, why = "failed", f"internal: {type(error).__name__}: {error}"
    audit.record(Action(name, outcome, current_principal(), context.peer(), arguments, why))
