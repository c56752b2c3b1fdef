"""The gate: one check, of every call of every service, before anything of it is read.

Who shows a token is known by it; else, where clients show certificates, by the name in its certificate. A
method needs a right (`rights`). Health alone is answered to anybody.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc import aio

from heliograph_proto.addresses import BEARER, MAX_TOKEN, TOKEN_KEY
from heliograph_proto.codec.status import code_for, error_to_metadata
from heliograph_proto.errors import HeliographError, PermissionDeniedError, UnauthenticatedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.tokens import TokenFile
from heliograph_server.resources.principals import Principal, Right, called_by

#: Answers anybody, as orchestrators and load balancers ask without knowing a secret.
OPEN_PREFIX = "/grpc.health.v1.Health/"
_REFLECTION = "ServerReflection/ServerReflectionInfo"

_NEEDED: dict[Right, dict[str, tuple[str, ...]]] = {
    Right.USE: {
        "SessionService": ("Open", "Close", "GetStatistics", "FollowLog"),
        "DeviceService": (
            "ListDevices",
            "GetMemory",
            "QueryOps",
            "QueryPlacement",
            "ListLinks",
        ),
        "PlanService": ("Compile", "Estimate", "PlaceContents", "Explain", "Reserve"),
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
    # Values go under capabilities that are good once. That alone would do for their bytes; but whoever may
    # call has this daemon hold, send and measure things, so that it must be of the pool.
    Right.POOL: {"PeerService": ("Exchange", "Pull", "Push", "Echo", "Probe")},
    Right.ADMIN: {
        "AdminService": ("ListSessions", "EndSession", "Drain", "UndoDrain", "SetLogLevel", "Watch"),
    },
}

#: By the method's path, as gRPC writes it.
NEEDED: dict[str, Right] = {
    f"/heliograph.v1.{service}/{method}": right
    for right, services in _NEEDED.items()
    for service, methods in services.items()
    for method in methods
} | {f"/grpc.reflection.{version}.{_REFLECTION}": Right.USE for version in ("v1alpha", "v1")}


def right_for(method: str) -> Right | None:
    """The right that a method needs; None for one that is in no table."""
    return NEEDED.get(method)


logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"]

#: What whoever is known by a certificate alone may do.
CERTIFICATE_RIGHTS = frozenset((Right.USE, Right.POOL))
#: At most one line in the log in so much time, however many are refused.
REFUSALS_SECONDS = 10.0
_SHOW = (
    "show a token: hg.connect(url, token=...), $HELIOGRAPH_TOKEN, or the URL that heliograph serve printed"
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class AuthInterceptor(aio.ServerInterceptor):
    """Lets calls pass, as somebody's. `tokens`: None where certificates alone say who asks."""

    def __init__(self, tokens: TokenFile | None, quota: Quota) -> None:
        self._tokens, self.quota = tokens, quota
        #: How many calls were refused.
        self.refused = 0
        self._told = float("-inf")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """What answers a call: its handler, or a refusal."""
        method = handler_call_details.method
        if method.startswith(OPEN_PREFIX):
            return await continuation(handler_call_details)
        try:
            if self._tokens is None:
                handler = await continuation(handler_call_details)
                return by_certificate(handler, method, self) if handler is not None else None
            token = token_of(handler_call_details.invocation_metadata)
            self.admit(self._tokens.identify(token, self.quota), method)
        except HeliographError as error:
            self.count(error)
            return refusing(error)
        return await continuation(handler_call_details)

    def admit(self, principal: Principal, method: str) -> None:
        """A call of this task's is somebody's. Raises PermissionDeniedError for one that may not make it."""
        needed = right_for(method)
        if needed is None or not principal.may(needed):
            raise PermissionDeniedError(
                f"{principal.shown!r} may not call {method.rpartition('/')[2]}",
                advice=f"it takes the right {needed.value!r}, which the server's operator gives"
                if needed
                else "nobody may call it",
            )
        called_by(principal)

    def admit_certificate(self, context: aio.ServicerContext[Any, Any], method: str) -> None:
        """As `admit`, for whoever shows a certificate. Raises UnauthenticatedError where none was shown."""
        self.admit(principal_of(context.auth_context(), self.quota), method)

    def count(self, error: HeliographError) -> None:
        """A call was refused."""
        self.refused += 1
        now = time.monotonic()
        if now - self._told > REFUSALS_SECONDS:
            self._told = now
            logger.warning("%d calls were refused so far; the last one: %s", self.refused, error.message)


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token that goes with a call. Raises UnauthenticatedError, which does not repeat it."""
    found = [value for key, value in metadata or () if key == TOKEN_KEY]
    if not found:
        raise UnauthenticatedError("the server asks for a token, and none was shown", advice=_SHOW)
    shown = found[0]
    if len(found) > 1 or not isinstance(shown, str) or shown[: len(BEARER)].lower() != BEARER.lower():
        raise UnauthenticatedError(
            "what was shown is not one token", advice="one header: authorization: Bearer TOKEN"
        )
    token = shown[len(BEARER) :].strip()
    if not 0 < len(token) <= MAX_TOKEN:
        raise UnauthenticatedError("what was shown is no token", advice=_SHOW)
    return token


def principal_of(found: Mapping[str, Iterable[bytes]], quota: Quota) -> Principal:
    """Who shows a certificate, by what gRPC says of a connection. Raises UnauthenticatedError."""
    names = [one.decode("utf-8", "replace") for one in found.get("x509_common_name", ())]
    if len(names) != 1 or not names[0].strip() or not names[0].isprintable():
        raise UnauthenticatedError(
            "the server asks for a certificate with a name, and none was shown",
            advice="connect with grpcs://, certificate=FILE and key=FILE",
        )
    return Principal(names[0], CERTIFICATE_RIGHTS, quota, names[0])


def refusing(error: HeliographError) -> Handler:
    """Refuses a call of any kind at once: it needs none of its messages for that."""

    async def refuse(_requests: object, context: aio.ServicerContext[Any, Any]) -> None:
        await _abort(error, context)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(error: HeliographError, context: aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(_CODES[code_for(error)], error.message, error_to_metadata(error))


def by_certificate(handler: Handler, method: str, gate: AuthInterceptor) -> Handler:
    """The handler behind a check that needs the connection, of the same kind."""

    async def check(context: aio.ServicerContext[Any, Any]) -> None:
        try:
            gate.admit_certificate(context, method)
        except HeliographError as error:
            gate.count(error)
            await _abort(error, context)

    return _remade(handler, check)


def _remade(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Handler:
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
