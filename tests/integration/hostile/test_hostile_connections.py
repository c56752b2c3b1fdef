"""Connections that mean no good, or no call: thousands of them, slow ones, and calls that never begin."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import Authority
from crowd import HEADER_BYTES, PREFACE, SETTINGS, frame
from daemon_processes import ready, started
from daemon_threads import thread_daemon
from paths import SUPPORT
from raw_client import SECONDS, still_serves

import heliograph as hg
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.sessions import Limits
from heliograph_server.config.config import ServerConfig
from heliograph_server.rpc import listening, receiving

CROWD = SUPPORT / "crowd.py"
#: As many as the descriptors of two processes allow, with some for everything else.
MOST = 10_000
#: What a connection may take of a daemon's memory; 17 KiB were measured.
CONNECTION_BYTES = 64 * 2**10
#: What the allocator may keep of what it got, however many there were.
KEPT_BYTES = 256 * 2**20


def count_of_crowd() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST if hard == resource.RLIM_INFINITY else min(MOST, int(hard * 0.7))


@contextmanager
def crowd(url: str, count: int) -> Iterator[int]:
    """So many idle connections from another process; how many there are."""
    command = [sys.executable, str(CROWD), url.rpartition(":")[2], str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(SECONDS)


def descriptors(process: subprocess.Popen[str]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def resident_bytes(process: subprocess.Popen[str]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        threading.Event().wait(0.1)
    return found


def results(url: str) -> list[float]:
    """What a client computes."""
    g = hg.Graph()
    x = g.input("x", (16, 16), "f32")
    g.output("y", hg.softmax(x @ x, axis=-1)[0])
    with hg.connect(url, timeout=SECONDS) as session:
        data = np.random.default_rng(7).standard_normal((16, 16), np.float32)
        found: list[float] = session.compile(g).run(x=data)["y"].tolist()
        return found


# Many


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_thousands_of_idle_connections_change_nothing_for_a_client_and_leave_nothing() -> None:
    count = count_of_crowd()
    with started() as (process, url):
        ready(url).close()
        expected, before = results(url), descriptors(process)
        size_bytes = resident_bytes(process)
        with crowd(url, count) as found:
            assert found == count
            assert becomes(lambda: descriptors(process) >= count)
            assert results(url) == expected
            assert resident_bytes(process) - size_bytes < count * CONNECTION_BYTES
        assert becomes(lambda: descriptors(process) <= before + 5)
        assert becomes(lambda: resident_bytes(process) - size_bytes < KEPT_BYTES)
        assert results(url) == expected


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side closes it in time, whatever it says before."""
    connection.settimeout(seconds)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not connection.recv(65536):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def test_one_connection_too_many_is_closed_at_once_and_the_others_go_on() -> None:
    with thread_daemon(max_connections=4) as daemon, hg.connect(daemon.url) as session:
        tensor = session.put(np.arange(3, dtype=np.float32))
        others = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(8)]
        assert becomes(lambda: sum(is_closed(one, 0.05) for one in others) >= 4)
        assert tensor.get().tolist() == [0, 1, 2]
        for one in others:
            one.close()
        assert becomes(lambda: answers(daemon.url))


def answers(url: str) -> bool:
    with contextlib.suppress(hg.HeliographError):
        hg.connect(url, timeout=SECONDS).close()
        return True
    return False


def test_who_is_one_too_many_is_told_that_nobody_answers() -> None:
    with thread_daemon(max_connections=1) as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port)) as first:
            first.sendall(PREFACE + frame(SETTINGS))
            assert first.recv(HEADER_BYTES)
            with pytest.raises(hg.ConnectionError):
                hg.connect(daemon.url, timeout=2.0)
        assert becomes(lambda: answers(daemon.url))


def test_unless_told_otherwise_connections_leave_descriptors_to_others() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    one = listening.most_connections(ServerConfig())
    two = listening.most_connections(ServerConfig(("grpc://127.0.0.1:0", "grpc://127.0.0.1:1")))
    assert 0 < one < soft and two == one // 2
    assert listening.most_connections(ServerConfig(max_connections=12)) == 12


# Slow

