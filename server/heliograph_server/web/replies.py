"""Bodies of requests and replies of the dashboard: errors as JSON or as a page, and headers."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heliograph.explain.pictures.words import marked_up
from heliograph_proto.errors import HeliographError, InvalidInputError
from heliograph_server.http.requests import read_body, status_of
from heliograph_server.web import guard

#: The most bytes of a request.
MOST_BODY = 8192


def with_headers(app: ASGIApp) -> ASGIApp:
    """The application with the headers of `guard` in every reply that has no others instead."""
    every = {"cache-control": "no-store", **guard.HEADERS}
    raw = [(name.encode(), value.encode()) for name, value in every.items()]

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                own = {name.lower() for name, _ in headers}
                message = {**message, "headers": [*headers, *(one for one in raw if one[0] not in own)]}
            await send(message)

        await app(scope, receive, send_with)

    return serve


async def json_of(request: Request) -> dict[str, Any]:
    """Read a body that is a JSON object. Raises InvalidInputError, LimitExceededError."""
    data = await read_body(request, MOST_BODY)
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise InvalidInputError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise InvalidInputError("the body is no JSON object")
    return found


def number_of(text: str, what: str) -> int:
    """Return the number in a part of an address. Raises InvalidInputError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidInputError(f"{what} is {text!r:.40}", advice="give a number")
    return int(text)


def refused(error: HeliographError) -> Response:
    """The reply to an error, in JSON."""
    return refusal(status_of(error), error.message, error.advice or "")


def refused_in_frame(error: HeliographError) -> Response:
    """The reply to an error where a page with a picture was asked for: a page with its words."""
    words = "".join(f"<p>{marked_up(one)}</p>" for one in (error.message, error.advice) if one)
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>No picture</title>'
    content = f'<!doctype html><html lang="en"><head>{head}</head><body>{words}</body></html>'
    return HTMLResponse(content, status_of(error), headers=guard.framed())


def refusal(status: int, error: str, advice: str) -> Response:
    """A reply that refuses, in JSON."""
    # In ASCII: a text of the request may have half of a surrogate pair.
    content = json.dumps({"error": error, "advice": advice})
    return Response(content, status, media_type="application/json")


async def unknown(request: Request, error: Exception) -> Response:
    """The reply to a request for another path, or with another verb."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail, "the dashboard is at /")
