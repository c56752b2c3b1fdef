"""The application: the page and its files, sign-in, the stream of events, plans and actions.

Starlette routes; errors are JSON: {"error": ..., "advice": ...}. Files are open to all, as they
hold nothing of the host; everything else needs a caller.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from heliograph.explain.pictures.page import page_policy
from heliograph_proto.errors import (
    HeliographError,
    InvalidInputError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownHandleError,
)
from heliograph_proto.sessions import LEVELS
from heliograph_server.auth.access import Access
from heliograph_server.auth.interceptor import token_of
from heliograph_server.resources.principals import ANYBODY, Principal, Right, called_by
from heliograph_server.rpc.errors import refusal_of
from heliograph_server.rpc.operators import Operators
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.session import Session
from heliograph_server.telemetry.audit import Action, AuditLog
from heliograph_server.web import guard
from heliograph_server.web.explaining.explainer import Explainer
from heliograph_server.web.facts import View
from heliograph_server.web.history import MOST_SAMPLES
from heliograph_server.web.hub import Hub
from heliograph_server.web.replies import (
    json_of,
    number_of,
    refusal,
    refused,
    refused_in_frame,
    unknown,
    with_headers,
)
from heliograph_server.web.sign_in import MOST_SECONDS, Browser, Browsers
from heliograph_server.web.stream import EventStream, SlowReply, while_there

logger = logging.getLogger(__name__)

COOKIE = "heliograph"
#: The types of the page's files.
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json",
}
_SIGN_IN = "sign in with a token"


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller of the application, and its browser if a cookie identified it."""

    principal: Principal
    browser: Browser | None = None


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    type: str
    tag: str


Endpoint = Callable[["WebApp", Request, Caller], Awaitable[Response]]


