"""Order in time: streams of work, events between them, and aborts."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.errors import CancelledError, DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heliograph_backends.contract.device import Device

logger = logging.getLogger(__name__)

#: Called once when submitted work is done, from any thread, with its exception or None.
Done: TypeAlias = Callable[[BaseException | None], None]


def report_done(done: Done, failure: BaseException | None) -> None:
    """Call `done` and log its errors, which must not end a stream's thread."""
    try:
        done(failure)
    except Exception:
        logger.exception("reporting the end of work on a stream failed")


class Abort:
    """A request that running work end early. Set from any thread; polled between nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], None]] = []
        #: True once the run should end. It never becomes False again.
        self.is_set = False

    def set(self) -> None:
        """Set it; later calls do nothing."""
        with self._lock:
            if self.is_set:
                return
            self.is_set = True
            for hook in self._hooks:
                hook()

    def check(self) -> None:
        """Raise CancelledError if it is set."""
        if self.is_set:
            raise CancelledError("the command was cancelled")

    def when_set(self, hook: Callable[[], None]) -> None:
        """Call `hook` once when this is set, or at once if it is. The hook must not block."""
        with self._lock:
            self._hooks.append(hook)
            if self.is_set:
                hook()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        """Call `hook` once if this is set before or during the block, never after it.

        The hook must not block. Several threads may watch at once: the splits of one run share its
        abort.
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

    #: The device whose work it queues.
    device: Device

    @abstractmethod
    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Queue `work`, which issues device work (a plan, reads, writes) in this stream's order.

        Returns at once. `done` is called exactly once, after the issued work has been computed, or
        with the exception of `work`; it must not raise. Work queued on a closed stream ends with
        CancelledError.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the running work, end queued work with CancelledError, and free the stream."""

    def synchronize(self, timeout: float) -> None:
        """Wait until all work queued so far is done. Raises DeadlineExceededError."""
        self.device.event().record(self).synchronize(timeout)


class Event:
    """A mark in a stream's order that another stream, or the host, can wait for.

    An event that was never recorded counts as reached. Recording again moves the mark. This class
    uses host primitives; a device with events of its own overrides all four methods.
    """

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream: Stream) -> Event:
        """Mark the current end of the stream's queue."""
        mark = self._reached = threading.Event()
        stream.submit(lambda: None, lambda _error: mark.set())
        return self

    def wait(self, stream: Stream) -> None:
        """Make the stream's later work wait for the mark, without blocking the host."""
        mark = self._reached

        def wait_for_mark() -> None:
            mark.wait()

        stream.submit(wait_for_mark, lambda _error: None)

    def synchronize(self, timeout: float) -> None:
        """Wait for the mark. Raises DeadlineExceededError."""
        if not self._reached.wait(timeout):
            raise DeadlineExceededError(f"the event was not reached within {timeout} s")

    def is_reached(self) -> bool:
        return self._reached.is_set()
