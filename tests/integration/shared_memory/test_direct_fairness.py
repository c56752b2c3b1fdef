"""TCP connections beside gRPC's whose clients are slow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from daemon_threads import thread_daemon
from direct_clients import RawDirect, message_of, transfer
from raw_client import f32, raw_channel

import heliograph as hg
from heliograph_proto.v1 import command_pb2, direct_pb2
from heliograph_server.daemon import daemon as daemons
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
    """Assert that another client's tensors go both ways."""
    with hg.connect(url) as other:
        for _ in range(3):
            assert other.put(np.ones(4 * MIB, np.uint8)).get(timeout=SECONDS).all()


def test_clients_that_send_byte_by_byte_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four threads, and four clients would never give theirs away."""
    monkeypatch.setattr(transfers, "TURN_SECONDS", 1000.0)
    monkeypatch.setattr(transfers, "GATHER_SECONDS", 0.001)
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


def taken(client: socket.socket) -> int:
    """The bytes of an upload that the daemon says it has."""
    return direct_pb2.DirectTransferResponse.FromString(message_of(client)).size_bytes


class CountedThreads(ThreadPoolExecutor):
    """Threads, and how often those of direct connections were given work."""

    turns = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._thread_name_prefix == "heliograph-direct":
            CountedThreads.turns += 1
        return super().submit(fn, *args, **kwargs)


def test_an_upload_that_pauses_shorter_than_the_patience_keeps_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each way through the event loop costs a tenth of a millisecond, in which nothing is read."""
    monkeypatch.setattr(daemons, "ThreadPoolExecutor", CountedThreads)
    monkeypatch.setattr(CountedThreads, "turns", 0)
    monkeypatch.setattr(transfers, "TURN_SECONDS", 1000.0)
    monkeypatch.setattr(transfers, "GATHER_SECONDS", 0.0001)
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", float(SECONDS))
    with thread_daemon(direct_connections=0) as daemon, raw_channel(daemon.url) as channel:
        raw = RawDirect(channel)
        raw.session.attach()
        with raw.transfers() as client:
            client.sendall(transfer(upload=1, size_bytes=4 * MIB))
            paused = threading.Event()
            for _ in range(64):
                client.sendall(bytes(MIB // 16))
                paused.wait(0.001)
            assert taken(client) == 4 * MIB
            # The connection's start, and the upload; a thread that left would come back 64 times.
            assert CountedThreads.turns < 8
        raw.session.close()


@pytest.mark.parametrize("gather", [0.001, 1000.0])
def test_a_slow_upload_is_read_when_its_piece_is_there(
    monkeypatch: pytest.MonkeyPatch, gather: float
) -> None:
    """However long its bytes may gather, the last of a piece ends that."""
    monkeypatch.setattr(transfers, "GATHER_SECONDS", gather)
    sizes = [100, MIB // 4, MIB + 77, 1, 3 * MIB]
    with thread_daemon(direct_connections=0) as daemon, raw_channel(daemon.url) as channel:
        raw = RawDirect(channel)
        raw.session.attach()
        with raw.transfers() as client:
            paused = threading.Event()
            for number, size in enumerate(sizes, 1):
                client.sendall(transfer(upload=number, size_bytes=size))
                for start in range(0, size, step := max(1, size // 7)):
                    client.sendall(bytes(min(step, size - start)))
                    paused.wait(0.005)
                assert taken(client) == size
        raw.session.close()
