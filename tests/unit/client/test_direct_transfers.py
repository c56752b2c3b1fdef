"""The turns of uploads on TCP connections beside gRPC's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

import heliograph as hg
from heliograph.connection import address_of
from heliograph.core.effects import StartUpload
from heliograph.transport.bulk.link import Link
from heliograph.transport.direct.transfers import Connection, DirectTransfers
from heliograph_proto.codec.frames import framed
from heliograph_proto.v1 import direct_pb2

SECONDS = 30
#: More than the system's buffers have room for.
LARGE_BYTES = 64 * 2**20


class Uploads:
    """Uploads of one session, each on a connection of its own whose other end is the test's."""

    def __init__(self) -> None:
        info: Any = None
        address = address_of("grpc://127.0.0.1:1")
        self._transfers = DirectTransfers(address, info, None, Link(address, info, "off"))
        self._opened = ExitStack()

    def begin(self, target: int | bytes, size_bytes: int) -> tuple[Connection, socket.socket, Future[None]]:
        """Upload in a thread. Return its connection, the other end, and its result."""
        ours, theirs = socket.socketpair()
        self._opened.callback(theirs.close)
        theirs.settimeout(SECONDS)
        connection, result = Connection(ours), Future[None]()
        upload = StartUpload(target, memoryview(bytes(size_bytes)))

        def run() -> None:
            try:
                self._transfers.upload(connection, upload, lambda: None)
            except hg.HeliographError as error:
                result.set_exception(error)
            else:
                result.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        return connection, theirs, result

    def close(self) -> None:
        """Close the other ends."""
        self._opened.close()


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    made = Uploads()
    yield made
    made.close()


def test_an_upload_that_waits_for_its_turn_can_be_cancelled(uploads: Uploads) -> None:
    _, stalled, first = uploads.begin(1, LARGE_BYTES)
    assert stalled.recv(1)
    connection, _, second = uploads.begin(2, 1)
    connection.cancel()
    assert isinstance(second.exception(SECONDS), hg.CancelledError)
    assert not first.done()


def test_a_tensor_waits_for_no_content(uploads: Uploads) -> None:
    _, stalled, content = uploads.begin(bytes(32), LARGE_BYTES)
    assert stalled.recv(1)
    _, other, tensor = uploads.begin(1, 10)
    left = len(framed(direct_pb2.DirectTransfer(upload=1, size_bytes=10).SerializeToString())) + 10
    while left:
        left -= len(other.recv(left))
    other.sendall(framed(direct_pb2.DirectTransferResponse(size_bytes=10).SerializeToString()))
    tensor.result(SECONDS)
    assert not content.done()