class WebApp:
    """The endpoints."""

    def __init__(
        self,
        slot: HostSlot,
        access: Access,
        hub: Hub,
        explainer: Explainer,
        browsers: Browsers,
        operators: Operators,
        audit: AuditLog,
        own_name: str,
    ) -> None:
        """`own_name`: the host in the configured address."""
        self._slot, self._access, self._hub, self._browsers = slot, access, hub, browsers
        self._explainer = explainer
        self._operators, self._audit, self._own_name = operators, audit, own_name
        self._files = _files()

    def app(self) -> ASGIApp:
        """The application, whose every reply has the headers of `guard`."""
        routes = [
            Route(path, self._replying(call, changes=verb == "POST"), methods=[verb])
            for verb, path, call in _ROUTES
        ]
        picture = self._replying(WebApp.picture, refused=refused_in_frame)
        routes += [
            Route("/api/plans/{session}/{plan}/picture", picture, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route("/page/{name}", self._file, methods=["GET"]),
            Route("/api/sign-in", self._sign_in, methods=["POST"]),
        ]
        return with_headers(Starlette(routes=routes, exception_handlers={HTTPException: unknown}))

    def _replying(
        self,
        call: Endpoint,
        *,
        changes: bool = False,
        refused: Callable[[HeliographError], Response] = refused,
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that identifies its caller, and replies to errors."""

        async def reply(request: Request) -> Response:
            try:
                if changes:
                    guard.check_origin(request.headers)
                caller = self._caller(request)
                called_by(caller.principal)
                with self._slot.calling(is_operators=caller.principal.may(Right.ADMIN)):
                    return await call(self, request, caller)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return refused(refusal_of(error, request.url.path))

        return reply

    def _caller(self, request: Request) -> Caller:
        """Identify a caller. Raises UnauthenticatedError, PermissionDeniedError."""
        access = self._access
        if access.tokens is None or access.gate is None:
            guard.check_host(request.headers.get("host", ""), self._own_name)
            return Caller(ANYBODY)
        if (given := request.headers.get("authorization")) is not None:
            return Caller(self._identified(given))
        if not (name := request.cookies.get(self._cookie(request), "")):
            raise UnauthenticatedError("you are not signed in", advice=_SIGN_IN)
        browser = self._browsers.find(name)
        if (error := access.why_not(browser.principal)) is not None:
            browser.is_out = True
            raise error
        return Caller(browser.principal, browser)

    def _identified(self, authorization: str) -> Principal:
        """Return the principal of a token, who may look. Counts those who are refused. Raises
        UnauthenticatedError, PermissionDeniedError."""
        tokens, gate = self._access.tokens, self._access.gate
        assert tokens is not None and gate is not None
        try:
            found = tokens.identify(token_of((("authorization", authorization),)), gate.quota)
            return _who_may_look(found)
        except HeliographError as error:
            self._slot.refused[error.reason] += 1
            raise

    @staticmethod
    def _cookie(request: Request) -> str:
        # With this prefix a browser takes the cookie over TLS only, and from this host only.
        return f"__Host-{COOKIE}" if request.url.scheme == "https" else f"{COOKIE}-{request.url.port or 80}"

    # The page

    async def _page(self, request: Request) -> Response:
        return self._reply_with(request, "index.html")

    async def _file(self, request: Request) -> Response:
        return self._reply_with(request, request.path_params["name"])

    def _reply_with(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            return refusal(404, "there is no such page", "the dashboard is at /")
        headers = {"cache-control": "no-cache", "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.type, headers=headers)

    # Sign-in

    async def _sign_in(self, request: Request) -> Response:
        peer = request.client.host if request.client is not None else ""
        try:
            guard.check_origin(request.headers)
            body = await json_of(request)
            access = self._access
            if access.tokens is None or access.gate is None:
                raise InvalidInputError("the daemon asks for no token", advice="open the page")
            self._browsers.check_failures(peer)
            token = body.get("token")
            try:
                principal = self._identified(f"Bearer {token}" if isinstance(token, str) else "")
            except HeliographError:
                self._browsers.failed(peer)
                raise
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return refused(refusal_of(error, request.url.path))
        reply = JSONResponse(_facts_of(principal, asks=True))
        reply.set_cookie(
            self._cookie(request),
            self._browsers.add(principal),
            max_age=round(MOST_SECONDS),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        logger.info("%s signed in to the dashboard from %s", principal.shown, peer)
        return reply

    async def sign_out(self, request: Request, caller: Caller) -> Response:
        name = self._cookie(request)
        self._browsers.remove(request.cookies.get(name, ""))
        reply = JSONResponse({})
        reply.delete_cookie(
            name, path="/", secure=request.url.scheme == "https", httponly=True, samesite="strict"
        )
        return reply

    async def me(self, request: Request, caller: Caller) -> Response:
        return JSONResponse(_facts_of(caller.principal, asks=self._access.tokens is not None))

    # Looking

    async def events(self, request: Request, caller: Caller) -> Response:
        return EventStream(self._hub, self._hub.join(caller.principal, caller.browser))

    async def history(self, request: Request, caller: Caller) -> Response:
        seconds = number_of(request.query_params.get("seconds", str(MOST_SAMPLES)), "seconds")
        if not 1 <= seconds <= MOST_SAMPLES:
            raise InvalidInputError(
                f"a history of {seconds:,} seconds", advice=f"the daemon keeps {MOST_SAMPLES}"
            )
        found = await self._hub.history(View.of(caller.principal), seconds)
        return Response(found, media_type="application/json")

    async def plans(self, request: Request, caller: Caller) -> Response:
        found = await self._hub.plans(View.of(caller.principal))
        return Response(found, media_type="application/json")

    async def plan(self, request: Request, caller: Caller) -> Response:
        view, session, plan = self._asked_for(request, caller)
        return JSONResponse(await self._explainer.plan(view, session, plan))

    async def picture(self, request: Request, caller: Caller) -> Response:
        view, session, plan = self._asked_for(request, caller)
        place = self._explainer.place(view)
        try:
            drawn = await while_there(self._explainer.picture(place, session, plan), request.receive)
        except BaseException:
            self._explainer.leave(place)
            raise
        return SlowReply(drawn, guard.framed(page_policy()), partial(self._explainer.leave, place))

    def _asked_for(self, request: Request, caller: Caller) -> tuple[View, Session, int]:
        """Return a session and the number of a plan, both in the path. Raises InvalidInputError,
        UnknownHandleError."""
        number = number_of(request.path_params["session"], "a session")
        plan, view = number_of(request.path_params["plan"], "a plan"), View.of(caller.principal)
        found = next((one for one in self._slot.host.sessions if one.number == number), None)
        if found is None or not view.may_see(found.principal.tenant):
            raise UnknownHandleError(f"there is no session {number}", advice="it may have ended")
        return view, found, plan

    # Actions

    async def end_session(self, request: Request, caller: Caller) -> Response:
        body = await json_of(request)
        number, reason = body.get("number"), body.get("reason", "")
        if type(number) is not int or not isinstance(reason, str):
            raise InvalidInputError("a session has a number, and a reason is a text")
        await self._acting(
            request, caller, "EndSession", body, lambda: self._operators.end_session(number, reason)
        )
        return JSONResponse({})

    async def drain(self, request: Request, caller: Caller) -> Response:
        body = await json_of(request)
        seconds, stay = body.get("seconds", 0), body.get("stay", True)
        if type(seconds) not in (int, float) or not 0 <= seconds < 2**63 or type(stay) is not bool:
            raise InvalidInputError("a drain has a number of seconds, and stays or does not")
        await self._acting(
            request, caller, "Drain", body, lambda: self._operators.drain(float(seconds), stay=stay)
        )
        return JSONResponse({})

    async def undo_drain(self, request: Request, caller: Caller) -> Response:
        await self._acting(request, caller, "UndoDrain", {}, self._operators.undo_drain)
        return JSONResponse({})

    async def set_log_level(self, request: Request, caller: Caller) -> Response:
        body = await json_of(request)
        level = body.get("level")
        if level not in LEVELS:
            raise InvalidInputError(f"the level is {level!r:.40}", advice=f"use one of {', '.join(LEVELS)}")

        async def act() -> str:
            return self._operators.set_log_level(str(level))

        return JSONResponse({"previous": await self._acting(request, caller, "SetLogLevel", body, act)})

    async def _acting(
        self,
        request: Request,
        caller: Caller,
        method: str,
        arguments: Mapping[str, Any],
        act: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Act for an operator, and record it in the audit log.

        Raises PermissionDeniedError, and the errors of `act`.
        """
        principal, outcome, why = caller.principal, "ok", ""
        try:
            if not principal.may(Right.ADMIN):
                outcome = "refused"
                raise PermissionDeniedError(
                    f"{principal.shown!r} may not do that",
                    advice=f"it needs the right {Right.ADMIN.value!r}; the server's operator grants it",
                )
            return await act()
        except BaseException as error:
            outcome = outcome if outcome != "ok" else "failed"
            why = error.message if isinstance(error, HeliographError) else type(error).__name__
            raise
        finally:
            peer = f"{request.client.host}:{request.client.port}" if request.client is not None else ""
            self._audit.record(Action(method, outcome, principal, f"web:{peer}", arguments, why))


#: Verb, path and endpoint of what needs a caller.
_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/api/me", WebApp.me),
    ("GET", "/api/events", WebApp.events),
    ("GET", "/api/history", WebApp.history),
    ("GET", "/api/plans", WebApp.plans),
    ("GET", "/api/plans/{session}/{plan}", WebApp.plan),
    ("POST", "/api/sign-out", WebApp.sign_out),
    ("POST", "/api/end-session", WebApp.end_session),
    ("POST", "/api/drain", WebApp.drain),
    ("POST", "/api/undo-drain", WebApp.undo_drain),
    ("POST", "/api/log-level", WebApp.set_log_level),
)


def _who_may_look(principal: Principal) -> Principal:
    """Return a principal with the right to look. Raises PermissionDeniedError."""
    if not (principal.may(Right.USE) or principal.may(Right.ADMIN)):
        raise PermissionDeniedError(
            f"{principal.shown!r} may not look at the dashboard",
            advice="it needs the right 'use' or 'admin'; the server's operator grants it",
        )
    return principal


def _facts_of(principal: Principal, *, asks: bool) -> dict[str, Any]:
    return {
        "name": principal.shown,
        "tenant": principal.tenant,
        "operator": principal.may(Right.ADMIN),
        "signed_in": asks,
    }


def _files() -> dict[str, _File]:
    """The files of the page, by name."""
    found = {}
    for one in resources.files("heliograph_server.web").joinpath("page").iterdir():
        if (type := _TYPES.get(one.name.rpartition(".")[2])) is not None:
            content = one.read_bytes()
            found[one.name] = _File(content, type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
