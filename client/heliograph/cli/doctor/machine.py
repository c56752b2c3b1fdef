"""The rates of this machine itself: copies of memory, and sockets without gRPC, in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from heliograph.cli.doctor.measurements import MachineRates

#: How long each rate is measured, and the most that a socket may wait.
SECONDS = 0.15
SOCKET_SECONDS = 2.0
#: The bytes of one copy, larger than most caches, and of one write to a socket.
COPY_BYTES = 16 * 2**20
WRITE_BYTES = 2**20


def measure_machine() -> MachineRates:
    """Measure the rates. A rate is 0 where this system does not allow its measurement."""
    return MachineRates(_copying(), _carrying(_tcp_pair), _carrying(_unix_pair))


def _copying() -> float:
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    done, begun = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begun) < SECONDS or not done:
        np.copyto(target, source)
        done += 1
    return done * COPY_BYTES / max(seconds, 1e-9)


def _carrying(pair: Callable[[], tuple[socket.socket, socket.socket]]) -> float:
    """Return the rate of bytes from one thread of this process to another."""
    try:
        here, there = pair()
    except OSError:
        return 0.0
    with closing(here), closing(there):
        for one in (here, there):
            one.settimeout(SOCKET_SECONDS)
        sender = threading.Thread(target=_send, args=(there,), name="heliograph-doctor", daemon=True)
        begun = time.perf_counter()
        sender.start()
        received = _receive(here)
        seconds = time.perf_counter() - begun
        sender.join(SOCKET_SECONDS)
    return received / max(seconds, 1e-9)


def _send(to: socket.socket) -> None:
    data, end = bytes(WRITE_BYTES), time.perf_counter() + SECONDS
    try:
        while time.perf_counter() < end:
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _receive(source: socket.socket) -> int:
    space, received = bytearray(WRITE_BYTES), 0
    try:
        while count := source.recv_into(space):
            received += count
    except OSError:
        pass
    return received


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(SOCKET_SECONDS)
        here = socket.create_connection(listening.getsockname(), SOCKET_SECONDS)
        try:
            there, _ = listening.accept()
        except OSError:
            here.close()
            raise
    return here, there


def _unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()
