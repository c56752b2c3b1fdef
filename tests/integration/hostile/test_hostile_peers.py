"""Daemons and clients that want harm: what one holds for others is bounded, whatever these send or leave."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from daemon_threads import SECONDS, thread_daemon

from heliograph_backends.contract import Abort, Tensor
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto.codec import decode_error
from heliograph_proto.errors import CancelledError, InvalidArgumentError, LimitExceededError, ProtocolError
from heliograph_proto.plans import Arrival, Departure, Edge, Partition, PeerSource
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.ledger import EdgeRefusal, Ledger
from heliograph_server.exchange.outgoing import OutgoingValue
from heliograph_server.rpc.peer_service import PeerService
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot

EDGE = Edge(b"e" * 16, b"s" * 32)
SMALL = tensor_type("f32", (3, 4))
LARGE = tensor_type("f32", (700, 1000))
LIMITS = Limits(in_flight_bytes=4 * 2**20, chunk_bytes=2**18)


class SilentReader:
    """A call whose client sends message after message, and takes the first few answers alone."""

    def __init__(self, messages: Iterator[bytes], takes: int = 0) -> None:
        self._messages, self._takes = messages, takes
        self.read_messages = self.largest_bytes = 0
        self.answers: list[peer_pb2.Answer] = []

    async def read(self) -> bytes:
        found = next(self._messages, None)
        if found is None:
            await asyncio.get_running_loop().create_future()
        self.read_messages += 1
        return found or b""

    async def write(self, message: bytes) -> None:
        if not self._takes:
            await asyncio.get_running_loop().create_future()
        self._takes -= 1
        # As gRPC's, a write takes a while: answers gather meanwhile.
        loop = asyncio.get_running_loop()
        loop.call_soon((written := loop.create_future()).set_result, None)
        await written
        self.largest_bytes = max(self.largest_bytes, len(message))
        self.answers += peer_pb2.ExchangeResponse.FromString(message).answers


@contextmanager
def hosts() -> Iterator[Host]:
    host = Host(Registry.of(CpuDevice(threads=1, native=False)), LIMITS)
    yield host
    host.close()
    assert host.exchange.budget.held_bytes == 0


def large_tensor(host: Host) -> Tensor:
    return Tensor(LARGE, host.devices[0].buffer_type.allocate(LARGE.nbytes))


def served(host: Host, messages: Iterable[peer_pb2.ExchangeRequest], takes: int = 0) -> SilentReader:
    """A stream of a host that got these messages, for some thousand turns of its loop."""

    def encoded() -> Iterator[bytes]:
        for message in messages:
            message.incarnation = host.incarnation
            yield message.SerializeToString()

    async def serving() -> SilentReader:
        with ThreadPoolExecutor(1) as movers:
            made = SilentReader(encoded(), takes)
            call: Any = PeerService(HostSlot(host), movers, movers).Exchange(None, made)
            task = asyncio.ensure_future(call)
            for _ in range(5000):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        return made

    return asyncio.run(serving())


@pytest.mark.parametrize("kind", ["asks", "receipts"])
def test_who_asks_without_end_and_reads_no_answer_is_read_no_further(kind: str) -> None:
    def messages() -> Iterator[peer_pb2.ExchangeRequest]:
        for first in range(1, 2_000_000, 1000):
            numbers = range(first, first + 1000)
            if kind == "asks":
                yield peer_pb2.ExchangeRequest(asks=[peer_pb2.Ask(number=one) for one in numbers])
            else:
                yield peer_pb2.ExchangeRequest(receipts=[peer_pb2.Receipt(number=one) for one in numbers])

    with hosts() as host:
        assert 0 < served(host, messages()).read_messages < 100


def test_refusals_of_many_requests_go_in_several_messages() -> None:
    request = peer_pb2.ExchangeRequest(asks=[peer_pb2.Ask(number=one) for one in range(1, 9000)])
    with hosts() as host:
        made = served(host, [request], takes=100)
    assert len(made.answers) == 8999
    assert made.largest_bytes < 1.1 * 2**20


def test_a_message_that_is_far_too_large_ends_the_stream() -> None:
    asks = [peer_pb2.Ask(number=one) for one in range(1_000_000)]
    with hosts() as host:
        assert served(host, [peer_pb2.ExchangeRequest(asks=asks)]).answers == []
        assert host.exchange.traffic.refused == 0


def bring(number: int, run: int, size_bytes: int) -> peer_pb2.ExchangeRequest:
    """A value of the edge, with its capability."""
    one = peer_pb2.Bring(number=number, edge=EDGE.name, run=run, capability=EDGE.capability(run))
    one.data = bytes(size_bytes)
    return peer_pb2.ExchangeRequest(brings=[one])


def test_what_is_brought_and_has_no_place_yet_is_bounded() -> None:
    with hosts() as host:
        ports = host.exchange.open(Partition((Arrival(0, EDGE),)))
        count, size_bytes = 200, 60_000
        found = served(host, (bring(one, one, size_bytes) for one in range(1, count)), takes=count)
        refused = [decode_error(one.error) for one in found.answers]
        assert all(isinstance(one, LimitExceededError) for one in refused)
        assert (count - len(refused)) * size_bytes <= LIMITS.in_flight_bytes + size_bytes
        # What the stream that has ended held is held no more.
        again = served(host, [bring(1, count + 1, size_bytes)], takes=1)
        assert again.answers == []
        ports.close()


def test_a_large_value_is_not_brought_as_a_small_one() -> None:
    with hosts() as host:
        ports = host.exchange.open(Partition((Arrival(0, EDGE),)))
        (answer,) = served(host, [bring(1, 1, 100_000)], takes=1).answers
        assert isinstance(decode_error(answer.error), ProtocolError)
        ports.close()


def test_values_that_nobody_comes_for_are_held_for_the_newest_runs_alone() -> None:
    with hosts() as host:
        exchange, tensor = host.exchange, large_tensor(host)
        ports = exchange.open(Partition(departures=(Departure(0, EDGE),)))
        for run in range(1, 30):
            ports.offer(0, run, tensor, Abort())
            ports.end(run)
        assert exchange.budget.held_bytes <= LIMITS.in_flight_bytes + LARGE.nbytes
        told: list[object] = []
        exchange.ask(EDGE.name, 1, EDGE.capability(1), told.append)
        exchange.ask(EDGE.name, 29, EDGE.capability(29), told.append)
        lost, newest = told
        assert isinstance(lost, LimitExceededError) and isinstance(newest, OutgoingValue)
        newest.drop()
        ports.close()


def test_a_value_that_somebody_takes_slowly_is_given_up_with_its_plan() -> None:
    with hosts() as host:
        exchange, tensor = host.exchange, large_tensor(host)
        ports = exchange.open(Partition(departures=(Departure(0, EDGE),)))
        ports.offer(0, 1, tensor, Abort())
        told: list[Any] = []
        exchange.ask(EDGE.name, 1, EDGE.capability(1), told.append)
        assert told[0].piece(0, lambda: None)
        ports.close()
        with pytest.raises(CancelledError):
            told[0].piece(0, lambda: None)
        assert exchange.budget.held_bytes == 0


def test_a_tensor_that_somebody_takes_slowly_is_given_up_with_its_command() -> None:
    with hosts() as host, ThreadPoolExecutor(1) as threads:
        exchange = host.exchange
        tensor = large_tensor(host)
        ports = exchange.open(Partition(departures=(Departure(0, EDGE),)))
        came: Future[Any] = Future()
        exchange.ask(EDGE.name, 1, EDGE.capability(1), came.set_result)
        giving = threads.submit(ports.hand_over, 0, 1, tensor, abort := Abort())
        value = came.result(SECONDS)
        abort.set()
        with pytest.raises(CancelledError):
            giving.result(SECONDS)
        ports.close()
        assert value.is_dropped


def test_who_asks_and_withdraws_without_end_is_refused_at_last() -> None:
    ledger: Ledger[object, object] = Ledger(EDGE)
    found: object = None
    for run in range(1, 20_000):
        waiter = object()
        found = ledger.show(run, EDGE.capability(run), waiter)
        ledger.withdraw(run, waiter)
    assert isinstance(found, EdgeRefusal) and isinstance(found.error, LimitExceededError)


def test_a_client_that_names_ever_more_daemons_opens_no_more_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph_server.links.links.max_links", lambda: 2)
    # Nobody answers there, so that no way is given up before the last one is asked for.
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, thread_daemon(LIMITS) as daemon:
        address = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        lives = [PeerSource(address, bytes([one]) * 16) for one in range(4)]
        edges = [Edge(bytes([one]) * 16, bytes(32)) for one in range(4)]
        arrivals = [Arrival(0, edge, life) for edge, life in zip(edges, lives, strict=True)]
        ports = daemon.exchange.open(Partition(tuple(arrivals)))
        incoming = ports.expect(1, [daemon.tensor(SMALL) for _ in arrivals])
        for place in (2, 3):
            with pytest.raises(LimitExceededError, match="one daemon too many"):
                incoming.wait(place, Abort())
        incoming.close()
        ports.close()


def test_more_than_a_message_takes_goes_in_several() -> None:
    with thread_daemon() as producer, thread_daemon() as consumer:
        peers: Any = producer.exchange._peers
        type, count = tensor_type("u8", (60_000,)), 100
        edges = [Edge(bytes([one]) * 16, bytes(32)) for one in range(count)]
        ports = consumer.exchange.open(Partition(tuple(Arrival(0, edge) for edge in edges)))
        targets = [consumer.tensor(type) for _ in edges]
        incoming = ports.expect(1, targets)
        for number, edge in enumerate(edges):
            value = OutgoingValue.of(bytes([number]) * type.nbytes)
            peers.push(consumer.source, edge, 1, value, lambda error: None)
        for number, target in enumerate(targets):
            incoming.wait(number, Abort())
            assert (target.array == number).all()
        ports.close()


@pytest.mark.parametrize(
    "address", ["grpc://[::1", "grpc://[v1.x]", "a\u2100b:1", "grpc://a,b:1", "unix:///\0"]
)
def test_an_address_that_is_none_is_an_error_at_once_and_nobody_elses(address: str) -> None:
    with thread_daemon() as producer, thread_daemon() as consumer:
        out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
        other = Edge(b"o" * 16, b"o" * 32)
        wrong, right = PeerSource(address, bytes(16)), producer.source
        ports = consumer.exchange.open(Partition((Arrival(0, other, wrong), Arrival(1, EDGE, right))))
        incoming = ports.expect(1, [consumer.tensor(SMALL), consumer.tensor(SMALL)])
        out.offer(0, 1, producer.tensor(SMALL, 1), Abort())
        late = threading.Timer(SECONDS, (abort := Abort()).set)
        late.start()
        with pytest.raises(InvalidArgumentError):
            incoming.wait(0, abort)
        incoming.wait(1, abort)
        late.cancel()
        late.join()
        ports.close()
        out.close()