#: What is sent at once, and what follows byte by byte.
HELLO = PREFACE + frame(SETTINGS)
SLOW = {
    "says nothing": (b"", b""),
    "a preface byte by byte": (b"", PREFACE + bytes(1000)),
    "a preface and no settings": (PREFACE, b""),
    "settings and no call": (PREFACE + frame(SETTINGS), b""),
    "a frame that does not end": (HELLO + frame(SETTINGS, 0, bytes(6000))[:HEADER_BYTES], bytes(999)),
    "headers that do not end": (HELLO + frame(1, 0, b"\x82\x84\x86", 1), b""),
    "a request of the web": (b"GET / HTTP/1.1\r\n", b"X: y\r\n" * 100),
}


@pytest.fixture
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(listening, "IDLE_SECONDS", 2.0)


def drip(connection: socket.socket, slowly: bytes) -> bool:
    """Sends a byte now and then until the other side has enough; whether it had in time."""
    for place in range(100):
        with contextlib.suppress(OSError):
            connection.sendall(slowly[place : place + 1])
        if is_closed(connection, 0.2):
            return True
    return False


@pytest.mark.parametrize(("at_once", "slowly"), SLOW.values(), ids=SLOW)
def test_a_connection_that_is_slow_ends(short_bounds: None, at_once: bytes, slowly: bytes) -> None:
    with thread_daemon() as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
            connection.sendall(at_once)
            assert drip(connection, slowly)
        still_serves(daemon.url)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"])
def test_a_handshake_of_tls_that_is_never_finished_ends(
    short_bounds: None, tmp_path: Path, sent: bytes
) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    with tls_daemon(pair.certificate, pair.key) as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
            connection.sendall(sent)
            assert drip(connection, b"")
        hg.connect(f"grpcs://127.0.0.1:{daemon.port}", ca=authority.ca).close()


def test_a_handshake_of_tls_without_a_call_after_it_ends(short_bounds: None, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    with tls_daemon(pair.certificate, pair.key) as daemon:
        context = ssl.create_default_context(cafile=authority.ca)
        context.set_alpn_protocols(["h2"])
        bare = socket.create_connection(("127.0.0.1", daemon.port))
        with context.wrap_socket(bare, server_hostname="localhost") as connection:
            assert drip(connection, b"")


@contextmanager
def tls_daemon(certificate: str, key: str) -> Iterator[Any]:
    listen = ("grpcs://127.0.0.1:0",)
    with thread_daemon(listen=listen, tls_certificate=certificate, tls_key=key) as daemon:
        yield daemon


def test_an_idle_session_is_no_idle_connection(short_bounds: None) -> None:
    with thread_daemon() as daemon, hg.connect(daemon.url) as session:
        tensor = session.put(np.ones(2**18, np.float32))
        with socket.create_connection(("127.0.0.1", daemon.port)) as idle:
            idle.sendall(PREFACE + frame(SETTINGS))
            # As long as it takes to end, and the connection of its uploads with it.
            assert is_closed(idle, SECONDS)
        tensor.set(np.full(2**18, 2, np.float32))
        assert tensor.get().sum() == 2**19


# Calls that never begin


def refusal(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        for _ in call:
            pass
    return error_from_metadata(tuple(raised.value.trailing_metadata() or ()))


@pytest.mark.parametrize(
    "method",
    [
        "CommandService/Execute",
        "PeerService/Exchange",
        "BulkService/UploadShared",
        "BulkService/UploadAdmitted",
    ],
)
def test_a_call_whose_first_message_never_comes_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "FIRST_SECONDS", 0.3)
    over = threading.Event()
    with (
        thread_daemon(Limits(attach_timeout_ms=300)) as daemon,
        grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel,
    ):
        call: Any = channel.stream_stream(f"/heliograph.v1.{method}")
        try:
            found = refusal(call(iter(lambda: over.wait(SECONDS) and None, None), timeout=SECONDS))
        finally:
            over.set()
        assert isinstance(found, DeadlineExceededError) and "first message" in found.message
        still_serves(daemon.url)


@pytest.mark.parametrize("method", ["BulkService/Upload", "PeerService/Push"])
def test_an_upload_that_never_begins_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "FIRST_SECONDS", 0.3)
    over = threading.Event()
    with thread_daemon() as daemon, grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        call: Any = channel.stream_unary(f"/heliograph.v1.{method}")
        try:
            with pytest.raises(grpc.RpcError) as raised:
                call(iter(lambda: over.wait(SECONDS) and None, None), timeout=SECONDS)
        finally:
            over.set()
        found = error_from_metadata(tuple(raised.value.trailing_metadata() or ()))
        assert isinstance(found, DeadlineExceededError) and "first message" in found.message
