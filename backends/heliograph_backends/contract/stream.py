"""Order in time: streams of work, events between them, and asking work to end early."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heliograph_backends.contract.device import Device

logger = logging.getLogger(__name__)

#: Called once when submitted work is done, from any thread, with what it raised or None.
Done: TypeAlias = Callable[[BaseException | None], None]


def report_done(done: Done, failure: BaseException | None) -> None:
    """Call `done` and log its errors: they must not end a stream's thread before the queued work."""
    try:
        done(failure)
    except Exception:
        logger.exception("reporting the end of work on a stream failed")


class Abort:
    """Asks work that runs to end early. Set from any thread; polled between nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        """Asks once; later calls do nothing."""
        with self._lock:
            if self.is_set:
                return
            self.is_set = True
            for hook in self._hooks:
                hook()

    def when_set(self, hook: Callable[[], None]) -> None:
        """Calls `hook` once if set, before or ever after. It must not block."""
        with self._lock:
            self._hooks.append(hook)
            if self.is_set:
                hook()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        """Calls `hook` once if set before or during the block, never after it. The hook must not block.

        Several threads may watch at once: the splits of one run share its abort.
        """
        with self._lock:
            self._hooks.append(hook)
            if self.is_set:
                hook()
        try:
            yield
        finally:
            with self._lock:
                self._hooks.remove(hook)


class Stream(ABC):
    """An ordered queue of work on a device."""

    device: Device

    @abstractmethod
    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Queues `work`, which issues device work (a plan, reads, writes) in this stream's order.

        Returns at once. `done` is called exactly once, after what `work` issued has been computed, or
        with what it raised; it must not raise. Work that was queued on a stream that is closed is done
        with CancelledError.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for the running work, ends what is queued with CancelledError, and frees the stream."""

    def synchronize(self, timeout: float) -> None:
        """Waits until everything queued so far is done. Raises DeadlineExceededError."""
        self.device.event().record(self).synchronize(timeout)


class Event:
    """A mark in a stream's order that another stream, or the host, can wait for.

    One that was never recorded counts as reached. Recording again moves the mark. This one is made of
    host primitives; a device with events of its own overrides all four methods.
    """

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream: Stream) -> Event:
        """Marks the present end of the stream's queue."""
        mark = self._reached = threading.Event()
        stream.submit(lambda: None, lambda _error: mark.set())
        return self

    def wait(self, stream: Stream) -> None:
        """Makes the stream's later work wait for the mark, without blocking the host."""
        mark = self._reached

        def wait_for_mark() -> None:
            mark.wait()

        stream.submit(wait_for_mark, lambda _error: None)

    def synchronize(self, timeout: float) -> None:
        """Waits for the mark. Raises DeadlineExceededError."""
        if not self._reached.wait(timeout):
            raise DeadlineExceededError(f"the event was not reached within {timeout} s")

    def is_reached(self) -> bool:
        return self._reached.is_set()
