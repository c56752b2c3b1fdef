"""The ASGI application: its routes, who may call them, and the life of its model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import heliograph as hg
from heliograph.llm.serving.engine import SECONDS, Server
from heliograph.llm.serving.http import parameters
from heliograph.llm.serving.http.endpoints import Endpoints
from heliograph.llm.serving.http.errors import RETRY_SECONDS, ApiError, from_heliograph
from heliograph.llm.serving.http.metrics import Metrics

logger = logging.getLogger(__name__)

#: The wait after a daemon that is lost could not be reached.
REOPEN_SECONDS = 1.0

#: Opens a model, and closes it at the end.
OpenServer = Callable[[], AbstractAsyncContextManager[Server]]


def _anybody(_: str) -> str:
    return ""


def _ignore(_: BaseException) -> None:
    pass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of an application."""

    #: The model's name for clients.
    name: str
    #: Returns the tenant of a token. Raises UnauthenticatedError and PermissionDeniedError.
    authenticate: Callable[[str], str] = _anybody
    #: The most time of an answer, its wait included.
    seconds: float = SECONDS
    #: Called when the model cannot be opened.
    on_failure: Callable[[BaseException], None] = _ignore


class _State:
    """The application's model, once it is loaded."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.endpoints: Endpoints | None = None
        self._ending = asyncio.Event()

    async def live(self, open_server: OpenServer) -> None:
        """Keep the model open to the end. It is opened anew when its session is lost."""
        was_open = False
        while not self._ending.is_set():
            try:
                async with open_server() as server:
                    was_open = True
                    await self._keep(server)
            except hg.ConnectionError as error:
                if not was_open:
                    self._fail(error)
                    return
                logger.warning("the model cannot be loaded again yet: %s", error.message)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), REOPEN_SECONDS)
            except Exception as error:
                self._fail(error)
                return

    async def _keep(self, server: Server) -> None:
        """Serve a model until the end, or until its session is lost."""
        settings = self.settings
        if settings.name in server.adapters.by_name:
            raise hg.InvalidArgumentError(
                f"an adapter has the model's name, {settings.name!r}", advice="name one otherwise"
            )
        self.metrics.watch(server)
        self.endpoints = Endpoints(server, settings.name, self.metrics, settings.seconds)
        waits = [asyncio.create_task(one.wait()) for one in (self._ending, server.lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.endpoints = None
            for one in waits:
                one.cancel()
        if not self._ending.is_set():
            logger.warning("the connection to the daemon is lost; the model is loaded again")

    def _fail(self, error: Exception) -> None:
        logger.error("the model cannot be served: %s", error)
        self.settings.on_failure(error)

    def end(self) -> None:
        """Close the model."""
        self._ending.set()

    @property
    def loaded(self) -> Endpoints:
        """The endpoints. Raises ApiError while there are none."""
        found = self.endpoints
        if found is None or found.server.is_draining or found.server.lost.is_set():
            is_ending = found is not None and found.server.is_draining
            why = "the server shuts down" if is_ending else "the model is loading"
            raise ApiError(503, why, code="unavailable", headers={"retry-after": str(RETRY_SECONDS)})
        return found


Endpoint = Callable[[Endpoints, Request], Awaitable[Response]]
ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/v1/models", Endpoints.models),
    ("GET", "/v1/models/{model:path}", Endpoints.one_model),
    ("POST", "/v1/completions", Endpoints.completions),
    ("POST", "/v1/chat/completions", Endpoints.chat),
    ("POST", "/v1/embeddings", Endpoints.embeddings),
    ("POST", "/tokenize", Endpoints.tokenize),
    ("POST", "/detokenize", Endpoints.detokenize),
)


def make_app(open_server: OpenServer, settings: HttpSettings) -> Starlette:
    """Return the application of a model, which it loads when it starts, while it listens already."""
    state = _State(settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        living = asyncio.create_task(state.live(open_server), name="llm-serve")
        try:
            yield
        finally:
            state.end()
            if state.endpoints is None:
                living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    async def health(_: Request) -> Response:
        found = state.loaded
        if not found.server.is_connected:
            again = {"retry-after": str(RETRY_SECONDS)}
            return JSONResponse({"status": "reconnecting", "model": found.name}, 503, again)
        return JSONResponse({"status": "ok", "model": found.name})

    async def metrics(request: Request) -> Response:
        _authenticate(request, settings)
        return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    routes = [Route(path, _replying(state, path, call), methods=[method]) for method, path, call in ROUTES]
    routes += [Route("/health", health), Route("/metrics", metrics)]
    handlers = dict.fromkeys((ApiError, hg.HeliographError, HTTPException, Exception), _handle)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _replying(state: _State, path: str, call: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that checks its caller, and counts its replies."""

    async def reply(request: Request) -> Response:
        try:
            request.state.tenant = _authenticate(request, state.settings)
            response = await call(state.loaded, request)
        except (ApiError, hg.HeliographError) as error:
            response = _refuse(error)
        except ClientDisconnect:
            response = Response(status_code=499)
        state.metrics.requests.labels(path, response.status_code).inc()
        return response

    return reply


def _authenticate(request: Request, settings: HttpSettings) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return settings.authenticate(token.strip() if kind.lower() == "bearer" else "")


async def _handle(_: Request, error: Exception) -> Response:
    return _refuse(error)


def _refuse(error: Exception) -> Response:
    """Return the reply to an error."""
    match error:
        case ApiError():
            found = error
        case hg.HeliographError():
            found = from_heliograph(error, dict.fromkeys(parameters.CHAT | parameters.COMPLETION))
        case HTTPException(status_code=405):
            known = (error.headers or {}).get("Allow", "")
            why = f"this path takes {known}, and no other method"
            found = ApiError(405, why, code="method_not_allowed", headers={"allow": known})
        case HTTPException():
            paths = ", ".join(path for _, path, _ in ROUTES)
            found = ApiError(error.status_code, f"there is no such path; paths: {paths}", code="not_found")
        case _:
            found = ApiError(500, "the server fails: its log says why", code="internal_error")
    # In ASCII: a text of the request may have half of a surrogate pair.
    return Response(json.dumps(found.body), found.status, dict(found.headers), "application/json")
