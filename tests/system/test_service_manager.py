"""What a daemon tells whoever manages it as a service, by datagrams to a socket of its environment."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heliograph_server.daemon.systemd import ServiceManager

SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", "grpc://127.0.0.1:0"]
SECONDS = 60


@contextmanager
def manager_at(name: str) -> Iterator[socket.socket]:
    """A socket that stands for a service manager's; "@" begins a name without a file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        made.settimeout(SECONDS)
        yield made


def told(manager: socket.socket) -> dict[str, str]:
    """The next datagram."""
    lines = manager.recv(4096).decode().splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def told_of(manager: socket.socket, name: str) -> dict[str, str]:
    """The next datagram that has this."""
    while name not in (found := told(manager)):
        pass
    return found


def test_a_daemon_says_when_it_serves_that_its_loop_runs_and_when_it_stops(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    environment = os.environ | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"}
    with (
        manager_at(path) as manager,
        subprocess.Popen(
            [*SERVE, "--device", "fake", "--drain-seconds", "7"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as daemon,
    ):
        try:
            assert daemon.stdout is not None
            ready = told_of(manager, "READY")
            url = daemon.stdout.readline().removeprefix("listening on ").strip()
            assert ready == {"READY": "1", "STATUS": f"serving at {url}"}
            for _ in range(3):
                assert told_of(manager, "WATCHDOG") == {"WATCHDOG": "1"}
            daemon.send_signal(signal.SIGHUP)
            assert int(told_of(manager, "RELOADING")["MONOTONIC_USEC"]) > 0
            assert told_of(manager, "READY") == ready
            daemon.send_signal(signal.SIGTERM)
            stopping = told_of(manager, "STOPPING")
            assert stopping["STOPPING"] == "1" and int(stopping["EXTEND_TIMEOUT_USEC"]) > 7_000_000
            assert daemon.wait(SECONDS) == 0
        finally:
            daemon.kill()


def test_a_daemon_that_still_starts_is_not_called_ready_by_a_reload() -> None:
    name = f"@heliograph-{secrets.token_hex(8)}"
    with manager_at(name) as manager:
        found = ServiceManager({"NOTIFY_SOCKET": name})
        read: list[int] = []
        found.reload(lambda: read.append(1))
        assert read == [1]
        found.ready("serving")
        assert told(manager) == {"READY": "1", "STATUS": "serving"}


def test_a_reload_that_fails_ends_all_the_same() -> None:
    name = f"@heliograph-{secrets.token_hex(8)}"
    with manager_at(name) as manager:
        found = ServiceManager({"NOTIFY_SOCKET": name})
        found.ready("serving")
        with pytest.raises(ZeroDivisionError):
            found.reload(lambda: 1 // 0)
        assert [next(iter(told(manager))) for _ in range(3)] == ["READY", "RELOADING", "READY"]


def test_a_watchdog_of_another_process_gets_no_signs_of_life() -> None:
    name = f"@heliograph-{secrets.token_hex(8)}"
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getppid())}

    async def scenario() -> None:
        found = ServiceManager(environment)
        found.ready("serving")
        await found.close()

    with manager_at(name) as manager:
        asyncio.run(scenario())
        assert "READY" in told(manager)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            told(manager)


def test_nobody_to_tell_is_no_error() -> None:
    async def scenario() -> None:
        for environment in ({}, {"WATCHDOG_USEC": "1000"}, {"NOTIFY_SOCKET": "/nowhere/notify"}):
            found = ServiceManager(environment)
            found.ready("serving")
            found.stopping(1.0)
            await found.close()

    asyncio.run(scenario())
