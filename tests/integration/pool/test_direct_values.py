"""Values between daemons on a connection beside gRPC: who may have one, and what its end means."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from daemon_threads import SECONDS, ThreadDaemon, thread_daemon
from direct_clients import message_of
from waiting import until

from heliograph_backends.contract import Abort
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import HeliographError, ProtocolError, SessionClosedError
from heliograph_proto.plans import Arrival, Departure, Edge, Partition
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import direct_pb2, memory_pb2, peer_pb2, peer_pb2_grpc

SMALL = tensor_type("f32", (3, 4))
EDGE = Edge(b"e" * 16, b"s" * 32)


@pytest.fixture
def producer() -> Iterator[ThreadDaemon]:
    with thread_daemon(direct_connections=0) as made:
        yield made


class RawStream:
    """A stream of values of a daemon, whose first message offers a connection."""

    def __init__(self, stub: peer_pb2_grpc.PeerServiceStub, daemon: ThreadDaemon) -> None:
        self._requests: SimpleQueue[peer_pb2.ExchangeRequest | None] = SimpleQueue()
        self.send(incarnation=daemon.host.incarnation)
        self.answers: Any = stub.Exchange(iter(self._requests.get, None), timeout=SECONDS)
        self.offer = next(self.answers).direct

    def send(self, **fields: Any) -> None:
        """Send a request by gRPC."""
        self._requests.put(peer_pb2.ExchangeRequest(**fields))

    def request(self, ticket: bytes | None = None, **what: Any) -> socket.socket:
        """Open a connection for what is said, else for values."""
        made = socket.create_connection(("127.0.0.1", self.offer.port), timeout=SECONDS)
        what = what or {"exchange": direct_pb2.ExchangeConnection()}
        message = direct_pb2.DirectRequest(ticket=self.offer.ticket if ticket is None else ticket, **what)
        made.sendall(framed(message.SerializeToString()))
        return made

    def close(self) -> None:
        self._requests.put(None)
        self.answers.cancel()


@contextmanager
def raw_stream(daemon: ThreadDaemon) -> Iterator[RawStream]:
    with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        made = RawStream(peer_pb2_grpc.PeerServiceStub(channel), daemon)
        yield made
        made.close()


def answer_of(connection: socket.socket) -> direct_pb2.DirectResponse:
    return direct_pb2.DirectResponse.FromString(message_of(connection))


def refusal(connection: socket.socket) -> HeliographError:
    """The error with which a daemon closes a connection."""
    with connection:
        found = decode_error(answer_of(connection).error)
        assert connection.recv(1) == b""
    return found


def ask(number: int, run: int) -> peer_pb2.Ask:
    return peer_pb2.Ask(number=number, edge=EDGE.name, run=run, capability=EDGE.capability(run))


def test_a_stream_goes_on_beside_grpc_behind_what_went_by_grpc(producer: ThreadDaemon) -> None:
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    with raw_stream(producer) as raw, raw.request() as connection:
        assert answer_of(connection).proof == raw.offer.proof
        # Two went by gRPC, of which the second is not sent yet: it takes back what the third asks.
        for message in (
            direct_pb2.ExchangeSwitch(sent_messages=2),
            peer_pb2.ExchangeRequest(withdrawals=[1]),
            peer_pb2.ExchangeRequest(asks=[ask(2, 2)]),
        ):
            connection.sendall(framed(message.SerializeToString()))
        assert direct_pb2.ExchangeSwitch.FromString(message_of(connection)).sent_messages == 1
        raw.send(asks=[ask(1, 1)])
        out.offer(0, 2, producer.tensor(SMALL, 2), Abort())
        [answer] = peer_pb2.ExchangeResponse.FromString(message_of(connection)).answers
        assert (answer.number, answer.data) == (2, producer.tensor(SMALL, 2).array.tobytes())
        # The first was withdrawn, so its value is not sent to anyone.
        out.offer(0, 1, producer.tensor(SMALL, 1), Abort())
        assert producer.exchange.traffic.sent_values == 1
    out.close()


def test_a_ticket_is_good_once_and_for_its_stream_alone(producer: ThreadDaemon) -> None:
    with raw_stream(producer) as raw:
        # For what it is not, it is refused and stays good.
        for what in (
            {"command_socket": memory_pb2.CommandSocket()},
            {"transfers": direct_pb2.TransferConnection()},
        ):
            assert isinstance(refusal(raw.request(**what)), ProtocolError)
        assert isinstance(refusal(raw.request(bytes(32))), SessionClosedError)
        with raw.request() as connection:
            assert answer_of(connection).proof == raw.offer.proof
            assert isinstance(refusal(raw.request()), SessionClosedError)
    with raw_stream(producer) as raw:
        ticket = raw.offer.ticket
    with raw_stream(producer) as other:
        # The offer ends with its stream.
        until(lambda: len(daemon_port(producer)._offered) == 1, SECONDS)
        assert isinstance(refusal(other.request(ticket)), SessionClosedError)


def test_a_daemon_that_ends_sends_the_rest_of_what_its_threads_began(producer: ThreadDaemon) -> None:
    type, count = tensor_type("u8", (60_000,)), 150
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    service: Any = producer._daemon and producer._daemon._peer_service
    with raw_stream(producer) as raw, raw.request() as connection, ThreadPoolExecutor(1) as threads:
        assert answer_of(connection).proof == raw.offer.proof
        asks = peer_pb2.ExchangeRequest(asks=[ask(run, run) for run in range(1, count)])
        for message in (direct_pb2.ExchangeSwitch(sent_messages=1), asks):
            connection.sendall(framed(message.SerializeToString()))
        message_of(connection)
        [conversation] = service._open
        until(lambda: len(conversation._open) == count - 1, SECONDS)
        offered = 0
        while not conversation._stream._unsent:
            offered += 1
            out.offer(0, offered, producer.tensor(type, offered), Abort())
        ending = threads.submit(producer.call, service.hang_up())
        frames, came = FrameReader(2**20), list[bytes]()
        while data := connection.recv(2**20):
            came += frames.feed(data)
        ending.result(SECONDS)
    for run, message in enumerate(came, 1):
        [answer] = peer_pb2.ExchangeResponse.FromString(message).answers
        assert (answer.number, answer.data) == (run, bytes([run]) * type.nbytes)
    assert frames.is_empty and len(came) == offered
    out.close()


def daemon_port(daemon: ThreadDaemon) -> Any:
    assert daemon._daemon is not None
    return daemon._daemon._direct


def link_of(consumer: ThreadDaemon, producer: ThreadDaemon) -> Any:
    peers: Any = consumer.exchange._peers
    return peers._links.get(producer.source)


def test_daemons_use_it_and_another_one_after_a_break(producer: ThreadDaemon) -> None:
    with thread_daemon(direct_connections=0) as consumer:
        out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
        into = consumer.exchange.open(Partition((Arrival(0, EDGE, producer.source),)))

        def exchange(run: int) -> None:
            target = consumer.tensor(SMALL)
            incoming = into.expect(run, [target])
            out.offer(0, run, producer.tensor(SMALL, run), Abort())
            incoming.wait(0, Abort())
            assert (target.array == run).all()

        exchange(1)
        until(lambda: "beside gRPC" in repr(link_of(consumer, producer)._stream), SECONDS)
        for run in range(2, 20):
            exchange(run)
        target = consumer.tensor(SMALL)
        incoming = into.expect(20, [target])
        before = link_of(consumer, producer)._stream
        before._beside.shutdown(socket.SHUT_RDWR)
        out.offer(0, 20, producer.tensor(SMALL, 20), Abort())
        incoming.wait(0, Abort())
        assert (target.array == 20).all()
        until(lambda: "beside gRPC" in repr(link_of(consumer, producer)._stream), SECONDS)
        assert link_of(consumer, producer)._stream is not before
        exchange(21)
        into.close()
        out.close()


def test_daemons_without_a_port_exchange_by_grpc() -> None:
    with thread_daemon() as other, grpc.insecure_channel(other.url.removeprefix("grpc://")) as channel:
        out = other.exchange.open(Partition(departures=(Departure(0, EDGE),)))
        out.offer(0, 1, other.tensor(SMALL, 1), Abort())
        request = peer_pb2.ExchangeRequest(incarnation=other.host.incarnation, asks=[ask(1, 1)])
        call: Any = peer_pb2_grpc.PeerServiceStub(channel).Exchange(iter([request]), timeout=SECONDS)
        first = next(call)
        assert not first.HasField("direct") and first.answers[0].number == 1
        call.cancel()
        out.close()
