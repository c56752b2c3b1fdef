"""Values that a daemon pulls from another one while their connection is cut: the real requests, ledger,
values and redialling. Messages of a connection that was cut may still reach the producer, late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from heliograph_proto.codec import encode_error
from heliograph_proto.codec.bulk import decode_download, encode_download
from heliograph_proto.errors import ComputeFailedError, HeliographError
from heliograph_proto.plans import EDGE_BYTES, SECRET_BYTES, Edge, PeerSource
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.ledger import KEPT_RUNS, Disposition, EdgeRefusal, Ledger, Superseded, ended
from heliograph_server.exchange.outgoing import GivenAnswers, OutgoingValue
from heliograph_server.links import requests as link_requests
from heliograph_server.links.redialling import Redialling
from heliograph_server.links.requests import Asked, LinkRequests
from simulation.world import Wire, World, hold

SOURCE = PeerSource("grpc://producer:1", b"i" * 16)
PIECES, PIECE_BYTES, SMALL_BYTES = 4, 10, 8
LEASE_SECONDS = 30.0

Waiter = Callable[[OutgoingValue | HeliographError], None]


@dataclass(eq=False)
class SimulatedSink:
    """The place of one value at the consumer."""

    edge: Edge
    run: int
    size_bytes: int
    is_awaited: bool
    is_quick: bool = True
    data: bytearray = field(default_factory=bytearray)
    error: HeliographError | None = None
    is_forgotten: bool = False
    ends: int = 0

    @property
    def received_bytes(self) -> int:
        return len(self.data)

    def ready(self, wake: Callable[[], None]) -> bool:
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        hold(offset_bytes == len(self.data), f"{self} gets byte {offset_bytes}")
        self.data += data
        return not self.is_forgotten

    def finish(self) -> None:
        hold(len(self.data) == self.size_bytes, f"{self} ends before it is whole")
        self.ends += 1

    def fail(self, error: HeliographError) -> None:
        self.error = error
        self.ends += 1


class Connection:
    """One connection: a stream of small values, and calls. The consumer's messages are in order."""

    def __init__(self, world: World) -> None:
        self.up, self.down = Wire(world, 0.2), Wire(world, 0.2)
        self.is_cut = False
        self.is_begun = False
        self.given = GivenAnswers()
        self.attempt = 0
        #: Requests that the producer withdraws when it finds the connection gone.
        self.waiting: list[Callable[[], None]] = []


