"""TCP connections beside gRPC's whose clients are hostile, or break off."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from direct_clients import (
    RawDirect,
    connected,
    connections_of,
    error_of,
    exactly,
    message_of,
    offers,
    port_of,
    refusal,
    select_one,
    transfer,
)
from middlemen import middleman
from raw_client import f32, raw_channel, still_serves

import heliograph as hg
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import framed
from heliograph_proto.v1 import command_pb2, direct_pb2, memory_pb2, session_pb2, session_pb2_grpc
from heliograph_server.rpc.direct import transfers

SECONDS = 60
MIB = 2**20
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
    size = 16 * MIB
    with raw_channel(lone.url) as channel:
        kept = []
        # Each in a session of its own, since a command may wait for the reader of the one before.
        sessions = [RawDirect(channel) for _ in range(8)]
        for raw in sessions:
            raw.session.attach()
            raw.session.send(allocate=command_pb2.Allocate(tensor=1, type=f32(size // 4)))
            raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=1, size_bytes=size))
            connection = raw.transfers()
            connection.sendall(transfer(download=1, size_bytes=size))
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


def test_a_reader_that_leaves_before_its_command_gives_its_place_back(
    lone: ThreadDaemon, raw: RawDirect
) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4)
    for number in range(1, 9):
        # No command names the transfer, and a session has four connections.
        with raw.transfers() as connection:
            connection.sendall(transfer(download=number, size_bytes=16))
    for _ in range(1000):
        still_serves(lone.url)
        if not connections_of(lone):
            break
    with raw.transfers() as connection:
        connection.sendall(transfer(download=8, size_bytes=16))
        raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=8, size_bytes=16))
        assert direct_pb2.DirectTransferResponse.FromString(message_of(connection)).size_bytes == 16


def test_bytes_that_come_while_a_command_is_awaited_are_read_in_their_turn(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, 4)
    with raw.transfers() as connection:
        connection.sendall(transfer(download=1, size_bytes=16) + transfer(download=2, size_bytes=16))
        for number in (1, 2):
            raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=number, size_bytes=16))
            found = direct_pb2.DirectTransferResponse.FromString(message_of(connection))
            assert found.size_bytes == 16 and exactly(connection, 16)


def test_a_connection_that_breaks_before_it_is_served_takes_no_place(
    raw: RawDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.session.attach()
    init = transfers._Connection.__init__

    def broken(*_: Any) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(transfers._Connection, "__init__", broken)
    for _ in range(8):
        request = raw.request(transfers=direct_pb2.TransferConnection())
        assert isinstance(refusal(request), hg.UnavailableError)
    monkeypatch.setattr(transfers._Connection, "__init__", init)
    made = [raw.transfers() for _ in range(4)]
    for one in made:
        one.close()


def test_a_command_socket_that_is_reset_ends_its_session_with_an_error(lone: ThreadDaemon) -> None:
    with raw_channel(lone.url) as channel:
        raw = RawDirect(channel)
        with raw.request(**COMMANDS) as connection:
            message_of(connection)
            raw.session.attach(command_socket=True)
            # A reset instead of an end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert isinstance(raw.session.end(), hg.UnavailableError)
        raw.session.close()
    still_serves(lone.url)
