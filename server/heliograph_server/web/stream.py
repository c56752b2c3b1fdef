"""Replies that last: the stream of events of a page, and a large page of its own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from heliograph_server.web.hub import Hub, Viewer

#: The most time in which a viewer takes a message; a slower one is lost.
STALL_SECONDS = 20.0
#: A stream without news has a comment so often, so that proxies keep it.
BEAT_SECONDS = 15.0
#: The most time in which a client takes a large page, and the bytes of a part of it.
REPLY_SECONDS, PART_BYTES = 120.0, 256 * 1024
_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}

T = TypeVar("T")


class EventStream(Response):
    """The messages of a viewer, which leaves when the connection ends or takes nothing for too
    long."""

    def __init__(self, hub: Hub, viewer: Viewer) -> None:
        super().__init__()
        self._hub, self._viewer = hub, viewer
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(gone_from(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.leave(self._viewer)
            gone.cancel()
            sending.cancel()
            with suppress(Exception):
                await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(lambda: task.cancel() if self._is_sending else self._viewer.beat())
        reason = ""
        try:
            while not reason:
                deadline.move(BEAT_SECONDS)
                message, reason = await self._viewer.take()
                if reason:
                    told = json.dumps({"reason": reason})
                    message += f"event: end\ndata: {told}\n\n".encode()
                deadline.move(STALL_SECONDS)
                self._is_sending = True
                await send({"type": "http.response.body", "body": message, "more_body": not reason})
                self._is_sending = False
        finally:
            deadline.end()


class Deadline:
    """Calls a function once a time has passed, unless it was moved before.

    Moving it makes no timer of the event loop: the one that there is looks again later.
    """

    def __init__(self, passed: Callable[[], object]) -> None:
        self._passed, self._loop = passed, asyncio.get_running_loop()
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def move(self, seconds: float) -> None:
        """Let it be so many seconds from now."""
        self._at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._at:
            self._look_at(self._at)

    def end(self) -> None:
        """Never call the function any more. Idempotent."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._at > self._loop.time():
            self._look_at(self._at)
        else:
            self._passed()


class SlowReply(HTMLResponse):
    """A page that is sent in parts, as its client takes them, within a time; then `over` is
    called."""

    def __init__(self, content: bytes, headers: Mapping[str, str], over: Callable[[], None]) -> None:
        super().__init__(content, headers=headers)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = memoryview(self.body)
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            # A client that takes too long gets no end, which is an error there.
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLY_SECONDS):
                    await send(start)
                    for place in range(0, len(body), PART_BYTES):
                        part = bytes(body[place : place + PART_BYTES])
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._over()


async def while_there(doing: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Wait for what a client asked for, but no longer than the client does. Raises
    ClientDisconnect."""
    task, gone = asyncio.ensure_future(doing), asyncio.ensure_future(gone_from(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def gone_from(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
