"""The client's end of a command socket with threads: who reads, who writes, and how it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from heliograph.core.future import ANSWER, Deadline, Outcome
from heliograph.errors import DeadlineExceededError
from heliograph.transport.command_socket.blocking import BlockingSocket
from heliograph_proto.codec.frames import FrameReader, framed

#: Callers read by themselves where no handler can interrupt them.
pytestmark = pytest.mark.usefixtures("no_signal_handlers")

SECONDS = 30.0


class Ends:
    """A `BlockingSocket` and the other end. Its messages name the outcome that they finish."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair()
        self.other.settimeout(SECONDS)
        self.queue: list[bytes] = []
        self.outcomes = {name: Outcome() for name in (b"a", b"b", b"c")}
        self.applied: list[tuple[bytes, int]] = []
        self.socket = BlockingSocket(ours, self._take, self._apply, self)
        self.is_awaited = False
        self.raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._read)

    def _take(self) -> bytes:
        return self.queue.pop(0) if self.queue else b""

    def _apply(self, message: bytes) -> None:
        if message == b"bad":
            raise ValueError("a bad message")
        self.applied.append((message, threading.get_ident()))
        self.outcomes[message].finish()

    def _read(self) -> None:
        try:
            self.socket.read_until_end()
        except ValueError as error:
            self.raised.append(error)

    @property
    def has_output(self) -> bool:
        return bool(self.queue)

    @property
    def has_only_garbage(self) -> bool:
        return self.queue == [b"garbage"]

    @property
    def is_answered(self) -> bool:
        return not self.is_awaited

    def begin(self) -> None:
        """Starts the session's thread."""
        self._thread.start()

    def say(self, message: bytes) -> None:
        self.other.sendall(framed(message))

    def close(self) -> None:
        self.socket.end()
        if self._thread.ident is not None:
            self._thread.join(SECONDS)
            assert not self._thread.is_alive()
        self.other.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def no_limit() -> Deadline:
    return Deadline(None)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    made = threading.Thread(target=call)
    made.start()
    return made


def done(outcome: Outcome) -> bool:
    came = threading.Event()
    outcome.add_callback(came.set)
    return came.wait(SECONDS)


def test_a_caller_reads_until_its_own_answer_comes(ends: Ends) -> None:
    ends.say(b"b")
    ends.say(b"a")
    ends.socket.wait(ends.outcomes[b"a"], no_limit())
    me = threading.get_ident()
    assert ends.applied == [(b"b", me), (b"a", me)]


def test_the_sessions_thread_reads_while_no_caller_waits(ends: Ends) -> None:
    ends.begin()
    ends.say(b"a")
    assert done(ends.outcomes[b"a"])
    ends.say(b"b")
    ends.socket.wait(ends.outcomes[b"b"], no_limit())
    assert done(ends.outcomes[b"b"])
    ends.say(b"c")
    assert done(ends.outcomes[b"c"])


def test_the_answer_of_another_thread_is_read_after_the_caller_that_read_has_left(ends: Ends) -> None:
    ends.begin()
    ends.is_awaited = True
    first = in_thread(lambda: ends.socket.wait(ends.outcomes[b"a"], no_limit()))
    ends.say(b"a")
    first.join(SECONDS)
    ends.say(b"b")
    assert done(ends.outcomes[b"b"])


def test_a_caller_waits_no_longer_than_its_deadline(ends: Ends) -> None:
    with pytest.raises(DeadlineExceededError):
        ends.socket.wait(ends.outcomes[b"a"], Deadline(0.01, ANSWER))
    ends.say(b"b")
    ends.socket.wait(ends.outcomes[b"b"], Deadline(SECONDS, ANSWER))
    assert ends.outcomes[b"b"].done


def test_the_end_wakes_a_caller_after_what_had_come(ends: Ends) -> None:
    waiting = in_thread(lambda: ends.socket.wait(ends.outcomes[b"a"], no_limit()))
    ends.say(b"b")
    assert done(ends.outcomes[b"b"])
    ends.say(b"c")
    ends.socket.end()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and not ends.outcomes[b"a"].done
    assert ends.outcomes[b"c"].done


def test_an_error_that_a_caller_met_is_raised_in_the_sessions_thread(ends: Ends) -> None:
    ends.begin()
    ends.say(b"bad")
    ends.socket.wait(ends.outcomes[b"a"], no_limit())
    ends.close()
    assert [str(one) for one in ends.raised] == ["a bad message"]


def test_a_caller_that_waits_writes_what_is_queued_but_what_can_wait(ends: Ends) -> None:
    reader = FrameReader(2**20)
    for name, sent in ((b"a", [b"a command"]), (b"b", [])):
        ends.queue = sent or [b"garbage"]
        ends.say(name)
        ends.socket.wait(ends.outcomes[name], no_limit())
        if sent:
            assert reader.feed(ends.other.recv(65_536)) == [b"a command"]
    assert ends.queue == [b"garbage"]


def test_what_finds_no_room_is_left_to_the_writer_and_stays_in_order(ends: Ends) -> None:
    messages = [bytes([number]) * 100_000 for number in range(20)]
    ends.queue = list(messages)
    for _ in messages:
        if not ends.socket.send_now():
            break
    else:
        raise AssertionError("there was room for everything")
    assert not ends.socket.send_now()
    writing = in_thread(ends.socket.send_all)
    reader, found = FrameReader(2**20), list[bytes]()
    while len(found) < len(messages):
        found += reader.feed(ends.other.recv(65_536))
    writing.join(SECONDS)
    assert found == messages and not writing.is_alive()


def test_the_writer_returns_at_the_end_though_nothing_was_read(ends: Ends) -> None:
    ends.queue = [bytes(1_000_000)]
    writing = in_thread(ends.socket.send_all)
    ends.begin()
    ends.socket.end()
    writing.join(SECONDS)
    assert not writing.is_alive()
