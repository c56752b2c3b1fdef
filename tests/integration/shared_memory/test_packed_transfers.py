"""Tensors and weights that are compressed on their way, over direct connections and by gRPC."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from blake3 import blake3
from daemon_threads import ThreadDaemon, thread_daemon
from direct_clients import RawDirect, error_of, exactly, message_of, offers, port_of, transfer
from middlemen import Middleman, middleman
from raw_client import raw_channel, still_serves

import heliograph as hg
from heliograph.transport.bulk import link
from heliograph_proto.codec import decode_error, packing
from heliograph_proto.codec.packing import HEADER, Encoding, pack
from heliograph_proto.v1 import bulk_pb2, command_pb2, direct_pb2

SECONDS = 60
MIB = 2**20
WAYS = pytest.mark.parametrize("is_direct", [True, False])
BOTH = pytest.mark.parametrize("aio", [False, True])


def zeros() -> np.ndarray[Any, Any]:
    return np.zeros(6 * MIB + 5, np.uint8)


def floats() -> np.ndarray[Any, Any]:
    """Random ones that are exact in bf16."""
    found = np.random.default_rng(1).standard_normal(MIB + 1, np.float32)
    return (found.view(np.uint32) & 0xFFFF0000).view(np.float32)


@contextmanager
def watched(
    daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> Iterator[tuple[str, Middleman]]:
    """A URL, and the middleman that counts the bytes of transfers there."""
    target = f"grpc://127.0.0.1:{port_of(daemon)}" if is_direct else daemon.url
    with middleman(target) as between:
        if is_direct:
            offers(daemon, monkeypatch, int(between.url.rpartition(":")[2]))
        yield daemon.url if is_direct else between.url, between


def there_and_back(url: str, array: np.ndarray[Any, Any], aio: bool, **how: Any) -> np.ndarray[Any, Any]:
    if not aio:
        with hg.connect(url, **how) as session:
            return session.put(array).get(timeout=SECONDS)

    async def scenario() -> np.ndarray[Any, Any]:
        async with hg.aio.connect(url, **how) as session:
            return await (await session.put(array)).get(timeout=SECONDS)

    return asyncio.run(scenario())


@BOTH
@WAYS
@pytest.mark.parametrize("make", [zeros, floats])
def test_bytes_come_back_as_they_went_and_fewer_go_over_the_link(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, is_direct: bool, aio: bool, make: Any
) -> None:
    array = make()
    with watched(lone, monkeypatch, is_direct) as (url, between):
        assert np.array_equal(there_and_back(url, array, aio, compression="on"), array)
        assert sum(between.passed_bytes) < array.nbytes / 2
        assert between.returned_bytes < array.nbytes / 2


@WAYS
def test_weights_are_packed_and_have_the_digest_of_their_plain_bytes(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    weight = floats()
    g = hg.Graph()
    g.output("y", g.weight("w", weight) * g.input("x", (1,), "f32"))
    with (
        watched(lone, monkeypatch, is_direct) as (url, between),
        hg.connect(url, compression="on") as session,
    ):
        found = session.compile(g).run(x=np.ones(1, np.float32))["y"]
        assert np.array_equal(found, weight)
        assert sum(between.passed_bytes) < weight.nbytes / 2


@WAYS
def test_nothing_is_packed_on_one_host_unless_it_is_asked_for(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    array = zeros()
    with watched(lone, monkeypatch, is_direct) as (url, between):
        assert np.array_equal(there_and_back(url, array, False), array)
        assert sum(between.passed_bytes) > array.nbytes and between.returned_bytes > array.nbytes


def test_a_link_that_calls_wait_for_is_slow_and_gets_packed_pieces(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which gRPC takes messages is what a client sees of a link with TLS or a proxy."""
    monkeypatch.setattr(link, "is_of_this_host", lambda host: False)
    monkeypatch.setattr(link, "_rate", lambda size_bytes, seconds: 10e6)
    array = np.zeros(32 * MIB, np.uint8)
    with watched(lone, monkeypatch, False) as (url, between):
        assert np.array_equal(there_and_back(url, array, False), array)
        assert array.nbytes / 16 < sum(between.passed_bytes) < array.nbytes / 2
        assert between.returned_bytes < array.nbytes / 2


def test_a_server_that_takes_none_gets_them_as_they_are() -> None:
    array = floats()
    with (
        thread_daemon(direct_connections=0, compression=False) as daemon,
        hg.connect(daemon.url, compression="on") as session,
    ):
        assert not {"packing", "zstd"} & {*session.info.features}
        assert np.array_equal(session.put(array).get(timeout=SECONDS), array)


