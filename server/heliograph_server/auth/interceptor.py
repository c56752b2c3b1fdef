"""The check of every call of every service, before its messages are read.

A token identifies the caller; without a file of tokens, the name in its certificate does. Every
method needs a right (`NEEDED`); only health checks need none.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc import aio

from heliograph_proto.addresses import BEARER, MAX_TOKEN, TOKEN_KEY
from heliograph_proto.errors import HeliographError, PermissionDeniedError, UnauthenticatedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.clients import ClientCertificates
from heliograph_server.auth.refusals import abort
from heliograph_server.auth.tokens import TokenFile
from heliograph_server.resources.principals import Principal, Right, called_by, current_principal

#: The service of the open inference protocol.
_INFERENCE = "/inference.GRPCInferenceService/"
#: Methods that need no right, as orchestrators and load balancers have no credentials.
OPEN_PREFIXES = ("/grpc.health.v1.Health/", f"{_INFERENCE}ServerLive", f"{_INFERENCE}ServerReady")
_REFLECTION = "ServerReflection/ServerReflectionInfo"

_NEEDED: dict[Right, dict[str, tuple[str, ...]]] = {
    Right.USE: {
        "SessionService": (
            "Open",
            "Close",
            "GetStatistics",
            "FollowLog",
            "Snapshot",
            "PrepareMove",
            "Move",
            "GetOffers",
            "TellHandover",
        ),
        "DeviceService": (
            "ListDevices",
            "GetMemory",
            "QueryOps",
            "QueryPlacement",
            "ListLinks",
        ),
        "PlanService": ("Compile", "Estimate", "PlaceContents", "Explain", "Reserve", "ListPlans"),
        "BulkService": (
            "Upload",
            "UploadShared",
            "Download",
            "FindMissingContents",
            "Admit",
            "UploadAdmitted",
        ),
        "CommandService": ("Execute",),
        "ModelService": ("ListModels", "DescribeModel"),
    },
    # A capability that is valid once protects each value. But callers of these methods make the
    # daemon hold, send and measure values, so they must belong to the pool.
    # Taking up another session's memory is for heads alone.
    Right.POOL: {
        "PeerService": ("Exchange", "Pull", "Push", "Echo", "Probe", "TakeSession"),
        "SessionService": ("TakeUp",),
        "KeeperService": ("Hold", "Put", "Rename", "Get", "Remove"),
    },
    Right.ADMIN: {
        "AdminService": (
            "ListSessions",
            "EndSession",
            "Drain",
            "UndoDrain",
            "SetLogLevel",
            "Watch",
            "ListBackends",
            "UnloadBackend",
            "LoadBackend",
        ),
    },
}

#: Loading and unloading changes what all clients have.
_OF_INFERENCE: dict[Right, tuple[str, ...]] = {
    Right.USE: (
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelInfer",
        "ModelStreamInfer",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
    ),
    Right.ADMIN: ("RepositoryModelLoad", "RepositoryModelUnload"),
}

#: The right of each method, by its path in gRPC.
NEEDED: dict[str, Right] = {
    f"/heliograph.v1.{service}/{method}": right
    for right, services in _NEEDED.items()
    for service, methods in services.items()
    for method in methods
}
NEEDED |= {f"/grpc.reflection.{version}.{_REFLECTION}": Right.USE for version in ("v1alpha", "v1")}
NEEDED |= {f"{_INFERENCE}{method}": right for right, methods in _OF_INFERENCE.items() for method in methods}

#: Methods that operators may call without that right: for them they tell of all tenants.
OPERATORS_TOO = frozenset({"/heliograph.v1.PlanService/ListPlans"})

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"]

#: The least time between two log lines about refused calls.
REFUSALS_SECONDS = 10.0
_SHOW = "pass a token: hg.connect(url, token=...), $HELIOGRAPH_TOKEN, or the URL that heliograph serve prints"


class AuthInterceptor(aio.ServerInterceptor):
    """Identifies the caller of each call and checks its right.

    Certificates identify callers only where `callers` is not a file of tokens. `refused` counts
    calls by reason.
    """

    def __init__(self, callers: TokenFile | ClientCertificates, quota: Quota, refused: Counter[int]) -> None:
        self._callers, self.quota, self._refused = callers, quota, refused
        #: Called for each refused call with its method, caller, peer and error.
        self.on_refused: Callable[[str, Principal, str, HeliographError], None] = lambda *_: None
        self._logged_at = float("-inf")
        #: Refused calls since the last line of the log.
        self._unlogged = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the handler of a call, or one that refuses it."""
        method = handler_call_details.method
        if method.startswith(OPEN_PREFIXES):
            return await continuation(handler_call_details)
        try:
            if isinstance(self._callers, ClientCertificates):
                handler = await continuation(handler_call_details)
                if handler is None:
                    return None
                return by_certificate(handler, method, self, self._callers)
            token = token_of(handler_call_details.invocation_metadata)
            self.admit(self._callers.identify(token, self.quota), method)
        except HeliographError as error:
            return self._refusing(error, method)
        return await continuation(handler_call_details)

    def admit(self, principal: Principal, method: str) -> None:
        """Set the principal of a call of this task. Raises PermissionDeniedError if it lacks the
        right."""
        called_by(principal)
        needed = NEEDED.get(method)
        is_operator = method in OPERATORS_TOO and principal.may(Right.ADMIN)
        if needed is None or not (is_operator or principal.may(needed)):
            raise PermissionDeniedError(
                f"{principal.shown!r} may not call {method.rpartition('/')[2]}",
                advice=f"it needs the right {needed.value!r}; the server's operator grants it"
                if needed
                else "no right allows it",
            )

    async def refuse(
        self, error: HeliographError, method: str, context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Count and log a refused call, and end it."""
        self._refused[error.reason] += 1
        self.on_refused(method, current_principal(), context.peer(), error)
        now = time.monotonic()
        if now - self._logged_at > REFUSALS_SECONDS:
            others = f"; {self._unlogged} others since the last line" if self._unlogged else ""
            self._logged_at, self._unlogged = now, 0
            name, caller = method.rpartition("/")[2], context.peer()
            logger.warning("a call of %s by %s was refused: %s%s", name, caller, error.message, others)
        else:
            self._unlogged += 1
        await abort(context, error)

    def _refusing(self, error: HeliographError, method: str) -> Handler:
        """A handler that refuses a call of any kind at once, before its messages are read."""

        async def refuse(_requests: object, context: aio.ServicerContext[Any, Any]) -> None:
            await self.refuse(error, method, context)

        return grpc.stream_stream_rpc_method_handler(refuse)


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the token of a call. Raises UnauthenticatedError, which does not repeat it."""
    found = [value for key, value in metadata or () if key == TOKEN_KEY]
    if not found:
        raise UnauthenticatedError("the server requires a token, and none was given", advice=_SHOW)
    value = found[0]
    if len(found) > 1 or not isinstance(value, str) or value[: len(BEARER)].lower() != BEARER.lower():
        raise UnauthenticatedError(
            "the call does not have exactly one token", advice="one header: authorization: Bearer TOKEN"
        )
    token = value[len(BEARER) :].strip()
    if not 0 < len(token) <= MAX_TOKEN:
        raise UnauthenticatedError("the token is malformed", advice=_SHOW)
    return token


def by_certificate(
    handler: Handler, method: str, gate: AuthInterceptor, callers: ClientCertificates
) -> Handler:
    """A handler of the same kind that first checks the certificate of the connection."""

    async def check(context: aio.ServicerContext[Any, Any]) -> None:
        try:
            gate.admit(callers.identify(context.auth_context(), gate.quota), method)
        except HeliographError as error:
            await gate.refuse(error, method, context)

    return _checking(handler, check)


def _checking(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Handler:
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behavior, make = kinds[handler.request_streaming, handler.response_streaming]
    checked = _checked_stream if inspect.isasyncgenfunction(behavior) else _checked
    made: Handler = make(checked(behavior, check), handler.request_deserializer, handler.response_serializer)
    return made


def _checked(behavior: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    async def checked(request: Any, context: Any) -> Any:
        await check(context)
        return await behavior(request, context)

    return checked


def _checked_stream(behavior: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    async def checked(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async for answer in behavior(request, context):
            yield answer

    return checked
