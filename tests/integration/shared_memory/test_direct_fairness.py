"""TCP connections beside gRPC's whose clients are slow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from daemon_threads import thread_daemon
from direct_clients import RawDirect, message_of, transfer
from raw_client import f32, raw_channel

import heliograph as hg
from heliograph_proto.v1 import command_pb2
from heliograph_server.rpc.direct import transfers

SECONDS = 30
MIB = 2**20


@contextmanager
def repeated(
    pause: float, connections: Sequence[socket.socket], act: Callable[[socket.socket], object]
) -> Iterator[None]:
    """A thread does so with each connection again and again."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(pause):
            for one in connections:
                act(one)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(SECONDS)


def moves_tensors(url: str) -> None:
    """Whether another client's tensors go both ways."""
    with hg.connect(url) as other:
        for _ in range(3):
            assert other.put(np.ones(4 * MIB, np.uint8)).get(timeout=SECONDS).all()


def test_clients_that_send_byte_by_byte_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four threads, and four clients would never give theirs away."""
    monkeypatch.setattr(transfers, "TURN_SECONDS", 1000.0)
    monkeypatch.setattr(transfers, "FEW_BYTES", 0, raising=False)
    with thread_daemon(direct_connections=0) as daemon, ExitStack() as opened:
        channel = opened.enter_context(raw_channel(daemon.url))
        raw = RawDirect(channel)
        raw.session.attach()
        slow: list[socket.socket] = []
        for number in range(1, 5):
            slow.append(opened.enter_context(raw.transfers()))
            slow[-1].sendall(transfer(upload=number, size_bytes=8 * MIB))
        with repeated(0.0005, slow, lambda one: one.send(b"x")):
            moves_tensors(daemon.url)
        raw.session.close()


def test_clients_that_read_byte_by_byte_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four threads, and four readers would never give theirs away."""
    monkeypatch.setattr(transfers, "TURN_SECONDS", 1000.0)
    # A send waits for room until there is some.
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.2)
    size = 32 * MIB
    with thread_daemon(direct_connections=0) as daemon, ExitStack() as opened:
        channel = opened.enter_context(raw_channel(daemon.url))
        slow: list[socket.socket] = []
        # Each in a session of its own, since a command waits for the reader of the one before.
        readers = [RawDirect(channel) for _ in range(4)]
        for raw in readers:
            raw.session.attach()
            raw.session.send(allocate=command_pb2.Allocate(tensor=1, type=f32(size // 4)))
            raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=1, size_bytes=size))
            slow.append(opened.enter_context(raw.transfers()))
            slow[-1].sendall(transfer(download=1, size_bytes=size))
            assert message_of(slow[-1])
        with repeated(0.005, slow, lambda one: one.recv(64 * 1024)):
            moves_tensors(daemon.url)
        for raw in readers:
            raw.session.close()
