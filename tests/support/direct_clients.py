"""Clients of TCP connections beside gRPC's: whole ones, and raw ones that send anything."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from raw_client import RawSession

import heliograph as hg
from heliograph.transport.bulk.messages import Receiver
from heliograph_proto.codec import decode_error, packing
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import HeliographError
from heliograph_proto.v1 import direct_pb2, session_pb2, session_pb2_grpc
from heliograph_server.rpc.bulk.service import BulkService

SECONDS = 60
MIB = 2**20


@contextmanager
def connected(url: str, aio: bool) -> Iterator[Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]:
    """A function that uploads an array as a tensor, and downloads it again."""
    if not aio:
        with hg.connect(url) as session:
            assert session.command_socket
            yield lambda array: session.put(array).get(timeout=SECONDS)
        return
    with asyncio.Runner() as runner:

        async def begin() -> hg.aio.Session:
            return await hg.aio.connect(url)

        other = runner.run(begin())
        assert other.command_socket

        async def there_and_back(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            tensor = await other.put(array)
            return await tensor.get(timeout=SECONDS)

        try:
            yield lambda array: runner.run(there_and_back(array))
        finally:
            runner.run(other.close())


def bulk_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The transfers that gRPC carries from now on: what is encoded or begun for it."""
    found: list[object] = []
    begin, receive = BulkService._begin, Receiver.piece

    async def begun(*given: Any) -> Any:
        found.append(given)
        return await begin(*given)

    def received(self: Receiver, message: bytes) -> None:
        found.append(len(message))
        receive(self, message)

    monkeypatch.setattr(BulkService, "_begin", begun)
    monkeypatch.setattr(Receiver, "piece", received)
    return found


def offers(daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Has the daemon offer another port than its own."""
    assert daemon._daemon is not None
    monkeypatch.setattr(daemon._daemon._direct, "_port", port)


class RawDirect:
    """A raw session with an offer of direct connections."""

    def __init__(
        self,
        channel: Any,
        secret: bytes = b"",
        features: Sequence[str] = ("direct", *packing.features()),
    ) -> None:
        """`secret`: that of its tenant."""
        self.session = RawSession(channel)
        opened = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(
                version_min=1, version_max=1, client="raw", features=features, tenant_secret=secret
            ),
            timeout=SECONDS,
        )
        self.session.token, self.session.limits = opened.session, opened.limits
        self.offer = opened.direct

    def connect(self, data: bytes) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.offer.port), SECONDS)
        made.sendall(data)
        return made

    def request(self, **what: Any) -> socket.socket:
        message = direct_pb2.DirectRequest(ticket=self.offer.ticket, **what)
        return self.connect(framed(message.SerializeToString()))

    def transfers(self) -> socket.socket:
        """A connection for bytes. Those that the test has closed may still be open on the server."""
        for _ in range(1000):
            made = self.request(transfers=direct_pb2.TransferConnection())
            found = direct_pb2.DirectResponse.FromString(message_of(made))
            if found.proof == self.offer.proof:
                return made
            made.close()
        raise AssertionError(f"refused: {found}")


def message_of(connection: socket.socket) -> bytes:
    """The next message."""
    frames = FrameReader(2**20)
    while data := connection.recv(4 if frames.is_empty else 1):
        if messages := frames.feed(data):
            return messages[0]
    raise AssertionError("the server ended the connection")


def exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the server ended the connection"
        data += part
    return bytes(data)


def refusal(connection: socket.socket) -> HeliographError:
    with connection:
        found = direct_pb2.DirectResponse.FromString(message_of(connection))
        assert found.HasField("error") and not found.proof
        assert connection.recv(1) == b""
        return decode_error(found.error)


def error_of(connection: socket.socket) -> HeliographError:
    found = direct_pb2.DirectTransferResponse.FromString(message_of(connection))
    assert found.HasField("error")
    return decode_error(found.error)


def transfer(**what: Any) -> bytes:
    return framed(direct_pb2.DirectTransfer(**what).SerializeToString())


def select_one(*connections: socket.socket) -> socket.socket:
    ready, _, _ = select.select(connections, [], [], SECONDS)
    return ready[0]


def port_of(daemon: ThreadDaemon) -> int:
    assert daemon._daemon is not None
    return daemon._daemon._direct.port


def connections_of(daemon: ThreadDaemon) -> int:
    """The connections for bytes that the daemon has."""
    assert daemon._daemon is not None
    return daemon._daemon._transfers._counts.total()
