"""A language model behind HTTP, in a thread of this process, and a client of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import uvicorn

import heliograph as hg
from heliograph._base.reopening import REOPEN_SECONDS
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving.http import HttpSettings, make_app

SECONDS = 60.0


@dataclass
class HttpModel:
    """A model that is served at a port of loopback."""

    port: int
    #: Set by its thread once it is loaded.
    server: Server | None = None
    loop: asyncio.AbstractEventLoop | None = None
    #: The tasks of its thread that were left at the end.
    left: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def call(
        self, method: str, path: str, body: Any = None, token: str = "", raw: bytes | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Return the status, the JSON or the text, and the headers of a reply."""
        with self.opened(method, path, body, token, raw) as response:
            text, headers = response.read().decode(), {k.lower(): v for k, v in response.getheaders()}
            is_json = headers.get("content-type", "").startswith("application/json")
            return response.status, json.loads(text) if is_json else text, headers

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON of a reply that must be 200."""
        status, found, _ = self.call("POST", path, body)
        assert status == 200, found
        return found

    @contextmanager
    def opened(
        self, method: str, path: str, body: Any = None, token: str = "", raw: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        """A reply that is not read yet; its connection closes at the end."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        content = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request(method, path, content, headers)
            yield connection.getresponse()

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream; it must end with [DONE]."""
        with self.opened("POST", path, {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            assert response.getheader("content-type", "").startswith("text/event-stream")
            found = list(events(response))
        assert found.pop() == "[DONE]"
        return found

    def figures(self) -> dict[str, float]:
        """Return the figures of /metrics by name."""
        lines = [line for line in self.call("GET", "/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call on the thread of the server."""

        async def made() -> Any:
            return call()

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(made(), self.loop).result(SECONDS)


def events(response: HTTPResponse) -> Iterator[Any]:
    """Yield the events of a stream as they come."""
    for line in response:
        if line.startswith(b"data: "):
            text = line.removeprefix(b"data: ").decode().strip()
            yield text if text == "[DONE]" else json.loads(text)


@contextmanager
def served(
    url: str | Callable[[], str],
    model: Path,
    bounds: Bounds | None = None,
    *,
    gate: threading.Event | None = None,
    draft: hg.llm.Draft | None = None,
    reconnect: float = REOPEN_SECONDS,
    **settings: Any,
) -> Iterator[HttpModel]:
    """Serve a model of a daemon, whose URL may be another one each time that it is asked for. With
    a gate, the model loads once that is set, and callers come earlier."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = HttpModel(listening.getsockname()[1])

        @asynccontextmanager
        async def opened() -> AsyncIterator[Server]:
            if gate is not None:
                await asyncio.to_thread(gate.wait, SECONDS)
            found_url = url() if callable(url) else url
            async with hg.aio.connect(found_url, progress=None, reconnect=reconnect) as session:
                found.server = await Server.load(session, model, bounds=bounds, draft=draft)
                try:
                    found.ready.set()
                    yield found.server
                finally:
                    await found.server.close()

        app = make_app(opened, HttpSettings("small", **settings))
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=10)
        server = uvicorn.Server(config)

        async def serve() -> None:
            found.loop = asyncio.get_running_loop()
            # One thread, which starts as the model loads: tests may look for threads that are left.
            found.loop.set_default_executor(ThreadPoolExecutor(1))
            await server.serve(sockets=[listening])
            own = asyncio.current_task()
            found.left = [repr(one) for one in asyncio.all_tasks() if one is not own]

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="http-model")
        thread.start()
        try:
            if gate is None:
                assert found.ready.wait(SECONDS)
            yield found
        finally:
            server.should_exit = True
            thread.join(SECONDS)
        assert not thread.is_alive() and not found.left, found.left
