"""The pure parts of links between daemons: requests that go again, receipts, and when to dial."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from heliograph_proto.codec.bulk import decode_download, encode_download
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    PermissionDeniedError,
    ProtocolError,
)
from heliograph_proto.plans import Edge, PeerSource
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.ledger import KEPT_RUNS, Disposition, EdgeRefusal, Ledger, Superseded
from heliograph_server.exchange.outgoing import MOST_GIVEN, GivenAnswers, OutgoingValue
from heliograph_server.links.redialling import Redialling
from heliograph_server.links.requests import RECEIPT_BYTES, Asked, LinkRequests

EDGE = Edge(b"e" * 16, b"s" * 32)
SOURCE = PeerSource("grpc://a:7070", b"a" * 16)


class Place:
    """A sink of one value, of which some bytes are there."""

    is_quick = True

    def __init__(self, run: int, size_bytes: int = 8, *, is_awaited: bool = False) -> None:
        self.edge, self.run, self.size_bytes, self.is_awaited = EDGE, run, size_bytes, is_awaited
        self.received_bytes = 0

    def ready(self, wake: object) -> bool:
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        return True

    def finish(self) -> None: ...

    def fail(self, error: HeliographError) -> None: ...


def requests() -> LinkRequests:
    attempts = count(1)
    return LinkRequests(SOURCE, lambda: next(attempts))


def sent(link: LinkRequests) -> peer_pb2.ExchangeRequest:
    assert link.is_ready
    return peer_pb2.ExchangeRequest.FromString(link.next())


def answers(*pairs: tuple[int, bytes]) -> peer_pb2.ExchangeResponse:
    made = [peer_pb2.Answer(number=number, data=data) for number, data in pairs]
    return peer_pb2.ExchangeResponse(answers=made)


# Requests


def test_what_waits_goes_again_with_another_stream_and_what_was_answered_does_not() -> None:
    link = requests()
    places = [Place(run) for run in (1, 2, 3)]
    for one in places:
        link.ask(one)
    link.begin()
    first = sent(link)
    assert (first.incarnation, first.attempt) == (SOURCE.incarnation, 1)
    assert [ask.run for ask in first.asks] == [1, 2, 3]
    (found,) = link.answered(answers((2, b"x" * 8)))
    assert isinstance(found.waiting, Asked) and found.waiting.sink is places[1] and found.error is None
    link.broke()
    link.ask(Place(4))
    link.begin()
    again = sent(link)
    assert (again.attempt, [(ask.number, ask.run) for ask in again.asks]) == (2, [(1, 1), (3, 3), (4, 4)])
    assert not link.is_ready


def test_what_is_withdrawn_while_there_is_no_stream_is_told_with_the_next_one() -> None:
    link = requests()
    one, other = Place(1), Place(2)
    link.ask(one)
    link.ask(other)
    link.begin()
    sent(link)
    link.broke()
    assert link.withdraw(one) and not link.withdraw(one)
    link.begin()
    found = sent(link)
    assert [ask.run for ask in found.asks] == [2]
    assert [(receipt.run, receipt.unneeded) for receipt in found.receipts] == [(1, True)]


def test_receipts_ride_with_requests_and_go_alone_only_when_they_are_due() -> None:
    link = requests()
    link.ask(Place(1))
    link.begin()
    sent(link)
    link.answered(answers((1, b"x" * 8)))
    assert not link.is_ready and link.owes_receipts
    link.ask(Place(2))
    assert sent(link).received_answers == 1 and not link.owes_receipts
    link.answered(answers((2, b"x" * 8)))
    link.be_due()
    assert sent(link).received_answers == 2
    large = Place(3, 2 * RECEIPT_BYTES)
    large.received_bytes = RECEIPT_BYTES
    link.received(large, RECEIPT_BYTES)
    (receipt,) = sent(link).receipts
    assert (receipt.run, receipt.received_bytes, receipt.number) == (3, RECEIPT_BYTES, 0)
    link.be_due()
    assert not link.is_ready


def test_a_receipt_that_the_other_daemon_waits_for_goes_at_once_and_until_it_is_answered() -> None:
    link = requests()
    awaited = Place(1, is_awaited=True)
    link.ask(awaited)
    link.begin()
    sent(link)
    link.answered(answers((1, b"x" * 8)))
    for _ in range(2):
        (receipt,) = sent(link).receipts
        assert (receipt.run, receipt.received_bytes, receipt.number) == (1, 8, 2)
        link.broke()
        link.begin()
    sent(link)
    link.answered(answers((2, b"")))
    assert not link.waiting


# Values


def pieces(value: OutgoingValue, offset_bytes: int = 0) -> bytes:
    data = b""
    while offset_bytes < value.size_bytes and (piece := value.piece(offset_bytes, lambda: None)) is not None:
        data += decode_download(piece.message).data
        offset_bytes += piece.size_bytes
    return data


def in_pieces(data: bytes, freed: Any) -> OutgoingValue:
    value = OutgoingValue(len(data), freed)
    for at in range(0, len(data), 4):
        value.put(encode_download(at, len(data), data[at : at + 4]), 4)
    return value


def test_a_value_is_read_from_any_piece_on_until_that_is_acknowledged() -> None:
    freed: list[int] = []
    value = in_pieces(b"abcdefghijkl", freed.append)
    assert (pieces(value), pieces(value), pieces(value, 4)) == (b"abcdefghijkl", b"abcdefghijkl", b"efghijkl")
    value.acknowledge(4)
    value.acknowledge(6)
    assert sum(freed) == 4 and pieces(value, 4) == b"efghijkl"
    for offset in (0, 5):
        with pytest.raises(ProtocolError):
            value.piece(offset, lambda: None)
    value.acknowledge(12)
    assert value.is_taken and sum(freed) == 12
    value.drop()
    assert sum(freed) == 12
    with pytest.raises(CancelledError):
        value.piece(0, lambda: None)


def test_answers_that_were_received_let_their_values_go_in_order() -> None:
    given, values = GivenAnswers(), [OutgoingValue.of(bytes(size)) for size in (1, 2, 4)]
    for one in (values[0], None, values[1], values[2]):
        given.add(one)
    assert given.received(2) == [values[0]]
    assert given.received(1) == []
    assert given.received(100) == values[1:]


def test_answers_without_a_receipt_are_bounded() -> None:
    given = GivenAnswers()
    for _ in range(MOST_GIVEN + 5):
        given.add(OutgoingValue.of(b"x"))
    assert (len(given.received(6)), repr(given)) == (
        1,
        f"<GivenAnswers 6 received, {MOST_GIVEN - 1} under way>",
    )


# Attempts


class Asker:
    """Its method is another object each time it is named."""

    def answer(self, found: object) -> None:
        raise AssertionError


def test_a_waiter_is_withdrawn_whichever_way_it_is_named() -> None:
    ledger: Ledger[Callable[[object], None], str] = Ledger(EDGE)
    one, other = Asker(), Asker()
    assert ledger.show(1, EDGE.capability(1), one.answer, 1) is None
    assert not ledger.withdraw(1, other.answer, again=True)
    assert ledger.withdraw(1, one.answer, again=True)
    assert ledger.show(1, EDGE.capability(1), other.answer, 1) is None


def test_a_larger_attempt_takes_the_place_of_an_earlier_one_and_gets_the_same() -> None:
    ledger: Ledger[str, str] = Ledger(EDGE)
    capability = EDGE.capability(1)
    assert ledger.show(1, capability, "first", 1) is None
    assert ledger.show(1, capability, "second", 2) == Superseded("first")
    late = ledger.show(1, capability, "late", 1)
    assert isinstance(late, EdgeRefusal) and isinstance(late.error, PermissionDeniedError)
    assert not ledger.withdraw(1, "first", again=True)
    assert ledger.give(1, "value") == "second"
    assert isinstance(ledger.show(1, capability, "again", 2), EdgeRefusal)
    assert ledger.show(1, capability, "third", 3) == "value"
    assert ledger.matched(1, capability) == "value" and ledger.matched(1, b"forged") is None


def test_the_error_of_a_run_is_told_again() -> None:
    ledger: Ledger[str, str] = Ledger(EDGE)
    burst = ComputeFailedError("it burst")
    assert ledger.show(1, EDGE.capability(1), "first", 1) is None
    assert ledger.end(1, burst, keeps=True) == "first"
    for attempt in (2, 3):
        found = ledger.show(1, EDGE.capability(1), "again", attempt)
        assert isinstance(found, EdgeRefusal) and found.error is burst


def test_a_value_without_a_receipt_goes_after_those_of_enough_later_runs() -> None:
    ledger: Ledger[str, str] = Ledger(EDGE)
    gone: list[str] = []
    for run in range(1, KEPT_RUNS + 4):
        ledger.give(run, f"value {run}")
        ledger.show(run, EDGE.capability(run), "asks", 1)
        gone += ledger.expired()[1]
    assert gone == ["value 1", "value 2", "value 3"]
    assert isinstance(ledger.show(1, EDGE.capability(1), "again", 2), EdgeRefusal)


def test_what_is_not_needed_is_not_kept_whether_it_was_made_or_not() -> None:
    ledger: Ledger[str, str] = Ledger(EDGE)
    ledger.give(1, "made")
    ledger.show(3, EDGE.capability(3), "waits", 1)
    for run, found in ((1, "made"), (2, None), (3, "waits")):
        assert ledger.abandon(run, b"forged") is None
        assert ledger.abandon(run, EDGE.capability(run)) == found
        assert ledger.give(run, "late") is Disposition.REFUSED


# Dialling


def test_a_link_is_dialled_at_once_and_then_after_growing_pauses_until_its_time_is_over() -> None:
    dialling, now, pauses = Redialling(10.0, lambda: 0.0), 100.0, list[float]()
    while (pause := dialling.broke(now)) is not None:
        pauses.append(pause)
        now += pause + 0.1
    assert pauses[:5] == [0.0, 0.05, 0.1, 0.2, 0.4] and max(pauses) == 0.5
    assert 110.0 <= now < 111.0


def test_a_link_that_comes_back_and_carries_nothing_is_given_up_and_one_that_carries_is_not() -> None:
    dialling, now, breaks = Redialling(10.0, lambda: 0.0), 0.0, 0
    while dialling.broke(now) is not None:
        breaks += 1
        assert breaks < 100
        # A long time with a connection does not count.
        dialling.back(now + 0.5)
        now += 60.0
    assert breaks == 20
    dialling = Redialling(10.0, lambda: 0.0)
    for number in range(1000):
        assert dialling.broke(60.0 * number) == 0.0
        dialling.back(60.0 * number + 0.5)
        dialling.progressed()


def test_an_unknown_token_ends_a_new_link_and_is_as_a_break_for_one_that_was_let_in() -> None:
    dialling = Redialling(10.0, lambda: 0.0)
    assert not dialling.may_mend(is_break=False, is_refusal=True)
    dialling.broke(0.0)
    assert dialling.may_mend(is_break=False, is_refusal=True)
    dialling = Redialling(10.0, lambda: 0.0)
    dialling.progressed()
    assert dialling.may_mend(is_break=False, is_refusal=True)
    assert not dialling.may_mend(is_break=False, is_refusal=False)


def test_without_a_lease_a_break_is_the_end() -> None:
    assert Redialling(0.0, lambda: 0.0).broke(5.0) is None
