"""The completion messages that a session with a lease keeps."""

from __future__ import annotations

import random

import pytest

import heliograph as hg
from heliograph_server.rpc.leases import completion_log
from heliograph_server.rpc.leases.completion_log import CompletionLog


def log_of(*messages: bytes) -> CompletionLog:
    made = CompletionLog()
    for one in messages:
        made.append(one)
    return made


def test_messages_are_kept_until_they_are_acknowledged() -> None:
    log = log_of(b"a", b"bb", b"ccc")
    assert log.since(0) == (b"a", b"bb", b"ccc")
    log.acknowledge(2)
    assert (log.size_bytes, log.since(2), log.since(3)) == (3, (b"ccc",), ())


def test_a_late_acknowledgement_has_no_effect() -> None:
    log = log_of(b"a", b"b")
    log.acknowledge(2)
    log.acknowledge(1)
    assert (log.acknowledged, log.written) == (2, 2)


@pytest.mark.parametrize("received", [3, 2**60])
def test_messages_that_were_never_written_cannot_be_claimed(received: int) -> None:
    log = log_of(b"a", b"b")
    with pytest.raises(hg.ProtocolError, match="2 were written"):
        log.since(received)
    with pytest.raises(hg.ProtocolError, match="2 were written"):
        log.acknowledge(received)
    assert log.since(0) == (b"a", b"b")


def test_acknowledged_messages_cannot_be_had_again() -> None:
    log = log_of(b"a", b"b")
    log.acknowledge(2)
    with pytest.raises(hg.ProtocolError, match="has acknowledged 2"):
        log.since(1)


def test_it_is_full_by_bytes_and_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_log, "MOST_BYTES", 10)
    monkeypatch.setattr(completion_log, "MOST_MESSAGES", 3)
    assert not log_of(b"123456789").is_full
    assert log_of(b"1234567890").is_full
    log = log_of(b"", b"", b"")
    assert log.is_full
    log.acknowledge(1)
    assert not log.is_full


def test_a_restored_log_goes_on_with_its_numbers() -> None:
    log = CompletionLog(7, (b"8", b"9"))
    log.append(b"10")
    assert (log.written, log.since(8), log.size_bytes) == (10, (b"9", b"10"), 4)


def test_every_message_is_had_once_whatever_is_cut() -> None:
    chance, log, got = random.Random(5), CompletionLog(), list[bytes]()
    for number in range(5000):
        log.append(b"%d" % number)
        if chance.random() < 0.3:
            got += log.since(len(got))[: chance.randrange(4)]
        if chance.random() < 0.2:
            log.acknowledge(chance.randint(0, len(got)))
    got += log.since(len(got))
    assert got == [b"%d" % number for number in range(5000)]
    log.acknowledge(5000)
    assert log.size_bytes == 0
