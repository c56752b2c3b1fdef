"""TCP connections beside gRPC's whose clients are slow."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from daemon_threads import thread_daemon
from direct_clients import RawDirect, message_of, transfer
from raw_client import RawSession, f32, raw_channel

import heliograph as hg
from heliograph_proto.codec.frames import framed
from heliograph_proto.v1 import command_pb2, direct_pb2, session_pb2, session_pb2_grpc
from heliograph_server.rpc.direct import transfers

SECONDS = 30
MIB = 2**20


def test_clients_that_send_byte_by_byte_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four threads, and four clients would never give theirs away."""
    monkeypatch.setattr(transfers, "TURN_SECONDS", 1000.0)
    monkeypatch.setattr(transfers, "FEW_BYTES", 0, raising=False)
    with thread_daemon(direct_connections=0) as daemon, ExitStack() as opened:
        channel = opened.enter_context(raw_channel(daemon.url))
        session = RawSession(channel)
        found = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(version_min=1, version_max=1, client="raw", features=["direct"]),
            timeout=SECONDS,
        )
        session.token = found.session
        session.attach()
        slow: list[socket.socket] = []
        for number in range(1, 5):
            slow.append(socket.create_connection(("127.0.0.1", found.direct.port), SECONDS))
            opened.enter_context(slow[-1])
            wanted = direct_pb2.DirectRequest(
                ticket=found.direct.ticket, transfers=direct_pb2.TransferConnection()
            )
            slow[-1].sendall(framed(wanted.SerializeToString()))
            assert slow[-1].recv(4096)
            upload = direct_pb2.DirectTransfer(upload=number, size_bytes=8 * MIB)
            slow[-1].sendall(framed(upload.SerializeToString()))
        done = threading.Event()

        def trickle() -> None:
            while not done.wait(0.0005):
                for one in slow:
                    one.send(b"x")

        sending = threading.Thread(target=trickle)
        sending.start()
        try:
            with hg.connect(daemon.url) as other:
                for _ in range(3):
                    assert other.put(np.ones(4 * MIB, np.uint8)).get(timeout=SECONDS).all()
        finally:
            done.set()
            sending.join(SECONDS)
        session.close()


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
        done = threading.Event()

        def trickle() -> None:
            while not done.wait(0.005):
                for one in slow:
                    one.recv(64 * 1024)

        reading = threading.Thread(target=trickle)
        reading.start()
        try:
            with hg.connect(daemon.url) as other:
                for _ in range(3):
                    assert other.put(np.ones(4 * MIB, np.uint8)).get(timeout=SECONDS).all()
        finally:
            done.set()
            reading.join(SECONDS)
        for raw in readers:
            raw.session.close()
