"""The requests of one link, and what is sent again after a break. Pure: bytes out, answers in.

Small values that are asked for or brought wait under a number until they are answered. With another
stream all that wait are sent again, under their numbers and a larger attempt. Receipts ride with
other requests; by themselves they go only once many bytes have come, after a while, or where the
other daemon waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from heliograph_proto.codec import decode_error
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import Edge, PeerSource
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.incoming import Done, Sink
from heliograph_server.exchange.outgoing import OutgoingValue
from heliograph_server.links.links import ASK_BYTES, MESSAGE_BYTES

#: Receipts of so many bytes are sent at once, others after so long at the latest.
RECEIPT_BYTES = 4 * 2**20
RECEIPT_SECONDS = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A small value that was asked for."""

    sink: Sink


@dataclass(frozen=True, slots=True, eq=False)
class Brought:
    """A small value for the other daemon."""

    edge: Edge
    run: int
    value: OutgoingValue
    data: bytes
    done: Done

    def settle(self, error: HeliographError | None) -> None:
        """Note that the value is at its place, or the error."""
        if error is None:
            self.value.acknowledge(len(self.data))
        else:
            self.value.drop()
        self.done(error)


@dataclass(slots=True, eq=False)
class Receipt:
    """The bytes of a value that arrived. Waits for an answer if the other daemon waits for the
    receipt."""

    edge: Edge
    run: int
    received_bytes: int = 0
    is_unneeded: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to one that waited: the bytes of a value that was asked for, or an error."""

    waiting: Asked | Brought | Receipt
    data: bytes
    error: HeliographError | None


@dataclass(slots=True)
class _Message:
    request: peer_pb2.ExchangeRequest = field(default_factory=peer_pb2.ExchangeRequest)
    size_bytes: int = 0


class LinkRequests:
    """The requests of one link. The caller holds a lock, or is on one loop."""

    def __init__(self, source: PeerSource, next_attempt: Callable[[], int]) -> None:
        """`next_attempt` returns ever larger numbers, also after the end of the link."""
        self._source = source
        self._next_attempt = next_attempt
        #: Those that wait for an answer, by number.
        self.waiting: dict[int, Asked | Brought | Receipt] = {}
        self._number_of: dict[Sink, int] = {}
        self._number = 0
        self._attempt = 0
        self._messages = deque([_Message()])
        #: By edge and run: receipts that were not sent yet and need no answer.
        self._receipts: dict[tuple[bytes, int], Receipt] = {}
        #: Answers of this stream, and those that the other daemon was told of.
        self._answers = self._told_answers = 0
        self._untold_bytes = 0
        self._is_due = False

    def __repr__(self) -> str:
        return f"<LinkRequests {len(self.waiting)} waiting, attempt {self._attempt}>"

    # Wishes

    def ask(self, sink: Sink) -> None:
        """Ask for a small value."""
        self._number_of[sink] = self._add(Asked(sink))

    def bring(self, edge: Edge, run: int, value: OutgoingValue, data: bytes, done: Done) -> None:
        """Bring a small value, of which `data` is all."""
        self._add(Brought(edge, run, value, data, done))

    def withdraw(self, sink: Sink) -> bool:
        """Withdraw the request for a small value. Return True if it waited."""
        number = self._number_of.pop(sink, 0)
        if self.waiting.pop(number, None) is None:
            return False
        if self._attempt:
            self._messages[-1].request.withdrawals.append(number)
        else:
            self.unneeded(sink)
        return True

    def received(self, sink: Sink, size_bytes: int) -> None:
        """Note that so many more bytes of a value arrived."""
        is_whole = sink.received_bytes >= sink.size_bytes
        if sink.is_awaited and is_whole:
            self._add(Receipt(sink.edge, sink.run, sink.size_bytes))
        else:
            self._receipt(sink).received_bytes = sink.received_bytes
            self._note(size_bytes)

    def unneeded(self, sink: Sink) -> None:
        """Note that a value is not needed any more, whether or not it was asked for."""
        self._receipt(sink).is_unneeded = True
        self._is_due = True

    def _receipt(self, sink: Sink) -> Receipt:
        return self._receipts.setdefault((sink.edge.name, sink.run), Receipt(sink.edge, sink.run))

    def _note(self, size_bytes: int) -> None:
        self._untold_bytes += size_bytes
        self._is_due = self._is_due or self._untold_bytes >= RECEIPT_BYTES

    def _add(self, one: Asked | Brought | Receipt) -> int:
        self._number += 1
        self.waiting[self._number] = one
        if self._attempt:
            self._put(self._number, one)
        return self._number

    def _put(self, number: int, one: Asked | Brought | Receipt) -> None:
        """Add one to the messages. A full one is followed by another."""
        message = self._messages[-1]
        size_bytes, request = ASK_BYTES, message.request
        match one:
            case Asked(sink):
                edge, run = sink.edge, sink.run
                request.asks.add(number=number, edge=edge.name, run=run, capability=edge.capability(run))
            case Brought(edge, run):
                capability = edge.capability(run)
                request.brings.add(
                    number=number, edge=edge.name, run=run, capability=capability, data=one.data
                )
                size_bytes += len(one.data)
            case Receipt():
                _add_receipt(request, one, number)
        message.size_bytes += size_bytes
        if message.size_bytes >= MESSAGE_BYTES:
            self._messages.append(_Message())

    # Messages

    @property
    def owes_receipts(self) -> bool:
        """True if the other daemon was not told of everything that arrived."""
        return bool(self._receipts) or self._told_answers != self._answers

    @property
    def is_ready(self) -> bool:
        """True if there is a message to send."""
        if not self._attempt:
            return bool(self.waiting) or self._is_due
        request = self._messages[0].request
        return bool(
            len(self._messages) > 1 or self._is_due
            or request.asks or request.brings or request.withdrawals or request.receipts
        )  # fmt: skip

    def be_due(self) -> None:
        """Have receipts sent that no other request carries."""
        self._is_due = self._is_due or self.owes_receipts

    def begin(self) -> None:
        """Begin a stream: all that waits is sent, perhaps again."""
        self._attempt = self._next_attempt()
        self._answers = self._told_answers = 0
        self._messages = deque([_Message()])
        first = self._messages[0].request
        first.incarnation, first.attempt = self._source.incarnation, self._attempt
        for number, one in self.waiting.items():
            self._put(number, one)

    def next(self) -> bytes:
        """The next message."""
        request = self._messages.popleft().request
        if not self._messages:
            self._messages.append(_Message())
        if self._told_answers != self._answers:
            request.received_answers = self._told_answers = self._answers
        for one in self._receipts.values():
            _add_receipt(request, one)
        self._receipts.clear()
        self._untold_bytes, self._is_due = 0, False
        return request.SerializeToString()

    def answered(self, response: peer_pb2.ExchangeResponse) -> list[Answered]:
        """Take a message of answers."""
        found: list[Answered] = []
        for answer in response.answers:
            self._answers += 1
            one = self.waiting.pop(answer.number, None)
            if one is None:
                continue
            if isinstance(one, Asked):
                self._number_of.pop(one.sink, None)
                self._settle(one.sink, len(answer.data), has_failed=answer.HasField("error"))
            error = decode_error(answer.error) if answer.HasField("error") else None
            found.append(Answered(one, answer.data, error))
        return found

    def _settle(self, sink: Sink, size_bytes: int, *, has_failed: bool) -> None:
        if sink.is_awaited and not has_failed:
            self._add(Receipt(sink.edge, sink.run, sink.size_bytes))
        else:
            self._note(size_bytes)

    def broke(self) -> None:
        """Note that the stream has ended. All that waits goes with the next one."""
        self._attempt = 0
        self._messages = deque([_Message()])
        self._is_due = bool(self._receipts)

    def end(self) -> list[Asked | Brought | Receipt]:
        """Give everything up. Return those that waited."""
        waiting, self.waiting = list(self.waiting.values()), {}
        self._number_of.clear()
        return waiting


def _add_receipt(request: peer_pb2.ExchangeRequest, one: Receipt, number: int = 0) -> None:
    request.receipts.add(
        edge=one.edge.name,
        run=one.run,
        capability=one.edge.capability(one.run),
        received_bytes=one.received_bytes,
        unneeded=one.is_unneeded,
        number=number,
    )