def test_a_client_without_the_library_packs_halves(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_zstd_module", lambda: "")
    array = floats()
    with watched(lone, monkeypatch, True) as (url, between):
        assert np.array_equal(there_and_back(url, array, False, compression="on"), array)
        assert array.nbytes / 2 <= sum(between.passed_bytes) < array.nbytes * 0.6


def test_another_word_for_compression_is_refused(lone: ThreadDaemon) -> None:
    wrong: Any = "gzip"
    with pytest.raises(hg.InvalidArgumentError, match="auto, on, off"):
        hg.connect(lone.url, compression=wrong)
    with pytest.raises(hg.InvalidArgumentError, match="auto, on, off"):
        hg.aio.connect(lone.url, compression=wrong)


@BOTH
def test_connections_that_break_in_packed_bytes_end_calls_with_errors(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, aio: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen, array = random.Random(seed), floats()
    for _ in range(6):
        with monkeypatch.context() as changed, watched(lone, changed, True) as (url, between):
            between.cut_after(chosen.randrange(2 * MIB))
            with suppress(hg.HeliographError):
                assert np.array_equal(there_and_back(url, array, aio, compression="on"), array)
    still_serves(lone.url)


# Hostile clients


def piece(data: bytes, encoding: int = Encoding.PLANES_ZSTD) -> bytes:
    """A piece as it is sent."""
    packed = pack(Encoding(encoding), memoryview(data)) if encoding else data
    assert packed is not None
    return HEADER.pack(encoding, len(data), len(packed)) + bytes(packed)


def test_plain_and_packed_pieces_of_an_upload_keep_their_order(raw: RawDirect) -> None:
    raw.session.attach()
    size = 4 * 4096
    raw.session.allocate(1, size // 4)
    data = np.arange(size, dtype=np.uint8).tobytes()
    parts = [data[:1000], data[1000:9192], data[9192:9200], data[9200:]]
    talk = b"".join(piece(part, number % 2 * 2) for number, part in enumerate(parts))
    for is_early in (True, False):
        command = command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=size)
        with raw.transfers() as connection:
            number = 0 if is_early else raw.session.send(set_tensor=command)
            connection.sendall(transfer(upload=7, size_bytes=size, is_packed=True))
            for at in range(0, len(talk), 997):
                connection.sendall(talk[at : at + 997])
            answer = direct_pb2.DirectTransferResponse.FromString(message_of(connection))
            assert answer.size_bytes == size
            number = number or raw.session.send(set_tensor=command)
            assert not raw.session.answer(number).HasField("error")
            raw.session.send(get_tensor=command_pb2.GetTensor(tensor=1, transfer=9, size_bytes=size))
            connection.sendall(transfer(download=9, size_bytes=size))
            assert message_of(connection) and exactly(connection, size) == data


@pytest.mark.parametrize(
    "talk",
    [
        HEADER.pack(Encoding.PLANES_ZSTD, MIB + 1, 100),
        HEADER.pack(Encoding.PLANES_ZSTD, 2**32 - 1, 2**32 - 1),
        HEADER.pack(Encoding.PLANES_ZSTD, 4096, 4096),
        HEADER.pack(Encoding.PLANES_ZSTD, 4096, 0),
        HEADER.pack(Encoding.UPPER_HALVES, 4096, 1000) + bytes(1000),
        HEADER.pack(Encoding.PLAIN, 4096, 4000),
        HEADER.pack(Encoding.PLAIN, 0, 0),
        HEADER.pack(Encoding.PLAIN, 3 * MIB, 3 * MIB),
        HEADER.pack(77, 4096, 100),
        HEADER.pack(Encoding.PLANES_ZSTD, 4096, 100) + bytes(100),
        HEADER.pack(Encoding.PLANES_ZSTD, 4096, 2048) + piece(bytes(64 * MIB))[9:2057].ljust(2048, b"\0"),
    ],
)
def test_pieces_that_cannot_be_end_their_upload_and_its_command(raw: RawDirect, talk: bytes) -> None:
    raw.session.attach()
    raw.session.allocate(1, MIB // 2)
    number = raw.session.send(set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=2 * MIB))
    with raw.transfers() as connection:
        connection.sendall(transfer(upload=7, size_bytes=2 * MIB, is_packed=True) + talk)
        assert isinstance(error_of(connection), hg.ProtocolError)
    assert isinstance(decode_error(raw.session.answer(number).error), hg.ProtocolError)


def test_a_piece_that_stops_in_the_middle_fails_its_command(raw: RawDirect) -> None:
    raw.session.attach()
    raw.session.allocate(1, MIB // 4)
    number = raw.session.send(set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=MIB))
    with raw.transfers() as connection:
        head = transfer(upload=7, size_bytes=MIB, is_packed=True)
        connection.sendall(head + piece(floats().tobytes()[:MIB])[:5000])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert raw.session.answer(number).HasField("error")


def test_a_packed_content_that_broke_off_goes_on_where_it_ended(lone: ThreadDaemon) -> None:
    with raw_channel(lone.url) as channel:
        goes_on(RawDirect(channel, bytes(range(32))))


def goes_on(raw: RawDirect) -> None:
    raw.session.attach()
    data = floats().tobytes()[: 3 * MIB]
    digest = blake3(data).digest()
    with raw.transfers() as connection:
        head = transfer(content=digest, size_bytes=len(data), is_packed=True)
        connection.sendall(head + piece(data[:MIB]) + piece(data[MIB : 2 * MIB])[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    bulk = raw.session.bulk
    request = bulk_pb2.FindMissingContentsRequest(session=raw.session.token, digests=[digest])
    for _ in range(1000):
        found = bulk.FindMissingContents(iter([request]), timeout=SECONDS)
        if found.received_bytes:
            break
    assert [*found.received_bytes] == [MIB]
    with raw.transfers() as connection:
        head = transfer(content=digest, size_bytes=len(data), offset_bytes=MIB, is_packed=True)
        connection.sendall(head + piece(data[MIB : 2 * MIB]) + piece(data[2 * MIB :]))
        answer = direct_pb2.DirectTransferResponse.FromString(message_of(connection))
        assert answer.size_bytes == len(data)
    assert not bulk.FindMissingContents(iter([request]), timeout=SECONDS).missing_digests
    raw.session.close()


@pytest.mark.parametrize(
    ("encoding", "plain", "data"),
    [(2, 2**40, b"x"), (2, 4096, bytes(100)), (1, 8, b"xyz"), (3, 8, b"abcd"), (2, 4, bytes(8)), (2, 0, b"")],
    ids=["too large", "no frame", "odd halves", "unknown", "larger", "empty"],
)
def test_packed_messages_that_cannot_be_are_refused(
    raw: RawDirect, encoding: Any, plain: int, data: bytes
) -> None:
    raw.session.attach()
    raw.session.allocate(1, MIB)
    number = raw.session.send(set_tensor=command_pb2.SetTensor(tensor=1, transfer=7, size_bytes=4 * MIB))
    target = bulk_pb2.UploadTarget(session=raw.session.token, transfer=7, size_bytes=4 * MIB)
    message = bulk_pb2.UploadRequest(target=target, encoding=encoding, plain_bytes=plain, data=data)
    with pytest.raises(grpc.RpcError, match="packed"):
        raw.session.bulk.Upload(iter([message]), timeout=SECONDS)
    assert raw.session.answer(number).HasField("error")


def test_packed_bytes_of_a_session_that_did_not_agree_on_them_are_refused(lone: ThreadDaemon) -> None:
    size = 4096
    with raw_channel(lone.url) as channel:
        raw = RawDirect(channel, features=["direct"])
        raw.session.attach()
        raw.session.allocate(1, size // 4)
        for transfer_number in (7, 8):
            command = command_pb2.SetTensor(tensor=1, transfer=transfer_number, size_bytes=size)
            number = raw.session.send(set_tensor=command)
            if transfer_number == 7:
                with raw.transfers() as connection:
                    head = transfer(upload=transfer_number, size_bytes=size, is_packed=True)
                    connection.sendall(head + piece(bytes(size)))
                    assert "not agreed on" in str(error_of(connection))
            else:
                packed = pack(Encoding.PLANES_ZSTD, memoryview(bytes(size)))
                target = bulk_pb2.UploadTarget(
                    session=raw.session.token, transfer=transfer_number, size_bytes=size
                )
                message = bulk_pb2.UploadRequest(target=target, encoding=2, plain_bytes=size, data=packed)
                with pytest.raises(grpc.RpcError, match="not agreed on"):
                    raw.session.bulk.Upload(iter([message]), timeout=SECONDS)
            assert raw.session.answer(number).HasField("error")
        raw.session.close()
