"""Device queues whose work the submitting thread performs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from heliograph_backends.contract import Stream
from heliograph_backends.cpu import CpuDevice
from heliograph_server.session.parts.callers_stream import CallersStream, by_caller

SECONDS = 20.0


class Session:
    """Calls that wait until a thread delivers, and a stream of a CPU."""

    def __init__(self, device: CpuDevice) -> None:
        self.calls: list[Callable[[], object]] = []
        self.stream = by_caller(device.stream(), self.calls.append)
        #: Of each work: its name, and its thread; then of its report.
        self.seen: list[tuple[str, int]] = []
        self.done = threading.Semaphore(0)

    def submit(self, name: str, work: Callable[[], object] = int) -> None:
        def run() -> None:
            self.seen.append((name, threading.get_ident()))
            work()

        def told(error: BaseException | None) -> None:
            self.seen.append((f"{name}: {error}", threading.get_ident()))
            self.done.release()

        self.stream.submit(run, told)

    def deliver(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.done.acquire(timeout=SECONDS)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


@pytest.fixture
def session() -> Iterator[Session]:
    device = CpuDevice(threads=1, native=False)
    made = Session(device)
    yield made
    made.stream.close()
    device.close()


def test_work_is_done_by_its_submitter_once_it_delivers(session: Session) -> None:
    session.submit("one")
    session.submit("two")
    assert not session.seen
    session.deliver()
    assert session.names == ["one", "one: None", "two", "two: None"]
    assert {thread for _, thread in session.seen} == {threading.get_ident()}


def test_a_failure_is_told_and_the_next_work_is_done(session: Session) -> None:
    session.submit("one", lambda: 1 // 0)
    session.submit("two")
    session.deliver()
    assert session.names == ["one", "one: integer division or modulo by zero", "two", "two: None"]


def test_a_thread_that_delivers_for_another_one_performs_nothing(session: Session) -> None:
    """It may be an event loop's. What is submitted next stays behind what it handed on."""
    goes_on = threading.Event()
    session.submit("one", lambda: goes_on.wait(SECONDS))
    other = threading.Thread(target=session.deliver, name="other")
    other.start()
    other.join(SECONDS)
    assert not other.is_alive()
    session.submit("two")
    session.deliver()
    assert "two" not in session.names
    goes_on.set()
    session.wait(2)
    assert session.names == ["one", "one: None", "two", "two: None"]
    assert threading.get_ident() not in {thread for _, thread in session.seen}
    session.submit("three")
    session.deliver()
    assert session.seen[-1] == ("three: None", threading.get_ident())


def test_a_device_that_computes_later_keeps_its_own_stream() -> None:
    class Later(Stream):
        def submit(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
            raise NotImplementedError

        def close(self) -> None:
            pass

    stream = Later()
    assert by_caller(stream, lambda _call: None) is stream
    assert not isinstance(stream, CallersStream)