class SimulatedValues:
    """A producer that makes values run by run, and a consumer that asks for them."""

    def __init__(self, seed: int, runs: int = 30) -> None:
        self.world = World(seed)
        chance = self.world.random
        self._edges = {
            size: Edge(bytes([size]) * EDGE_BYTES, chance.randbytes(SECRET_BYTES))
            for size in (SMALL_BYTES, PIECES * PIECE_BYTES)
        }
        self._ledgers = {one.name: Ledger[OutgoingValue, Waiter](one) for one in self._edges.values()}
        self._requests = LinkRequests(SOURCE, self._next_attempt)
        self._attempts = count(1)
        self._redialling = Redialling(LEASE_SECONDS, chance.random)
        self._connection = Connection(self.world)
        self._sinks: list[SimulatedSink] = []
        self._values: dict[tuple[int, int], OutgoingValue] = {}
        self._held_bytes = 0
        self._failed: set[int] = set()
        self._owes = False
        for run in range(1, runs + 1):
            self.world.after(run * 0.2 + chance.random() * 0.3, partial(self._produce, run))
            for size in self._edges:
                self.world.after(run * 0.2 + chance.random() * 0.3, partial(self._want, size, run))
        for _ in range(chance.randrange(12)):
            self.world.after(chance.random() * runs * 0.25, self._cut)
        self._runs = runs

    def run(self) -> int:
        """Run the schedule to its end. Returns the number of events. Raises Violation."""
        events = self.world.run(lambda: hold(self._held_bytes >= 0, "bytes are given back twice"))
        for one in self._sinks:
            made = self._content(one.size_bytes, one.run)
            is_there = one.error is None and one.data == made and one.ends == 1
            has_failed = one.run in self._failed and one.ends == 1
            hold(one.is_forgotten or is_there or has_failed, f"{one} did not get its value")
            value = self._values.get((one.size_bytes, one.run))
            if one.is_awaited and is_there and one.run not in self._failed and not one.is_forgotten:
                hold(value is not None and value.is_taken, f"nobody told the producer of {one}")
        hold(not self._requests.waiting, f"{self._requests} at the end")
        left = sum(not (one.is_taken or one.is_dropped) for one in self._values.values())
        hold(left <= 2 * (KEPT_RUNS + 1), f"{left} values are held at the end")
        for ledger in self._ledgers.values():
            for value in ledger.close()[1]:
                value.drop()
        hold(self._held_bytes == 0, f"{self._held_bytes} bytes are held at the end")
        return events

    @staticmethod
    def _content(size: int, run: int) -> bytes:
        return bytes((run + at) % 256 for at in range(size))

    def _next_attempt(self) -> int:
        return next(self._attempts)

    def _free(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes

    # The producer

    def _produce(self, run: int) -> None:
        if self.world.chance(0.05):
            self._failed.add(run)
            self._end(run, ComputeFailedError("burnt"))
            return
        for size, edge in self._edges.items():
            data, is_small = self._content(size, run), size == SMALL_BYTES
            value = OutgoingValue.of(data, self._free) if is_small else OutgoingValue(size, self._free)
            self._held_bytes += size
            self._values[size, run] = value
            ledger = self._ledgers[edge.name]
            waiter = ledger.give(run, value)
            for old in ledger.expired()[1]:
                old.drop()
            if waiter is Disposition.REFUSED:
                value.drop()
            elif callable(waiter):
                waiter(value)
            if not is_small:
                self._put(value, data, 0)
        self.world.soon(partial(self._end, run, None))

    def _put(self, value: OutgoingValue, data: bytes, at: int) -> None:
        part = memoryview(data)[at : at + PIECE_BYTES]
        value.put(encode_download(at, len(data), part), part.nbytes)
        if at + PIECE_BYTES < len(data):
            self.world.soon(partial(self._put, value, data, at + PIECE_BYTES), 0.1)

    def _end(self, run: int, error: HeliographError | None) -> None:
        for ledger in self._ledgers.values():
            found = ledger.end(run, error, keeps=True)
            if isinstance(found, OutgoingValue):
                found.drop()
            elif found is not None:
                found(ended(error))

    def _show(self, edge: bytes, run: int, capability: bytes, waiter: Waiter, attempt: int) -> None:
        found = self._ledgers[edge].show(run, capability, waiter, attempt)
        if isinstance(found, Superseded):
            found.earlier(ComputeFailedError("superseded"))
        elif isinstance(found, EdgeRefusal):
            waiter(found.error)
        elif found is not None:
            waiter(found)

    def _take(self, connection: Connection, data: bytes) -> None:
        """A message of the stream reaches the producer."""
        request = peer_pb2.ExchangeRequest.FromString(data)
        if request.incarnation:
            connection.attempt = request.attempt
        connection.given.received(request.received_answers)
        for one in request.receipts:
            ledger = self._ledgers[one.edge]
            if (value := ledger.matched(one.run, one.capability)) is not None:
                value.acknowledge(one.received_bytes)
            gone = ledger.abandon(one.run, one.capability) if one.unneeded else None
            if isinstance(gone, OutgoingValue):
                gone.drop()
            if one.number:
                self._answer(connection, one.number, None)
        for ask in request.asks:
            waiter = partial(self._answer, connection, ask.number)
            withdraw = partial(self._ledgers[ask.edge].withdraw, ask.run, waiter, again=True)
            connection.waiting.append(withdraw)
            self._show(ask.edge, ask.run, ask.capability, waiter, connection.attempt)

    def _answer(
        self, connection: Connection, number: int, found: OutgoingValue | HeliographError | None
    ) -> None:
        answer = peer_pb2.Answer(number=number, data=b"")
        is_value = isinstance(found, OutgoingValue)
        if isinstance(found, OutgoingValue):
            if found.whole is None:
                answer.error.CopyFrom(encode_error(ComputeFailedError("it is gone")))
            else:
                answer.data = found.whole
        elif found is not None:
            answer.error.CopyFrom(encode_error(found))
        connection.given.add(found if is_value else None)  # type: ignore[arg-type]
        message = peer_pb2.ExchangeResponse(answers=[answer]).SerializeToString()
        connection.down.send(partial(self._receive, connection, message))

    def _pulled(self, connection: Connection, sink: SimulatedSink, offset: int, attempt: int) -> None:
        """The call for a large value reaches the producer."""

        def answer(found: OutgoingValue | HeliographError) -> None:
            if isinstance(found, HeliographError):
                connection.down.send(partial(self._failed_call, connection, sink, found))
            else:
                found.acknowledge(offset)
                self._send(connection, sink, found, offset)

        edge = sink.edge
        connection.waiting.append(partial(self._ledgers[edge.name].withdraw, sink.run, answer, again=True))
        self._show(edge.name, sink.run, edge.capability(sink.run), answer, attempt)

    def _send(self, connection: Connection, sink: SimulatedSink, value: OutgoingValue, at: int) -> None:
        """Send the pieces of a large value that are there, from an offset on."""
        if connection.is_cut:
            return
        try:
            piece = value.piece(at, partial(self._send, connection, sink, value, at))
        except HeliographError as error:
            connection.down.send(partial(self._failed_call, connection, sink, error))
            return
        if piece is not None:
            connection.down.send(partial(self._land, connection, sink, piece.message))
            if at + piece.size_bytes < value.size_bytes:
                self._send(connection, sink, value, at + piece.size_bytes)

    # The connection

    def _cut(self) -> None:
        connection = self._connection
        if connection.is_cut:
            return
        connection.is_cut = connection.down.is_cut = True
        # What has left may still arrive, even after what the next connection brings.
        connection.up.is_cut = self.world.chance(0.5)
        self.world.soon(partial(self._broke, connection), 0.5)
        self.world.soon(partial(self._noticed, connection), 3.0)

    def _noticed(self, connection: Connection) -> None:
        """The producer finds a connection gone."""
        for withdraw in connection.waiting:
            withdraw()

    def _broke(self, connection: Connection) -> None:
        if connection is self._connection:
            self._requests.broke()
            self._dial_after(self._redialling.broke(self.world.now))

    def _dial_after(self, pause: float | None) -> None:
        hold(pause is not None, "the producer counts as lost before the lease's end")
        self.world.after(pause or 0.0, self._dial)

    def _dial(self) -> None:
        if self.world.chance(0.3):
            self._dial_after(self._redialling.broke(self.world.now))
            return
        self._connection = Connection(self.world)
        self._redialling.back(self.world.now)
        for one in self._sinks:
            if one.size_bytes != SMALL_BYTES and not one.ends and not one.is_forgotten:
                self._pull(one)
        self._flush()

    # The consumer

    def _want(self, size: int, run: int) -> None:
        sink = SimulatedSink(self._edges[size], run, size, is_awaited=self.world.chance(0.2))
        self._sinks.append(sink)
        if size == SMALL_BYTES:
            self._requests.ask(sink)
        elif not self._redialling.is_away:
            self._pull(sink)
        if self.world.chance(0.05):
            self.world.soon(partial(self._forget, sink))
        self._flush()

    def _forget(self, sink: SimulatedSink) -> None:
        if sink.ends:
            return
        sink.is_forgotten = True
        if sink.size_bytes == SMALL_BYTES:
            self._requests.withdraw(sink)
        else:
            self._requests.unneeded(sink)
        self._flush()

    def _flush(self) -> None:
        if self._redialling.is_away or not self._requests.is_ready:
            return
        connection = self._connection
        if not connection.is_begun:
            connection.is_begun = True
            self._requests.begin()
        while self._requests.is_ready:
            connection.up.send(partial(self._take, connection, self._requests.next()))

    def _owe(self) -> None:
        self._redialling.progressed()
        self._flush()
        if self._requests.owes_receipts and not self._owes:
            self._owes = True
            self.world.after(link_requests.RECEIPT_SECONDS, self._tell)

    def _tell(self) -> None:
        self._owes = False
        self._requests.be_due()
        self._flush()

    def _receive(self, connection: Connection, data: bytes) -> None:
        """A message of the stream reaches the consumer."""
        for answered in self._requests.answered(peer_pb2.ExchangeResponse.FromString(data)):
            if not isinstance(answered.waiting, Asked):
                continue
            sink = answered.waiting.sink
            if answered.error is not None:
                sink.fail(answered.error)
            elif sink.write(0, memoryview(answered.data)):
                sink.finish()
        self._owe()

    def _pull(self, sink: SimulatedSink) -> None:
        if sink.received_bytes >= sink.size_bytes:
            sink.finish()
            return
        connection, attempt = self._connection, self._next_attempt()
        pulled = partial(self._pulled, connection, sink, sink.received_bytes, attempt)
        # A call of its own, in no order with the others.
        Wire.send(Wire(self.world, 0.2), lambda: None if connection.up.is_cut else pulled())

    def _land(self, connection: Connection, sink: SimulatedSink, message: bytes) -> None:
        piece = decode_download(message)
        if sink.is_forgotten or sink.ends or not sink.write(piece.offset_bytes, piece.data):
            return
        self._requests.received(sink, piece.data.nbytes)
        if sink.received_bytes >= sink.size_bytes:
            sink.finish()
        self._owe()

    def _failed_call(self, connection: Connection, sink: SimulatedSink, error: HeliographError) -> None:
        if not (sink.ends or sink.is_forgotten):
            sink.fail(error)
            self._requests.unneeded(sink)
            self._flush()
