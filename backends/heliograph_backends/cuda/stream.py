"""CUDA streams and events behind the contract.

A stream is a queue of the device and a thread that puts work on it. The thread issues the next work
while the device still computes the last. When there is none to issue, it polls whether the device
has finished the oldest work, and then reports that as done. So no thread, least of all an event
loop, blocks in a CUDA call without a bound.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from heliograph_backends.contract import Done, Event, Stream
from heliograph_backends.contract.stream import report_done
from heliograph_backends.cuda.driver import polling
from heliograph_backends.cuda.driver.driver import Driver, DriverError, Mark, Queue
from heliograph_proto.errors import CancelledError

if TYPE_CHECKING:
    from heliograph_backends.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

#: The most work that may be issued and not yet computed.
MOST_AHEAD = 64
#: The device is polled for a short while, then after pauses that double up to the longest.
FIRST_PAUSE_SECONDS = 5e-6
LONGEST_PAUSE_SECONDS = 200e-6
#: The time that close waits for the running work.
CLOSE_SECONDS = 30.0

_Item: TypeAlias = tuple[Callable[[], None], Done]


class _Issued(NamedTuple):
    """Work that the device has, and the mark of its end."""

    mark: Mark
    done: Done


class CudaStream(Stream):
    """One queue of the device and its thread."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.device = device
        with device.guarded():
            self.queue: Queue = device.driver.queue()
        self._items: deque[_Item] = deque()
        self._issued: deque[_Issued] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._items)} queued, {len(self._issued)} issued"
        return f"<CudaStream of {self.device.name}, {state}>"

    def submit(self, work: Callable[[], None], done: Done) -> None:
        with self._condition:
            closed = self._closed
            if not closed:
                self._items.append((work, done))
                self._condition.notify()
        if closed:
            report_done(done, CancelledError("the stream is closed"))

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    # On the stream's own thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closed:
            if self._issued and self._is_computed(
                self._issued[0].mark, at_first=pause == FIRST_PAUSE_SECONDS
            ):
                self._finish_oldest()
                pause = FIRST_PAUSE_SECONDS
                continue
            item = self._next(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if item is not None:
                self._issue(*item)
                pause = FIRST_PAUSE_SECONDS
        while self._issued:
            self._finish_oldest()
        while self._items:
            report_done(self._items.popleft()[1], CancelledError("the stream was closed"))

    def _next(self, pause: float) -> _Item | None:
        """Return the next work to issue; None when the device should be polled again."""
        with self._condition:
            full = len(self._issued) >= MOST_AHEAD
            if full or not self._items:
                timeout = pause if self._issued else None
                self._condition.wait_for(lambda: self._closed or (self._items and not full), timeout)
            return self._items.popleft() if self._items and not full and not self._closed else None

    def _issue(self, work: Callable[[], None], done: Done) -> None:
        try:
            with self.device.guarded(), self.device.on(self.queue):
                try:
                    work()
                finally:
                    # The work that a failing call had issued still runs and uses its memory.
                    mark = self.device.driver.mark(self.queue)
        except BaseException as error:  # it is reported to the submitter of the work
            self._drain()
            report_done(done, error)
            return
        self._issued.append(_Issued(mark, done))

    def _drain(self) -> None:
        """Wait for all issued work, in order, before a failure is reported."""
        while self._issued:
            self._finish_oldest()
        try:
            with self.device.guarded():
                self.device.settle(self.queue)
        except Exception as error:
            logger.debug("waiting for work issued before a failure: %s", error)

    def _is_computed(self, mark: Mark, *, at_first: bool) -> bool:
        """True if the device has reached a mark. `at_first` means that work was issued or done just
        before, so the device is polled without a pause, which would take longer than small work
        does."""
        driver = self.device.driver
        try:
            if at_first:
                return polling.reached_soon(driver, mark, lambda: bool(self._items) or self._closed)
            return driver.is_reached(mark)
        except DriverError:
            return True  # waiting for it raises the error

    def _finish_oldest(self) -> None:
        mark, done = self._issued.popleft()
        failure: BaseException | None = None
        try:
            with self.device.guarded(alive=False):
                self.device.driver.wait(mark)
        except BaseException as error:
            failure = error
        report_done(done, failure)


class CudaEvent(Event):
    """A mark in a stream's order. Another stream waits for it on the device; the host is called
    back.

    Recording and waiting follow the order of the streams' work: the mark on the device is made when
    the stream's thread reaches it, and a waiting stream queries it no sooner.
    """

    def __init__(self, device: CudaDevice) -> None:
        super().__init__()
        self._device = device
        self._marking = _Marking()
        self._marking.issued.set()

    def record(self, stream: Stream) -> CudaEvent:
        if not isinstance(stream, CudaStream):
            super().record(stream)
            self._marking = _Marking(reached=self._reached)
            return self
        marking, reached = _Marking(driver=stream.device.driver), threading.Event()

        def mark() -> None:
            marking.mark = stream.device.driver.mark(stream.queue)
            marking.issued.set()

        def done(_error: BaseException | None) -> None:
            marking.issued.set()
            reached.set()

        self._marking, self._reached = marking, reached
        stream.submit(mark, done)
        return self

    def wait(self, stream: Stream) -> None:
        marking = self._marking
        if not isinstance(stream, CudaStream) or marking.reached is not None:
            super().wait(stream)
            return

        def wait_for_mark() -> None:
            marking.issued.wait()
            if marking.mark is not None:
                stream.device.driver.wait_for(stream.queue, marking.mark)

        stream.submit(wait_for_mark, lambda _error: None)

    def is_reached(self) -> bool:
        """True if the device has passed the mark, even if the stream's thread has not polled it
        yet."""
        marking = self._marking
        if super().is_reached() or marking.mark is None or marking.driver is None:
            return super().is_reached()
        try:
            return marking.driver.is_reached(marking.mark)
        except DriverError:
            return super().is_reached()  # the stream's thread reports the error


class _Marking:
    """A mark on the device, once its stream's thread has made it."""

    def __init__(self, reached: threading.Event | None = None, driver: Driver | None = None) -> None:
        self.issued = threading.Event()
        self.mark: Mark = None
        #: The driver that made the mark.
        self.driver = driver
        #: For a mark on another kind of stream, which only the host knows.
        self.reached = reached
