"""TCP connections beside gRPC's whose other end reads late, or is gone."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from raw_client import RawSession, raw_channel

import heliograph as hg
from heliograph_proto.codec.frames import framed
from heliograph_proto.v1 import command_pb2, direct_pb2, memory_pb2, session_pb2, session_pb2_grpc

SECONDS = 60
SILENCE_SECONDS = 1.0
#: Not in `socket`.
SO_ATTACH_FILTER = 26


@pytest.fixture
def impatient() -> Iterator[ThreadDaemon]:
    """A daemon that notices soon that a client is gone, and shares no memory."""
    with thread_daemon(direct_connections=0, silence_seconds=SILENCE_SECONDS) as daemon:
        yield daemon


def test_a_client_that_reads_late_keeps_its_session(impatient: ThreadDaemon) -> None:
    """Its system has no room for more answers, and says so to the daemon."""
    array = np.arange(50_000, dtype=np.float32)

    async def read_late() -> None:
        async with hg.aio.connect(impatient.url) as session:
            assert session.command_socket
            tensor = await session.put(array)
            reads = [asyncio.ensure_future(tensor.get(timeout=SECONDS)) for _ in range(400)]
            await reads[0]
            # The program computes, so its loop reads nothing.
            threading.Event().wait(2.5 * SILENCE_SECONDS)
            assert all(np.array_equal(one, array) for one in await asyncio.gather(*reads))

    asyncio.run(read_late())


def test_a_command_socket_whose_client_acknowledges_nothing_ends_its_session(
    impatient: ThreadDaemon,
) -> None:
    with raw_channel(impatient.url) as channel:
        session = RawSession(channel)
        opened = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(version_min=1, version_max=1, client="raw", features=["direct"]),
            timeout=SECONDS,
        )
        session.token = opened.session
        wanted = direct_pb2.DirectRequest(
            ticket=opened.direct.ticket, command_socket=memory_pb2.CommandSocket()
        )
        with socket.create_connection(("127.0.0.1", opened.direct.port), SECONDS) as connection:
            connection.sendall(framed(wanted.SerializeToString()))
            assert connection.recv(4096)
            session.attach(command_socket=True)
            drop_all(connection)
            asked = command_pb2.Command(sequence=1, notify=True, free=command_pb2.Free(handles=[1]))
            connection.sendall(framed(command_pb2.CommandBatch(commands=[asked]).SerializeToString()))
            # The stream ends, and the session with it.
            with pytest.raises(AssertionError, match="the stream ended before"):
                session.answer(1)
        session.close()


def test_a_connection_that_broke_between_two_transfers_fails_none_of_them(
    impatient: ThreadDaemon,
) -> None:
    array = np.arange(2**20)
    with hg.connect(impatient.url) as session:
        tensor = session.put(array)
        assert np.array_equal(tensor.get(timeout=SECONDS), array)
        shell: Any = session._shell
        kept = shell._bulk._direct._idle
        assert kept
        for one in kept:
            one._socket.shutdown(socket.SHUT_RDWR)
        assert np.array_equal(tensor.get(timeout=SECONDS), array)


def drop_all(connection: socket.socket) -> None:
    """Have the system drop what comes for a socket, as if the way to it had broken."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
