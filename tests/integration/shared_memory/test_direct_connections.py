"""TCP connections beside gRPC's: who gets them, what goes over them, and hostile clients."""

from __future__ import annotations

import asyncio
import os
import random
import select
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from daemon_threads import ThreadDaemon, thread_daemon
from middlemen import middleman
from raw_client import RawSession, f32, raw_channel, still_serves

import heliograph as hg
from heliograph.transport.bulk.messages import Receiver
from heliograph.transport.direct import opening
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import command_pb2, direct_pb2, memory_pb2, session_pb2, session_pb2_grpc
from heliograph_server.rpc.bulk.service import BulkService

SECONDS = 60
MIB = 2**20


@pytest.fixture
def lone() -> Iterator[ThreadDaemon]:
    """A daemon without other clients, which shares no memory."""
    limits = Limits(upload_idle_ms=1000)
    with thread_daemon(limits, direct_connections=0) as daemon:
        yield daemon


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


# Clients and servers that have them


def test_a_client_that_asks_for_none_uses_grpc(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url, direct=False) as session:
        assert "direct=False" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_server_that_takes_none_is_used_by_grpc() -> None:
    with thread_daemon() as daemon, hg.connect(daemon.url) as session:
        assert "takes no direct connections" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_server_with_tls_takes_none(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    made = authority.server()
    options = {"tls_certificate": str(made.certificate), "tls_key": str(made.key)}
    listen = ("grpcs://127.0.0.1:0", "grpc://127.0.0.1:0")
    with (
        thread_daemon(listen=listen, direct_connections=0, **options) as daemon,
        hg.connect(daemon.url, ca=authority.ca) as session,
    ):
        assert not session.command_socket


def test_a_client_behind_a_proxy_uses_grpc(lone: ThreadDaemon) -> None:
    with middleman(lone.url) as between, hg.connect(between.url) as session:
        assert "proxy" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_port_that_nobody_listens_at_is_no_error(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    offers(lone, monkeypatch, port)
    with hg.connect(lone.url) as session:
        assert "refused" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_another_program_at_the_port_is_not_trusted(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        offers(lone, monkeypatch, other.getsockname()[1])

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.recv(4096)
                wrong = direct_pb2.DirectResponse(proof=b"another")
                client.sendall(framed(wrong.SerializeToString()))
                assert client.recv(1) == b""

        answering = threading.Thread(target=answer)
        answering.start()
        with hg.connect(lone.url) as session:
            assert "another program" in session.why_no_command_socket
        answering.join(SECONDS)
        assert not answering.is_alive()


def test_a_silent_port_is_not_tried_again_at_once(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "DIRECT_SECONDS", 0.05)
    monkeypatch.setattr(opening, "_avoided", {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offers(lone, monkeypatch, silent.getsockname()[1])
        with hg.connect(lone.url) as session:
            assert "timed out" in session.why_no_command_socket
        with hg.connect(lone.url) as session:
            assert "a short time ago" in session.why_no_command_socket


def offers(daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Has the daemon offer another port than its own."""
    assert daemon._daemon is not None
    monkeypatch.setattr(daemon._daemon._direct, "_port", port)


# Commands and bytes


@pytest.mark.parametrize("aio", [False, True])
@pytest.mark.parametrize("size", [256 * 1024 + 1, MIB, 33 * MIB + 7])
def test_bytes_come_back_as_they_went_without_a_call_of_grpc(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, size: int, aio: bool
) -> None:
    calls = bulk_calls(monkeypatch)
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with connected(lone.url, aio) as there_and_back:
        for _ in range(2):
            assert np.array_equal(there_and_back(array), array)
    assert not calls


def test_bytes_come_straight_into_their_tensor(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        tensor = session.empty((16 * MIB,), "u8")
        # Bytes that overtake their command are copied once.
        for _ in range(50):
            session.synchronize()
            tensor.set(np.ones(16 * MIB, np.uint8))
            session.synchronize()
            server, client = session.server_traffic(), session.statistics().traffic
            assert server.written_bytes == client.written_bytes and client.copied_in_bytes == 0
            if server.copied_in_bytes < server.written_bytes:
                return
        raise AssertionError("all bytes were copied")


def test_bytes_that_come_before_their_command_runs_are_kept(lone: ThreadDaemon) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32") + 1.0)
    with hg.connect(lone.url) as session:
        plan = session.compile(g)
        tensor = session.empty((4 * MIB,), "u8")
        loop = plan.loop(x=np.zeros(1, np.float32), steps=10**9, carry={"y": "x"})
        array = np.random.default_rng(1).integers(0, 256, 4 * MIB, np.uint8)
        # Returns once the bytes are on their way, while the loop still holds the stream.
        tensor.set(array)
        array_then = array.copy()
        array[:] = 0
        loop.cancel()
        with pytest.raises(hg.CancelledError):
            loop.result(SECONDS)
        assert np.array_equal(tensor.get(timeout=SECONDS), array_then)


@pytest.mark.parametrize("aio", [False, True])
def test_weights_go_over_them_and_have_the_digest_of_their_bytes(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, aio: bool
) -> None:
    calls = bulk_calls(monkeypatch)
    weight = np.random.default_rng(2).standard_normal((1024, 1024), np.float32)
    g = hg.Graph()
    g.output("y", g.input("x", (1, 1024), "f32") @ g.weight("w", weight))
    x = np.eye(1, 1024, dtype=np.float32)
    if aio:

        async def scenario() -> Any:
            async with hg.aio.connect(lone.url) as session:
                plan = await session.compile(g)
                return (await plan.run(x=x))["y"]

        found = asyncio.run(scenario())
    else:
        with hg.connect(lone.url) as session:
            found = session.compile(g).run(x=x)["y"]
    assert np.array_equal(found[0], weight[0])
    assert not calls


def test_many_threads_transfer_at_once_and_those_without_a_connection_use_grpc(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:

        def once(number: int) -> bool:
            array = np.full(2 * MIB, number, np.uint8)
            return all(np.array_equal(session.put(array).get(timeout=SECONDS), array) for _ in range(4))

        with ThreadPoolExecutor(10) as threads:
            assert all(threads.map(once, range(10)))


def test_the_error_of_a_command_is_that_of_its_bytes(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        kept = session.put(np.ones(8 * MIB, np.uint8))
        lost = session.empty((2**50,), "u8")
        with pytest.raises(hg.OutOfMemoryError):
            lost.set(np.ones(8 * MIB, np.uint8), offset_bytes=0)
            lost[: 8 * MIB].get()
        assert kept.get(timeout=SECONDS).all()


def test_a_download_has_its_deadline(lone: ThreadDaemon) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32") + 1.0)
    with hg.connect(lone.url) as session:
        plan, tensor = session.compile(g), session.put(np.ones(MIB, np.float32))
        session.synchronize()
        loop = plan.loop(x=np.zeros(1, np.float32), steps=10**9, carry={"y": "x"})
        with pytest.raises(hg.DeadlineExceededError):
            tensor.get(timeout=0.05)
        loop.cancel()
        assert tensor.get(timeout=SECONDS).all()


def test_transfers_end_with_the_session_and_nothing_stays_open(lone: ThreadDaemon) -> None:
    def once() -> None:
        with hg.connect(lone.url) as session:
            session.put(np.ones(MIB, np.float32)).get()

    once()
    still_serves(lone.url)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    for _ in range(1000):
        still_serves(lone.url)
        if len(os.listdir("/proc/self/fd")) <= before:
            break
    assert len(os.listdir("/proc/self/fd")) <= before


# Hostile clients


class RawDirect:
    """A raw session with an offer of direct connections."""

    def __init__(self, channel: Any) -> None:
        self.session = RawSession(channel)
        opened = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(version_min=1, version_max=1, client="raw", features=["direct"]),
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


@pytest.fixture
def raw(lone: ThreadDaemon) -> Iterator[RawDirect]:
    with raw_channel(lone.url) as channel:
        made = RawDirect(channel)
        try:
            yield made
        finally:
            made.session.close()
    still_serves(lone.url)


COMMANDS = {"command_socket": memory_pb2.CommandSocket()}


def test_a_ticket_of_no_session_is_refused(raw: RawDirect) -> None:
    raw.offer.ticket = bytes(32)
    assert isinstance(refusal(raw.request(**COMMANDS)), hg.SessionClosedError)
    # The session's own secret is none.
    raw.offer.ticket = raw.session.token
    assert isinstance(refusal(raw.request(**COMMANDS)), hg.SessionClosedError)


def test_requests_that_mean_nothing_are_refused(raw: RawDirect) -> None:
    assert isinstance(refusal(raw.request()), hg.ProtocolError)
    assert isinstance(refusal(raw.connect(framed(b"\xff\xff"))), hg.ProtocolError)
    two = framed(direct_pb2.DirectRequest(ticket=raw.offer.ticket, **COMMANDS).SerializeToString()) * 2
    assert isinstance(refusal(raw.connect(two)), hg.ProtocolError)
    with raw.connect(b"\xff\xff\xff\x7f") as connection:
        assert connection.recv(1) == b""


def test_a_request_in_pieces_of_a_byte_is_answered(raw: RawDirect) -> None:
    message = direct_pb2.DirectRequest(ticket=raw.offer.ticket, **COMMANDS).SerializeToString()
    with raw.connect(b"") as connection:
        for byte in framed(message):
            connection.sendall(bytes([byte]))
        assert direct_pb2.DirectResponse.FromString(message_of(connection)).proof == raw.offer.proof


def test_a_second_command_socket_is_refused(raw: RawDirect) -> None:
    with raw.request(**COMMANDS) as first:
        message_of(first)
        assert isinstance(refusal(raw.request(**COMMANDS)), hg.HandleExistsError)


def test_clients_that_ask_nothing_do_not_keep_others_out(raw: RawDirect) -> None:
    silent = [raw.connect(b"") for _ in range(80)]
    with raw.request(**COMMANDS) as connection:
        assert message_of(connection)
    # The oldest were ended.
    assert silent[0].recv(1) == b""
    for one in silent:
        one.close()


def test_a_session_has_a_few_connections_for_bytes(raw: RawDirect) -> None:
    made = [raw.transfers() for _ in range(4)]
    refused = refusal(raw.request(transfers=direct_pb2.TransferConnection()))
    assert isinstance(refused, hg.LimitExceededError)
    for one in made:
        one.close()


def test_the_connections_end_with_their_session(lone: ThreadDaemon) -> None:
    with raw_channel(lone.url) as channel:
        raw = RawDirect(channel)
        with raw.transfers() as transfers, raw.request(**COMMANDS) as commands:
            message_of(commands)
            session_pb2_grpc.SessionServiceStub(channel).Close(
                session_pb2.CloseRequest(session=raw.session.token), timeout=SECONDS
            )
            assert transfers.recv(1) == commands.recv(1) == b""
            assert isinstance(refusal(raw.request(**COMMANDS)), hg.SessionClosedError)
        raw.session.close()


def test_uploads_in_pieces_arrive_whole(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4 * 4096)
    data = random.Random(5).randbytes(4 * 4096)
    with raw.transfers() as connection:
        number = raw.session.send(
            set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=len(data))
        )
        message = transfer(upload=7, size_bytes=len(data)) + data
        for at in range(0, len(message), 1000):
            connection.sendall(message[at : at + 1000])
        found = direct_pb2.DirectTransferResponse.FromString(message_of(connection))
        assert found.size_bytes == len(data)
        assert not raw.session.answer(number).HasField("error")
        raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=9, size_bytes=len(data)))
        connection.sendall(transfer(download=9, size_bytes=len(data)))
        assert direct_pb2.DirectTransferResponse.FromString(message_of(connection)).size_bytes == len(data)
        assert exactly(connection, len(data)) == data


def test_a_refused_upload_is_answered_while_its_bytes_still_come(raw: RawDirect) -> None:
    raw.session.attach()
    with raw.transfers() as connection:
        too_much = raw.session.limits.in_flight_bytes + 1
        connection.sendall(transfer(upload=7, size_bytes=too_much) + bytes(MIB))
        assert isinstance(error_of(connection), hg.LimitExceededError)
    for digest, expected in ((b"short", hg.ProtocolError), (bytes(32), hg.ContentMismatchError)):
        with raw.transfers() as connection:
            connection.sendall(transfer(content=digest, size_bytes=MIB) + bytes(MIB))
            assert isinstance(error_of(connection), expected)
            assert connection.recv(1) == b""


def test_an_upload_that_stops_ends_and_its_command_fails(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4 * MIB)
    number = raw.session.send(set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=4 * MIB))
    with raw.transfers() as connection:
        connection.sendall(transfer(upload=7, size_bytes=4 * MIB) + bytes(MIB))
        assert connection.recv(1) == b""
        error = decode_error(raw.session.answer(number).error)
        assert isinstance(error, hg.CancelledError | hg.DeadlineExceededError)


def test_an_upload_that_breaks_fails_its_command(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4 * MIB)
    number = raw.session.send(set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=4 * MIB))
    with raw.transfers() as connection:
        connection.sendall(transfer(upload=7, size_bytes=4 * MIB) + bytes(3 * MIB))
    assert raw.session.answer(number).HasField("error")


def test_a_reader_that_stops_holds_no_thread(lone: ThreadDaemon) -> None:
    """There are four threads; eight readers stop, and others go on."""
    with raw_channel(lone.url) as one, raw_channel(lone.url) as other:
        kept = []
        sessions = [RawDirect(channel) for channel in (one, other)]
        for raw in sessions:
            raw.session.attach()
            raw.session.send(allocate=command_pb2.Allocate(tensor=1, type=f32(4 * MIB)))
            for number in range(4):
                size = 16 * MIB
                command = command_pb2.GetTensor(tensor=1, transfer=number + 1, size_bytes=size)
                raw.session.send(get_tensor=command)
                connection = raw.transfers()
                connection.sendall(transfer(download=number + 1, size_bytes=size))
                assert message_of(connection)
                kept.append(connection)
        with hg.connect(lone.url) as session:
            assert session.put(np.ones(4 * MIB, np.uint8)).get(timeout=SECONDS).all()
        for connection in kept:
            connection.close()
        for raw in sessions:
            raw.session.close()


def test_garbage_ends_a_connection_and_nothing_else(lone: ThreadDaemon) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    with hg.connect(lone.url) as witness, raw_channel(lone.url) as channel:
        raw = RawDirect(channel)
        raw.session.attach()
        for turn in range(30):
            with raw.connect(chosen.randbytes(chosen.randrange(1, 5000))):
                pass
            with raw.transfers() as connection:
                data = chosen.randbytes(chosen.randrange(1, 3000))
                kind = turn % 3
                connection.sendall(
                    data if kind == 0 else framed(data) if kind == 1 else transfer(upload=turn)
                )
        array = np.arange(MIB, dtype=np.float32)
        assert np.array_equal(witness.put(array).get(timeout=SECONDS), array)
        raw.session.close()


def test_a_transfer_has_one_reader_whichever_way_it_comes(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4)
    with raw.transfers() as first, raw.transfers() as second:
        # No command names it yet.
        first.sendall(transfer(download=3, size_bytes=4))
        second.sendall(transfer(download=3, size_bytes=4))
        ready = select_one(first, second)
        assert isinstance(error_of(ready), hg.ProtocolError)
        raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=3, size_bytes=4))
        other = second if ready is first else first
        assert direct_pb2.DirectTransferResponse.FromString(message_of(other)).size_bytes == 4
        assert exactly(other, 4)


def select_one(*connections: socket.socket) -> socket.socket:
    ready, _, _ = select.select(connections, [], [], SECONDS)
    return ready[0]


def test_the_tickets_are_no_text_of_a_session(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        offer = session.info.direct
        assert offer is not None
        assert repr(offer.ticket) not in repr(session.info) and repr(offer.proof) not in repr(session.info)


@pytest.mark.parametrize("aio", [False, True])
def test_connections_that_break_anywhere_end_calls_with_errors_and_the_daemon_goes_on(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, aio: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    array = np.random.default_rng(seed).integers(0, 256, MIB, np.uint8)
    for _ in range(12):
        with middleman(f"grpc://127.0.0.1:{port_of(lone)}") as between, monkeypatch.context() as changed:
            offers(lone, changed, int(between.url.rpartition(":")[2]))
            with suppress(hg.HeliographError), connected(lone.url, aio) as there_and_back:
                between.cut_after(chosen.randrange(2 * MIB + 4096))
                for _ in range(4):
                    assert np.array_equal(there_and_back(array), array)
    still_serves(lone.url)


def test_changed_conversations_end_in_errors_and_leave_nothing_behind(lone: ThreadDaemon) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    size = 64 * 1024
    with hg.connect(lone.url) as witness, raw_channel(lone.url) as channel:
        held = witness.put(np.arange(MIB, dtype=np.float32))
        witness.synchronize()
        for turn in range(40):
            raw = RawDirect(channel)
            raw.session.attach()
            raw.session.allocate(1, size // 4)
            command = command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=size)
            raw.session.send(set_tensor=command)
            raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=9, size_bytes=size))
            talk = bytearray(transfer(upload=7, size_bytes=size) + bytes(size))
            talk += transfer(download=9, size_bytes=size) + transfer(content=bytes(32), size_bytes=3) + b"abc"
            for _ in range(chosen.randrange(1, 4)):
                at = chosen.choice([chosen.randrange(24), chosen.randrange(len(talk) + 1)])
                match chosen.randrange(4):
                    case 0:
                        talk[at : at + 1] = chosen.randbytes(1)
                    case 1:
                        del talk[at : at + chosen.randrange(1, 64)]
                    case 2:
                        talk[at:at] = chosen.randbytes(chosen.randrange(1, 64))
                    case _:
                        del talk[at:]
                        talk += b"\0"
            with raw.transfers() as connection, suppress(OSError):
                connection.sendall(talk)
                if turn % 2:
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(SECONDS)
                    while connection.recv(MIB):
                        pass
            raw.session.close()
        assert held.get(timeout=SECONDS)[-1] == MIB - 1
    for _ in range(1000):
        still_serves(lone.url)
        if not connections_of(lone):
            break
    assert not connections_of(lone)


def port_of(daemon: ThreadDaemon) -> int:
    assert daemon._daemon is not None
    return daemon._daemon._direct.port


def connections_of(daemon: ThreadDaemon) -> int:
    """The connections for bytes that the daemon has."""
    assert daemon._daemon is not None
    return daemon._daemon._transfers._counts.total()


def test_a_fork_leaves_the_connections_to_the_parent(lone: ThreadDaemon) -> None:
    script = f"""
        import os
        import numpy as np
        import heliograph as hg
        with hg.connect({lone.url!r}) as session:
            tensor = session.put(np.arange(2**19))
            assert session.command_socket and tensor.get()[-1] == 2**19 - 1
            if (child := os.fork()) == 0:
                try:
                    tensor.get()
                except hg.HeliographError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert tensor.get()[-1] == 2**19 - 1
    """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 0, found.stderr


def test_bytes_go_straight_from_their_tensor(lone: ThreadDaemon) -> None:
    array = np.random.default_rng(3).integers(0, 256, 16 * MIB, np.uint8)
    with hg.connect(lone.url) as session:
        tensor = session.put(array)
        # Bytes of a command before its reader are copied once.
        for _ in range(50):
            assert np.array_equal(tensor.get(timeout=SECONDS), array)
            server = session.server_traffic()
            if server.copied_out_bytes < server.read_bytes:
                return
        raise AssertionError("all bytes were copied")


def test_a_command_that_is_read_in_place_is_done_before_its_tensor_changes(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        tensor = session.put(np.zeros(8 * MIB, np.uint8))
        for number in range(1, 20):
            found: list[Any] = []
            reading = threading.Thread(target=lambda found=found: found.append(tensor.get(timeout=SECONDS)))
            reading.start()
            tensor.set(np.full(8 * MIB, number, np.uint8))
            reading.join(SECONDS)
            # Written before or after the read, in the order of the stream.
            assert len(np.unique(found[0])) == 1 and found[0][0] in (number - 1, number)


def test_a_reader_that_leaves_in_the_middle_lets_its_command_end(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.send(allocate=command_pb2.Allocate(tensor=1, type=f32(8 * MIB)))
    with raw.transfers() as connection:
        for number in (1, 2):
            connection.sendall(transfer(download=number, size_bytes=32 * MIB))
            command = command_pb2.GetTensor(tensor=1, transfer=number, size_bytes=32 * MIB)
            sequence = raw.session.send(get_tensor=command)
            assert message_of(connection)
            if number == 1:
                exactly(connection, 32 * MIB)
    assert not raw.session.answer(sequence).HasField("error")


def test_a_command_that_is_cancelled_while_it_is_read_ends(raw: RawDirect) -> None:
    raw.session.attach()
    size = 32 * MIB
    raw.session.send(allocate=command_pb2.Allocate(tensor=1, type=f32(size // 4)))
    for number in range(1, 50):
        with raw.transfers() as connection:
            connection.sendall(transfer(download=number, size_bytes=size))
            command = command_pb2.GetTensor(tensor=1, transfer=number, size_bytes=size)
            sequence = raw.session.send(get_tensor=command)
            assert message_of(connection)
            raw.session.send(cancel=command_pb2.Cancel(sequence=sequence))
            answer = raw.session.answer(sequence)
            if not answer.HasField("error"):
                # It was done before its reader came.
                continue
            assert isinstance(decode_error(answer.error), hg.CancelledError)
            received = 0
            with suppress(OSError):
                while received < size and (data := connection.recv(MIB)):
                    received += len(data)
            if received < size:
                return
    raise AssertionError("no command was read in place")
