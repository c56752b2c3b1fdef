"""Daemons with a dashboard, and work for them in a process of its own."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from forked_daemons import serve
from pool_daemons import DEVICE, daemons
from raw_client import RawSession, raw_channel
from waiting import until

from heliograph.testing import wait_until_serving
from heliograph_proto.digests import digest_of
from heliograph_proto.v1 import bulk_pb2

SECONDS = 30.0
HERE = Path(__file__).parent


class WebDaemon:
    """A daemon with a dashboard, which keeps its ports when it is started again."""

    def __init__(self, *arguments: str, port: int = 0, web: str = "127.0.0.1:0") -> None:
        self.arguments, self._port, self._web = arguments, port, web
        self._start()

    def _start(self) -> None:
        listen = "--listen", f"grpc://127.0.0.1:{self._port}", "--web", self._web
        self.process = serve(*listen, *self.arguments, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = self.web = ""
        while not self.web:
            line = self.process.stdout.readline()
            assert line, "the daemon did not start"
            what, _, where = line.strip().rpartition(" ")
            if what == "listening on":
                self.url = where.partition("?")[0]
                self.shown = where
            elif what == "dashboard at":
                self.web = where
        self._port = int(self.url.rpartition(":")[2])
        scheme, _, place = self.web.partition("://")
        self._web = place if scheme == "http" else self.web
        wait_until_serving(self.shown)

    def restart(self) -> None:
        """Another life of it, at the same addresses."""
        self.end()
        self._start()

    def end(self) -> None:
        """End it at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def web_daemon(*arguments: str, **options: Any) -> Iterator[WebDaemon]:
    """A daemon on one small CPU device."""
    made = WebDaemon("--device", DEVICE, *arguments, **options)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def web_pool(*arguments: str) -> Iterator[WebDaemon]:
    """The head of a pool of three: itself and two members."""
    with daemons(2) as members, ExitStack() as stack:
        source = "static:" + ",".join(f"m{number}={one.host}" for number, one in enumerate(members))
        head = stack.enter_context(web_daemon("--pool", source, *arguments))
        until(lambda: len(state_of(head)["devices"]) == 3, "the members are there")
        yield head


@contextmanager
def load(url: str, *names: str, token: str = "") -> Iterator[subprocess.Popen[str]]:
    """The work of these names (see `web_load`) in a process of its own, once it has begun."""
    command = [sys.executable, str(HERE / "web_load.py"), url, token, *names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline().strip() == "working", "the work did not begin"
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(SECONDS)
        process.stdout.close()


@contextmanager
def unfinished_upload(url: str, size: int, part: int) -> Iterator[None]:
    """An upload of a weight of which only a part comes."""
    over, digest = threading.Event(), digest_of(secrets.token_bytes(32))

    def pieces(token: bytes) -> Iterator[bulk_pb2.UploadRequest]:
        target = bulk_pb2.UploadTarget(session=token, size_bytes=size, digest=digest)
        yield bulk_pb2.UploadRequest(target=target, data=bytes(part))
        over.wait(4 * SECONDS)

    with raw_channel(url) as channel:
        raw = RawSession(channel).attach()
        call = raw.bulk.Upload.future(pieces(raw.token), timeout=4 * SECONDS)
        try:
            yield
        finally:
            over.set()
            call.cancel()
            raw.close()


@contextmanager
def llm_serve(model: Path, *arguments: str) -> Iterator[str]:
    """`heliograph llm-serve` in a process of its own; its address."""
    given = ["llm-serve", str(model), "--server", "local:", "--listen", "127.0.0.1:0", *arguments]
    command = [sys.executable, "-m", "heliograph.cli", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), "the server of a language model did not start"
        yield line.split()[-1].removesuffix("/v1")
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


@contextmanager
def named_session(url: str, client: str) -> Iterator[None]:
    """A session whose client calls itself so."""
    with raw_channel(url) as channel:
        raw = RawSession(channel, client).attach()
        try:
            yield
        finally:
            raw.close()


# Without a browser


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    daemon: WebDaemon, path: str, body: Any = None, *, headers: dict[str, str] | None = None, verb: str = ""
) -> Reply:
    """Send a request. One with a body has the header of the page, unless `headers` says otherwise."""
    host, _, port = daemon.web.partition("://")[2].rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=SECONDS)
    try:
        given = dict(headers or {})
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            given = {"x-heliograph": "1", **given}
        connection.request(verb or ("GET" if body is None else "POST"), path, data, given)
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, found, reply.read())
    finally:
        connection.close()


def bearer(token: str) -> dict[str, str]:
    """The header with a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


@contextmanager
def events(daemon: WebDaemon, token: str = "", cookie: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
    """The stream of events: kinds and contents."""
    given = bearer(token) | ({"cookie": cookie} if cookie else {})
    request = urllib.request.Request(f"{daemon.web}/api/events", headers=given)
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        yield _parsed(reply)


def _parsed(reply: Any) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in reply:
        name, _, text = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = text
        elif name == "data":
            yield kind, json.loads(text)


def first(found: Iterator[tuple[str, Any]], kind: str, holds: Callable[[Any], bool] = lambda _: True) -> Any:
    """The first content of a kind for which something holds."""
    end = time.monotonic() + SECONDS
    for one, content in found:
        if one == kind and holds(content):
            return content
        assert time.monotonic() < end, f"no {kind} as wanted came in time"
    raise AssertionError("the stream has ended")


def state_of(daemon: WebDaemon, token: str = "") -> Any:
    """The state now: a new page gets one first that may be a second old."""
    now_ms = time.time() * 1e3
    with events(daemon, token) as found:
        return first(found, "state", lambda one: one["at"] >= now_ms)


def rows_of(state: Any) -> list[dict[str, Any]]:
    """The sessions of a state, by the names of columns."""
    return [dict(zip(state["session_columns"], one, strict=True)) for one in state["sessions"]]


def names_in(rows: Sequence[dict[str, Any]], name: str) -> set[Any]:
    """The values of a column."""
    return {one[name] for one in rows}
