"""Values between daemons, over sockets: two of this process that exchange, and a raw client of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from daemon_threads import SECONDS, ThreadDaemon, thread_daemon
from waiting import until

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.status import error_from_metadata, error_to_metadata
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    LimitExceededError,
    MemberLostError,
    PermissionDeniedError,
    ProtocolError,
    SessionClosedError,
    UnavailableError,
)
from heliograph_proto.plans import Arrival, Departure, Edge, Partition, PeerSource
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type
from heliograph_proto.v1 import peer_pb2, peer_pb2_grpc
from heliograph_server.exchange.edges import EdgePorts
from heliograph_server.exchange.incoming import IncomingValue
from heliograph_server.exchange.outgoing import OutgoingValue
from heliograph_server.links.aio import LoopPeers
from heliograph_server.links.blocking import BlockingLink, BlockingPeers

SMALL = tensor_type("f32", (3, 4))
LARGE = tensor_type("f32", (700, 1000))
EDGE = Edge(b"e" * 16, b"s" * 32)
LIMITS = Limits(in_flight_bytes=4 * 2**20, chunk_bytes=2**18)


@pytest.fixture
def producer() -> Iterator[ThreadDaemon]:
    with thread_daemon(LIMITS) as made:
        yield made


@pytest.fixture
def consumer() -> Iterator[ThreadDaemon]:
    with thread_daemon(LIMITS) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def ends(producer: ThreadDaemon, consumer: ThreadDaemon, edge: Edge = EDGE) -> tuple[EdgePorts, EdgePorts]:
    """Both ends of an edge that is pulled."""
    out = producer.exchange.open(Partition(departures=(Departure(0, edge),)))
    return out, consumer.exchange.open(Partition((Arrival(0, edge, producer.source),)))


def numbered(daemon: ThreadDaemon, type: TensorType) -> Tensor:
    tensor = daemon.tensor(type)
    tensor.array[:] = np.arange(type.size, dtype="f4").reshape(type.shape)
    return tensor


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_value_is_pulled_whoever_comes_first(
    producer: ThreadDaemon,
    consumer: ThreadDaemon,
    threads: ThreadPoolExecutor,
    type: TensorType,
    asks_first: bool,
) -> None:
    out, into = ends(producer, consumer)
    for run in (1, 2, 3):
        source, target = numbered(producer, type), consumer.tensor(type)
        waiting = None
        if asks_first:
            waiting = threads.submit(into.expect(run, [target]).wait, 0, Abort())
        out.offer(0, run, source, Abort())
        if waiting is None:
            waiting = threads.submit(into.expect(run, [target]).wait, 0, Abort())
        waiting.result(SECONDS)
        assert np.array_equal(target.array, source.array)
        out.end(run)
        into.end(run)
    assert producer.exchange.traffic.sent_bytes == 3 * type.nbytes
    assert consumer.exchange.traffic.received_bytes == 3 * type.nbytes
    assert producer.exchange.traffic.received_bytes == consumer.exchange.traffic.sent_bytes == 0
    out.close()
    into.close()


# What is no value


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_failed_run_tells_the_consumer_why(
    producer: ThreadDaemon, consumer: ThreadDaemon, threads: ThreadPoolExecutor, type: TensorType
) -> None:
    out, into = ends(producer, consumer)
    waiting = threads.submit(into.expect(1, [consumer.tensor(type)]).wait, 0, Abort())
    out.end(1, ComputeFailedError("it burst"))
    with pytest.raises(ComputeFailedError, match="it burst"):
        waiting.result(SECONDS)


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_nothing_is_written_once_the_consumer_has_closed(
    producer: ThreadDaemon, consumer: ThreadDaemon, threads: ThreadPoolExecutor, type: TensorType
) -> None:
    out, into = ends(producer, consumer)
    target, abort = consumer.tensor(type), Abort()
    incoming = into.expect(1, [target])
    waiting = threads.submit(incoming.wait, 0, abort)
    abort.set()
    with pytest.raises(CancelledError):
        waiting.result(SECONDS)
    incoming.close()
    out.offer(0, 1, producer.tensor(type, 1), Abort())
    out.end(1, CancelledError("the run was cancelled"))
    # The way still works, and what follows there comes after anything of the first run.
    second = consumer.tensor(type)
    out.offer(0, 2, producer.tensor(type, 2), Abort())
    into.expect(2, [second]).wait(0, Abort())
    assert (second.array == 2).all() and not target.array.any()


def test_values_of_other_sizes_are_errors_and_write_nothing(
    producer: ThreadDaemon, consumer: ThreadDaemon
) -> None:
    out, into = ends(producer, consumer)
    large, small = tensor_type("f32", (600, 1000)), tensor_type("f32", (5,))
    for run, (sent, expected) in enumerate(
        [(small, SMALL), (large, LARGE), (large, SMALL), (SMALL, LARGE)], 1
    ):
        target = consumer.tensor(expected)
        out.offer(0, run, producer.tensor(sent, 7), Abort())
        with pytest.raises(ProtocolError):
            into.expect(run, [target]).wait(0, Abort())
        assert not target.array.any()


def test_a_plan_that_is_gone_denies_what_it_had(producer: ThreadDaemon, consumer: ThreadDaemon) -> None:
    out, into = ends(producer, consumer)
    for run, type in enumerate([SMALL, LARGE], 1):
        out.close()
        with pytest.raises(PermissionDeniedError):
            into.expect(run, [consumer.tensor(type)]).wait(0, Abort())


# Loss


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_source_that_ends_is_lost_for_whoever_waits(
    producer: ThreadDaemon, consumer: ThreadDaemon, threads: ThreadPoolExecutor, type: TensorType
) -> None:
    _, into = ends(producer, consumer)
    incoming = into.expect(1, [consumer.tensor(type)])
    waiting = threads.submit(incoming.wait, 0, Abort())
    producer.stop()
    with pytest.raises((MemberLostError, CancelledError)):
        waiting.result(SECONDS)
    with pytest.raises(MemberLostError, match=producer.url):
        into.expect(2, [consumer.tensor(type)]).wait(0, Abort())


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_another_life_of_the_source_gives_nothing(
    producer: ThreadDaemon, consumer: ThreadDaemon, type: TensorType
) -> None:
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    out.offer(0, 1, producer.tensor(type), Abort())
    before = PeerSource(producer.url, b"another life....")
    into = consumer.exchange.open(Partition((Arrival(0, EDGE, before),)))
    with pytest.raises(MemberLostError, match="another incarnation") as caught:
        into.expect(1, [consumer.tensor(type)]).wait(0, Abort())
    assert producer.url in str(caught.value)


@pytest.mark.parametrize(
    "address", ["grpc://127.0.0.1:1", "grpc://no.such.host.invalid:7070", "local:", "://"]
)
def test_an_address_where_nobody_is_gives_a_typed_error(consumer: ThreadDaemon, address: str) -> None:
    into = consumer.exchange.open(Partition((Arrival(0, EDGE, PeerSource(address, b"")),)))
    with pytest.raises(HeliographError) as caught:
        into.expect(1, [consumer.tensor(SMALL)]).wait(0, Abort())
    if address.startswith("grpc"):
        assert isinstance(caught.value, MemberLostError) and address in str(caught.value)


class HalfPeer(peer_pb2_grpc.PeerServiceServicer):
    """A daemon that gives half of a large value, and no more."""

    def __init__(self) -> None:
        self.gave = threading.Event()
        self.ends = threading.Event()

    def Pull(self, request: peer_pb2.PullRequest, context: Any) -> Iterator[peer_pb2.PullResponse]:
        context.add_callback(self.ends.set)
        yield peer_pb2.PullResponse(size_bytes=LARGE.nbytes, data=b"\1" * (LARGE.nbytes // 2))
        self.gave.set()
        self.ends.wait(SECONDS)


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_source_that_breaks_off_in_the_middle_of_a_value_is_lost(
    consumer: ThreadDaemon, threads: ThreadPoolExecutor, kind: str
) -> None:
    if kind == "threads":
        consumer.exchange.use(BlockingPeers())
    half = HalfPeer()
    with ThreadPoolExecutor(2) as workers:
        server = grpc.server(workers)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(half, server)
        source = PeerSource(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", b"half")
        server.start()
        into = consumer.exchange.open(Partition((Arrival(0, EDGE, source),)))
        waiting = threads.submit(into.expect(1, [consumer.tensor(LARGE)]).wait, 0, Abort())
        assert half.gave.wait(SECONDS)
        server.stop(0).wait(SECONDS)
        half.ends.set()
        with pytest.raises(MemberLostError, match=source.address):
            waiting.result(SECONDS)


# A peer without manners


class RawPeer:
    """A stream of small values, and the other calls."""

    def __init__(self, channel: grpc.Channel, incarnation: bytes) -> None:
        self.stub = peer_pb2_grpc.PeerServiceStub(channel)
        self.incarnation = incarnation
        self._outgoing: SimpleQueue[peer_pb2.ExchangeRequest | None] = SimpleQueue()
        self.answers: Any = self.stub.Exchange(iter(self._outgoing.get, None), timeout=SECONDS)
        self.send(incarnation=incarnation)

    def send(self, **fields: Any) -> None:
        self._outgoing.put(peer_pb2.ExchangeRequest(**fields))

    def ask(self, number: int, edge: bytes, run: int, capability: bytes) -> None:
        ask = peer_pb2.Ask(number=number, edge=edge, run=run, capability=capability)
        self.send(asks=[ask])

    def answer(self) -> tuple[int, bytes | HeliographError]:
        """The next one."""
        (found,) = next(self.answers).answers
        return found.number, decode_error(found.error) if found.HasField("error") else found.data

    def pull(self, edge: bytes, run: int, capability: bytes, incarnation: bytes | None = None) -> bytes:
        """All bytes of a value. Raises the typed error of a refusal."""
        whom = self.incarnation if incarnation is None else incarnation
        request = peer_pb2.PullRequest(incarnation=whom, edge=edge, run=run, capability=capability)
        return refusal(lambda: b"".join(one.data for one in self.stub.Pull(request, timeout=SECONDS)))

    def push(self, target: peer_pb2.PushTarget, size_bytes: int, *pieces: tuple[int, bytes]) -> int:
        """Brings a value in pieces with their offsets. Raises the typed error of a refusal."""
        first = peer_pb2.PushRequest(size_bytes=size_bytes, target=target)
        rest = [
            peer_pb2.PushRequest(offset_bytes=at, size_bytes=size_bytes, data=data) for at, data in pieces
        ]
        return refusal(lambda: [*self.stub.Push(iter([first, *rest]), timeout=SECONDS)][-1].received_bytes)

    def close(self) -> None:
        self._outgoing.put(None)
        self.answers.cancel()


def refusal(call: Callable[[], Any]) -> Any:
    """What a call gives. Raises the typed error of a refusal."""
    try:
        return call()
    except grpc.RpcError as refused:
        error = error_from_metadata(tuple(refused.trailing_metadata() or ()))
        raise error or refused from None


@pytest.fixture
def raw(producer: ThreadDaemon) -> Iterator[RawPeer]:
    with grpc.insecure_channel(producer.url.removeprefix("grpc://")) as channel:
        made = RawPeer(channel, producer.host.incarnation)
        yield made
        made.close()


def test_capabilities_that_are_not_good_are_denied_in_the_same_words(
    producer: ThreadDaemon, raw: RawPeer
) -> None:
    other = Edge(b"o" * 16, b"x" * 32)
    ports = producer.exchange.open(Partition(departures=(Departure(0, EDGE), Departure(1, other))))
    for place in (0, 1):
        ports.offer(place, 2000, producer.tensor(SMALL, place), Abort())
    good = EDGE.capability(2000)
    tries = [
        (EDGE.name, 2000, b"forged..........."),
        (EDGE.name, 2000, other.capability(2000)),
        (EDGE.name, 2000, EDGE.capability(2001)),
        (other.name, 2000, good),
        (b"unknown edge....", 2000, good),
        (EDGE.name, 900, EDGE.capability(900)),
    ]
    said: set[str] = set()
    for number, one in enumerate(tries, 1):
        raw.ask(number, *one)
        found, error = raw.answer()
        assert found == number and isinstance(error, PermissionDeniedError)
        said.add(str(error))
        with pytest.raises(PermissionDeniedError) as caught:
            raw.pull(*one)
        said.add(str(caught.value))
    raw.ask(100, EDGE.name, 2000, good)
    assert raw.answer() == (100, bytes(SMALL.nbytes))
    raw.ask(101, EDGE.name, 2000, good)
    _, error = raw.answer()
    assert isinstance(error, PermissionDeniedError)
    assert {*said, str(error)} == {str(error)}
    assert producer.exchange.traffic.refused == 2 * len(tries) + 1


def test_a_number_that_is_in_use_ends_the_stream_and_what_it_asked_for_may_be_asked_for_anew(
    producer: ThreadDaemon, raw: RawPeer
) -> None:
    ports = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    for run in (1, 2):
        raw.ask(1, EDGE.name, run, EDGE.capability(run))
    with pytest.raises(ProtocolError, match="in use"):
        refusal(lambda: next(raw.answers))
    ports.offer(0, 1, producer.tensor(SMALL), Abort())
    found: list[OutgoingValue | HeliographError] = []
    producer.exchange.ask(EDGE.name, 1, EDGE.capability(1), found.append)
    assert isinstance(found[0], OutgoingValue) and found[0].whole is not None
    found[0].acknowledge(SMALL.nbytes)
    assert producer.exchange.budget.held_bytes == 0


def test_what_is_withdrawn_is_not_answered(producer: ThreadDaemon, raw: RawPeer) -> None:
    ports = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    raw.ask(1, EDGE.name, 1, EDGE.capability(1))
    raw.send(withdrawals=[1, 77])
    # Once this is answered, what was sent before has been taken.
    raw.ask(2, EDGE.name, 2, b"forged")
    assert raw.answer()[0] == 2
    raw.ask(1, EDGE.name, 2, EDGE.capability(2))
    ports.offer(0, 1, producer.tensor(SMALL), Abort())
    ports.offer(0, 2, producer.tensor(SMALL, 2), Abort())
    assert raw.answer() == (1, producer.tensor(SMALL, 2).array.tobytes())
    # It is held until the reader has said that it is there.
    assert producer.exchange.budget.held_bytes == SMALL.nbytes
    raw.send(received_answers=2)
    until(lambda: producer.exchange.budget.held_bytes == 0)


def test_a_value_that_is_pushed_with_gaps_or_of_another_size_fails_its_run(
    producer: ThreadDaemon, raw: RawPeer
) -> None:
    ports = producer.exchange.open(Partition((Arrival(0, EDGE),)))

    def target(run: int) -> peer_pb2.PushTarget:
        return peer_pb2.PushTarget(
            incarnation=raw.incarnation, edge=EDGE.name, run=run, capability=EDGE.capability(run)
        )

    bad: list[tuple[int, list[tuple[int, bytes]]]] = [
        (47, [(0, bytes(47))]),
        (48, [(8, bytes(40))]),
        (48, [(0, bytes(40)), (40, bytes(16))]),
        (2**60, []),
    ]
    for run, (size_bytes, pieces) in enumerate(bad, 1):
        incoming = ports.expect(run, [producer.tensor(SMALL)])
        with pytest.raises(ProtocolError):
            raw.push(target(run), size_bytes, *pieces)
        with pytest.raises(ProtocolError):
            incoming.wait(0, Abort())
    good = producer.tensor(SMALL)
    incoming = ports.expect(10, [good])
    assert raw.push(target(10), 48, (0, b"\1" * 40), (40, b"\1" * 8)) == 48
    incoming.wait(0, Abort())
    assert good.array.tobytes() == b"\1" * 48
    with pytest.raises(PermissionDeniedError):
        raw.push(target(10), 48, (0, bytes(48)))


def test_a_value_whose_push_broke_off_is_brought_by_another_attempt_from_where_it_is(
    producer: ThreadDaemon, raw: RawPeer
) -> None:
    ports = producer.exchange.open(Partition((Arrival(0, EDGE),)))
    tensor = producer.tensor(SMALL)
    incoming = ports.expect(1, [tensor])

    def target(attempt: int) -> peer_pb2.PushTarget:
        name = EDGE.name, 1, EDGE.capability(1)
        made = peer_pb2.PushTarget(incarnation=raw.incarnation, attempt=attempt, again=attempt > 1)
        made.edge, made.run, made.capability = name
        return made

    with pytest.raises(ProtocolError, match="byte 40 of 48"):
        raw.push(target(2), 48, (0, b"\1" * 40))
    for attempt in (1, 2):
        with pytest.raises(PermissionDeniedError):
            raw.push(target(attempt), 48)
    # Bytes that are there are not written again.
    assert raw.push(target(3), 48, (0, b"\2" * 40), (40, b"\2" * 8)) == 48
    incoming.wait(0, Abort())
    assert tensor.array.tobytes() == b"\1" * 40 + b"\2" * 8
    # Another one whose answer was lost finds all there.
    assert raw.push(target(4), 48) == 48


def test_whoever_means_another_daemon_is_told_so(producer: ThreadDaemon, raw: RawPeer) -> None:
    with pytest.raises(MemberLostError):
        raw.pull(EDGE.name, 1, EDGE.capability(1), b"another life")
    with pytest.raises(MemberLostError):
        raw.push(peer_pb2.PushTarget(incarnation=b"another life"), 1)
    stream: Any = raw.stub.Exchange(iter([peer_pb2.ExchangeRequest(incarnation=b"?")]), timeout=SECONDS)
    with pytest.raises(MemberLostError):
        refusal(lambda: next(stream))


def test_an_echo_is_bounded_and_a_probe_needs_a_session(producer: ThreadDaemon, raw: RawPeer) -> None:
    answer = raw.stub.Echo(peer_pb2.EchoRequest(payload=b"hello"))
    assert (answer.payload, answer.incarnation) == (b"hello", producer.host.incarnation)
    with pytest.raises(LimitExceededError):
        refusal(lambda: raw.stub.Echo(peer_pb2.EchoRequest(payload=bytes(2**20 + 1))))
    with pytest.raises(SessionClosedError):
        refusal(lambda: raw.stub.Probe(peer_pb2.ProbeRequest(session=b"?", address=producer.url)))


# Values that are brought, and relayed


@pytest.fixture(params=["threads", "loop"])
def peers(request: pytest.FixtureRequest) -> Iterator[ThreadDaemon]:
    """A third daemon, whose ways to others are of either kind."""
    with thread_daemon(LIMITS) as made:
        if request.param == "threads":
            made.exchange.use(BlockingPeers())
        yield made


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_value_is_brought_to_a_daemon_that_does_not_reach_its_maker(
    peers: ThreadDaemon, consumer: ThreadDaemon, type: TensorType
) -> None:
    out = peers.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    into = consumer.exchange.open(Partition((Arrival(0, EDGE),)))
    ended: SimpleQueue[HeliographError | None] = SimpleQueue()
    for run in (1, 2):
        source, target = numbered(peers, type), consumer.tensor(type)
        peers.exchange.forward(EDGE, run, consumer.source, ended.put)
        incoming = into.expect(run, [target])
        out.offer(0, run, source, Abort())
        incoming.wait(0, Abort())
        assert ended.get(timeout=SECONDS) is None
        assert np.array_equal(target.array, source.array)
    assert peers.exchange.traffic.sent_bytes == consumer.exchange.traffic.received_bytes == 2 * type.nbytes
    out.close()
    into.close()


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_value_is_relayed_between_daemons(
    producer: ThreadDaemon, peers: ThreadDaemon, consumer: ThreadDaemon, type: TensorType
) -> None:
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    into = consumer.exchange.open(Partition((Arrival(0, EDGE),)))
    ended: SimpleQueue[HeliographError | None] = SimpleQueue()
    source, target = numbered(producer, type), consumer.tensor(type)
    incoming = into.expect(1, [target])
    peers.exchange.relay(EDGE, 1, type.nbytes, producer.source, consumer.source, ended.put)
    out.offer(0, 1, source, Abort())
    incoming.wait(0, Abort())
    assert ended.get(timeout=SECONDS) is None
    assert np.array_equal(target.array, source.array)
    relayed = peers.exchange.traffic
    assert (relayed.relayed_bytes, relayed.relayed_values) == (type.nbytes, 1)
    # One that fails at its source, and one that nobody waits for any more.
    peers.exchange.relay(EDGE, 2, type.nbytes, producer.source, consumer.source, ended.put)
    out.end(2, ComputeFailedError("it burst"))
    assert isinstance(ended.get(timeout=SECONDS), ComputeFailedError)
    peers.exchange.relay(EDGE, 3, type.nbytes, producer.source, consumer.source, ended.put)()
    assert isinstance(ended.get(timeout=SECONDS), CancelledError)
    out.close()
    into.close()


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_ways_on_threads_pull_too_and_tell_of_losses(
    producer: ThreadDaemon, peers: ThreadDaemon, threads: ThreadPoolExecutor, type: TensorType
) -> None:
    out, into = ends(producer, peers)
    target = peers.tensor(type)
    waiting = threads.submit(into.expect(1, [target]).wait, 0, Abort())
    out.offer(0, 1, producer.tensor(type, 3), Abort())
    waiting.result(SECONDS)
    assert (target.array == 3).all()
    into.expect(2, [target]).close()
    waiting = threads.submit(into.expect(3, [target]).wait, 0, Abort())
    producer.stop()
    with pytest.raises((MemberLostError, CancelledError)):
        waiting.result(SECONDS)
    with pytest.raises(MemberLostError):
        into.expect(4, [target]).wait(0, Abort())


def test_a_way_on_threads_that_broke_is_not_kept_though_only_large_values_went_there(
    producer: ThreadDaemon,
) -> None:
    peers = BlockingPeers()
    target = producer.tensor(LARGE)
    source = producer.source
    producer.stop()
    landing = IncomingValue(Arrival(0, EDGE, source), 1, target)
    peers.pull(source, [landing])
    with pytest.raises(MemberLostError):
        landing.wait(Abort())
    ended: SimpleQueue[HeliographError | None] = SimpleQueue()
    peers.push(source, EDGE, 2, OutgoingValue(LARGE.nbytes), ended.put)
    assert isinstance(ended.get(timeout=SECONDS), MemberLostError)
    peers.close()
    assert repr(peers) == "<BlockingPeers 0 links>"


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_request_that_comes_to_a_link_as_it_ends_goes_by_another_one(
    producer: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, type: TensorType
) -> None:
    peers, ended = BlockingPeers(), list[BlockingLink]()
    link_of = BlockingPeers._link

    def as_it_ends(peers: BlockingPeers, source: PeerSource) -> BlockingLink:
        link = link_of(peers, source)
        if not ended:
            ended.append(link)
            link.end(MemberLostError("the connection broke while nothing waited"))
        return link

    monkeypatch.setattr(BlockingPeers, "_link", as_it_ends)
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    landing = IncomingValue(Arrival(0, EDGE, producer.source), 1, target := producer.tensor(type))
    peers.pull(producer.source, [landing])
    out.offer(0, 1, source := numbered(producer, type), Abort())
    landing.wait(Abort())
    assert np.array_equal(target.array, source.array)
    peers.close()
    out.close()


def test_a_large_value_that_is_forgotten_before_its_call_is_made_is_not_asked_for(
    producer: ThreadDaemon, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Callable[[], None]] = []
    monkeypatch.setattr(BlockingLink, "_start", lambda link, work: works.append(work))
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    peers = BlockingPeers()
    landing = IncomingValue(Arrival(0, EDGE, producer.source), 1, producer.tensor(LARGE))
    peers.pull(producer.source, [landing])
    landing.close()
    peers.forget(producer.source, [landing])
    # The thread that was to pull it begins only now.
    threads.submit(works[0]).result(SECONDS)
    out.close()
    peers.close()


def test_a_way_that_ends_before_large_values_have_begun_tells_whoever_waits(consumer: ThreadDaemon) -> None:
    source = PeerSource("grpc://127.0.0.1:1", b"")
    landing = IncomingValue(Arrival(0, EDGE, source), 1, consumer.tensor(LARGE))
    value, told = OutgoingValue(LARGE.nbytes), list[HeliographError | None]()

    async def end_at_once() -> None:
        with ThreadPoolExecutor(1) as movers:
            peers = LoopPeers(asyncio.get_running_loop(), movers)
            peers.pull(source, [landing])
            peers.push(source, EDGE, 2, value, told.append)
            await peers.closed()

    asyncio.run(end_at_once())
    assert isinstance(landing.error, CancelledError)
    assert [type(one) for one in told] == [CancelledError] and value.is_dropped


class Starting(peer_pb2_grpc.PeerServiceServicer):
    """A daemon that has no devices yet."""

    def Pull(self, request: peer_pb2.PullRequest, context: Any) -> Iterator[peer_pb2.PullResponse]:
        error = UnavailableError("the server is starting its devices")
        context.abort_with_status(_Refused(error.message, error_to_metadata(error)))
        yield from ()

    def Exchange(self, requests: Any, context: Any) -> Iterator[Any]:
        next(requests)
        yield from self.Pull(requests, context)


class _Refused(grpc.Status):  # type: ignore[misc]
    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, details: str, metadata: Any) -> None:
        self.details, self.trailing_metadata = details, metadata


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_source_that_is_starting_anew_is_lost_and_not_the_one_who_asks_it(
    consumer: ThreadDaemon, type: TensorType
) -> None:
    with ThreadPoolExecutor(2) as workers:
        server = grpc.server(workers)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(Starting(), server)
        source = PeerSource(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", b"before")
        server.start()
        into = consumer.exchange.open(Partition((Arrival(0, EDGE, source),)))
        with pytest.raises(MemberLostError, match=source.address):
            into.expect(1, [consumer.tensor(type)]).wait(0, Abort())
        into.close()
        server.stop(0).wait(SECONDS)
