"""Metrics over HTTP, on a port and threads of their own, so that scrapers cannot disturb the
daemon.

A thread with an event loop answers; another one collects. The number of connections and their
lifetime are bounded, and concurrent requests share one collection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.sockets import host_and_port

logger = logging.getLogger(__name__)

#: The most concurrent scrapers; further ones get status 503.
MAX_CONNECTIONS = 16
#: The timeouts for reading a request, and for sending its answer.
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 10.0
#: The longest request.
REQUEST_BYTES = 8 * 2**10
#: The most turns of the loop between accepting a connection and starting its task.
ACCEPT_TURNS = 5
#: The timeout for the end of the thread.
STOP_SECONDS = 5.0
_ADVICE = "choose another port for metrics_listen, an address of this host, or stop the other listener"

#: Takes the Accept header, and returns the content type and the body. May block.
Collect: TypeAlias = Callable[[str], tuple[str, bytes]]


def bind_metrics(where: str) -> socket.socket:
    """Return a socket that listens at HOST:PORT. Raises ConfigurationError."""
    address = host_and_port(where, "metrics_listen")
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(found)
            made.listen(MAX_CONNECTIONS)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "the address is in use" if in_use else error.strerror or str(error)
        raise ConfigurationError(f"cannot listen for metrics on {where}: {why}", advice=_ADVICE) from None
    return made


class MetricsServer:
    """The server of metrics. Owns the socket."""

    def __init__(self, listener: socket.socket, collect: Collect, outcomes: Counter[str]) -> None:
        """`outcomes`: counts requests as "ok" and "refused"."""
        self._listener, self._collect, self._outcomes = listener, collect, outcomes
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        self._collector = ThreadPoolExecutor(1, "heliograph-metrics-collect")
        self._collecting: dict[str, asyncio.Future[tuple[str, bytes]]] = {}
        self._open: set[asyncio.Task[None]] = set()
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="heliograph-metrics", daemon=True)

    def __repr__(self) -> str:
        return f"<MetricsServer at {self.url}: {len(self._open)} connections>"

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()
        self._started.result(STOP_SECONDS)

    def close(self) -> None:
        """End all connections and the thread. Idempotent."""
        if self._thread.is_alive():
            loop, stop = self._started.result(STOP_SECONDS)
            loop.call_soon_threadsafe(stop.set)
            self._thread.join(STOP_SECONDS)
        self._listener.close()
        self._collector.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        # The daemon may use uvloop; this loop need not be fast.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=REQUEST_BYTES)
        self._started.set_result((asyncio.get_running_loop(), stop))
        try:
            await stop.wait()
        finally:
            # Connections that were just accepted become tasks first, and end like the others:
            # closing the server before would leak their sockets.
            asyncio.get_running_loop().remove_reader(self._listener)
            for _ in range(ACCEPT_TURNS):
                await asyncio.sleep(0)
            server.close()
            for task in tuple(self._open):
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await server.wait_closed()

    # One connection

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._talk(reader, writer, len(self._open)))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        # Otherwise a slow reader would keep unsent data in memory.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, others: int) -> None:
        try:
            if others >= MAX_CONNECTIONS:
                self._outcomes["refused"] += 1
                writer.write(response("503 Service Unavailable", b"too many scrapers at once\n"))
                return
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(await self._answer(request))
                await writer.drain()
                writer.write_eof()
                # Wait until the client has read all, or is gone.
                await reader.read(1)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            self._outcomes["refused"] += 1
            logger.debug("a request for metrics was aborted: %s", type(error).__name__)
        except Exception:
            logger.exception("cannot serve metrics")

    async def _answer(self, request: bytes) -> bytes:
        head, *lines = request.decode("latin-1").split("\r\n")
        method, path = (*head.split(" "), "", "")[:2]
        if path.partition("?")[0] not in ("/", "/metrics"):
            self._outcomes["refused"] += 1
            return response("404 Not Found", b"see /metrics\n")
        if method not in ("GET", "HEAD"):
            self._outcomes["refused"] += 1
            return response("405 Method Not Allowed", b"use GET or HEAD\n")
        headers = (line.partition(":") for line in lines)
        accept = next((value for name, _, value in headers if name.strip().lower() == "accept"), "")
        kind, body = await self._collected(accept.strip())
        self._outcomes["ok"] += 1
        return response("200 OK", body, kind, with_body=method == "GET")

    async def _collected(self, accept: str) -> tuple[str, bytes]:
        """Collect the metrics; concurrent requests for the same form share a collection."""
        form = "openmetrics" if "application/openmetrics-text" in accept else "text"
        if (collecting := self._collecting.get(form)) is None:
            loop = asyncio.get_running_loop()
            header = accept if form == "openmetrics" else ""
            collecting = loop.run_in_executor(self._collector, self._collect, header)
            self._collecting[form] = collecting
            collecting.add_done_callback(lambda _: self._collecting.pop(form, None))
        return await asyncio.shield(collecting)


def response(
    status: str, body: bytes, kind: str = "text/plain; charset=utf-8", with_body: bool = True
) -> bytes:
    """A whole HTTP response; the connection ends after it."""
    head = f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"
    return ("\r\n".join(head) + "\r\n\r\n").encode() + (body if with_body else b"")
