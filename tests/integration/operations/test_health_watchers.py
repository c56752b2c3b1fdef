"""Whoever watches the health of a daemon, and needs no token for that, does not hold it up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from access_daemons import Tokens, daemon_with_tokens
from crowd import SETTINGS, Connection, frame
from daemon_threads import ThreadDaemon, thread_daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heliograph_server.daemon import health
from heliograph_server.daemon.health import READY
from heliograph_server.rpc import listening

SECONDS = 20.0
HEADERS, DATA, INITIAL_WINDOW_SIZE = 1, 0, 4
END_STREAM, END_HEADERS = 1, 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def watch(port: int) -> Connection:
    """A connection that watches, and lets nobody send it an answer."""
    made = Connection(port)
    no_window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + (0).to_bytes(4, "big")
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/grpc.health.v1.Health/Watch",
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    request = health_pb2.HealthCheckRequest(service=READY).SerializeToString()
    message = b"\0" + len(request).to_bytes(4, "big") + request
    block = b"".join(header(*one) for one in headers.items())
    made.socket.sendall(
        frame(SETTINGS, 0, no_window)
        + frame(HEADERS, END_HEADERS, block, 1)
        + frame(DATA, END_STREAM, message, 1)
    )
    return made


@contextmanager
def deaf_watcher(port: int) -> Iterator[None]:
    """While it is there, one watches and reads nothing; its pings are answered, so that it stays."""
    made = watch(port)

    def answer() -> None:
        while made.answer():
            pass

    thread = threading.Thread(target=answer, name="watcher")
    thread.start()
    try:
        yield
    finally:
        made.socket.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
        made.socket.close()


def ask(daemon: ThreadDaemon) -> int:
    with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=READY), timeout=SECONDS).status)


def watchers(daemon: ThreadDaemon) -> int:
    assert daemon._daemon is not None
    return len(daemon._daemon.health._answers._watchers)


def until_watched(daemon: ThreadDaemon) -> None:
    end = time.monotonic() + SECONDS
    while not watchers(daemon):
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_a_watcher_that_reads_nothing_does_not_keep_a_daemon_from_draining(tmp_path: Path) -> None:
    with daemon_with_tokens(Tokens(tmp_path / "tokens")) as daemon, deaf_watcher(daemon.port):
        until_watched(daemon)
        assert daemon._daemon is not None
        daemon.call(daemon._daemon.draining.begin(1.0, stay=True))
        assert ask(daemon) == NOT_SERVING
        daemon.call(daemon._daemon.draining.undo())
        assert ask(daemon) == SERVING


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes it, now or soon."""
    connection.settimeout(0.05)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_connections_of_probes_are_bounded_and_take_none_from_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "MOST_PROBE_CONNECTIONS", 2)
    with thread_daemon(health_listen="127.0.0.1:0") as daemon:
        assert daemon._daemon is not None and daemon._daemon.health.address is not None
        where = "127.0.0.1", daemon._daemon.health.address.port
        crowd = [socket.create_connection(where) for _ in range(6)]
        closed: set[int] = set()
        end = time.monotonic() + SECONDS
        while len(closed) < 4:
            assert time.monotonic() < end
            closed |= {number for number, one in enumerate(crowd) if is_closed(one)}
        assert len(closed) == 4 and ask(daemon) == SERVING
        for one in crowd:
            one.close()


def test_connections_of_probes_end_when_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PROBE_IDLE_SECONDS", 1.0)
    with thread_daemon(health_listen="127.0.0.1:0") as daemon:
        assert daemon._daemon is not None and daemon._daemon.health.address is not None
        idle = Connection(daemon._daemon.health.address.port)
        while idle.answer():
            pass
        idle.socket.close()


def test_only_so_many_watch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_WATCHERS", 1)
    with thread_daemon() as daemon, deaf_watcher(daemon.port):
        until_watched(daemon)
        with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                next(stub.Watch(health_pb2.HealthCheckRequest(service=READY), timeout=SECONDS))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(daemon) == SERVING
