"""The client where Linux's calls are missing, as on macOS and Windows: a process hides them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from daemon_urls import DaemonUrls

#: Imports what the client needs of others, hides what the system would not have, and then uses the client.
PROGRAM = """
import asyncio, ctypes, importlib.metadata, logging, multiprocessing, socket, ssl, subprocess, sys, tempfile
import grpc, numpy as np, blake3
from google.protobuf import message
from grpc import aio

name, url = sys.argv[1:]
import os, signal

LINUX = {
    os: ["memfd_create", "sched_getaffinity", "posix_fallocate", "pidfd_open"],
    socket: ["SO_PEERCRED", "SOCK_SEQPACKET"],
}
POSIX = {
    os: ["getuid", "geteuid", "getgid", "fork", "register_at_fork", "mkfifo", "fchmod", "sysconf"],
    signal: ["SIGHUP", "SIGUSR1", "SIGUSR2", "pthread_sigmask"],
    socket: ["AF_UNIX", "recv_fds", "send_fds"],
}
# Before anything is hidden: an event loop of POSIX and gRPC's poller have pairs of sockets.
loop = asyncio.new_event_loop()
aio.init_grpc_aio()
for hidden in [LINUX] if name == "darwin" else [LINUX, POSIX]:
    for module, names in hidden.items():
        for one in names:
            vars(module).pop(one, None)
if name == "win32":
    for one in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
        sys.modules[one] = None
sys.platform = name

import heliograph as hg

with hg.connect(url) as session:
    assert not session.shared_memory, session.why_not_shared
    g = hg.Graph()
    x = g.input("x", (2, 3), "f32")
    g.output("y", x @ g.weight("w", np.ones((3, 2), np.float32)))
    plan = session.compile(g)
    print(plan.run(x=np.ones((2, 3), np.float32))["y"].sum())
    big = np.arange(2**20, dtype=np.float32)
    assert np.array_equal(session.put(big).get(), big)


async def main():
    async with hg.aio.connect(url) as session:
        print((await (await session.put(np.ones(3, np.float32))).get()).sum())


loop.run_until_complete(main())
loop.close()
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_client_connects_and_runs_without_linux_only_calls(daemon: DaemonUrls, system: str) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, system, daemon.tcp]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12.0", "3.0"]
