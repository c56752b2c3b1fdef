"""Order in time: streams of work, events between them, and aborts."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """A request that running work end early. Set from any thread; polled between nodes.

    Work that changes variables in place calls `begin_writes` before: from then on it goes on to its
    end, `end_writes`, and only then is this set. So an abort leaves the variables as they were
    before the work, or after it. `within` is the abort of the whole work, for one of a part.
    """

    def __init__(self, within: Abort | None = None) -> None:
        self._whole: Abort = within._whole if within is not None else self
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], None]] = []
        self._request_hooks: list[Callable[[], None]] = []
        #: True once the work should end. It never becomes False again.
        self.is_set = False
        self._is_requested = False
        #: True while variables may have a part of the work's new values.
        self.is_writing = False

    @property
    def is_requested(self) -> bool:
        """True once the work should not wait for a reader, even while it goes on to its end."""
        return self.is_set or self._whole._is_requested

    def set(self, *, now: bool = False) -> None:
        """Set it, after the writes of work that has begun to write, or `now`. Later calls do
        nothing more."""
        with self._lock:
            first, self._is_requested = not self._is_requested, True
            for hook in self._request_hooks if first else ():
                hook()
            if now or not self.is_writing:
                self._set()

    def _set(self) -> None:
        if not self.is_set:
            self.is_set = True
            for hook in self._hooks:
                hook()

    def check(self) -> None:
        """Raise CancelledError if it is set."""
        if self.is_set:
            raise CancelledError("the command was cancelled")

    def begin_writes(self) -> None:
        """Note that variables change from now on. Raises CancelledError if this is set."""
        whole = self._whole
        with whole._lock:
            if whole.is_set or self.is_set:
                raise CancelledError("the run was cancelled")
            whole.is_writing = True

    def end_writes(self) -> None:
        """Note that the variables have all their new values."""
        whole = self._whole
        with whole._lock:
            whole.is_writing = False
            if whole._is_requested:
                whole._set()

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

    @contextmanager
    def watch_request(self, hook: Callable[[], None]) -> Iterator[None]:
        """As `watch`, for `is_requested`."""
        whole = self._whole
        with self.watch(hook) if whole is not self else nullcontext():
            with whole._lock:
                whole._request_hooks.append(hook)
                if whole._is_requested:
                    hook()
            try:
                yield
            finally:
                with whole._lock:
                    whole._request_hooks.remove(hook)


class Turn(ABC):
    """A run's turn on a device that other tenants need too."""

    @abstractmethod
    def watch(self, hook: Callable[[], None]) -> AbstractContextManager[object]:
        """Call `hook` from another thread, during the block, when the device should be given to
        others. The hook must not block."""

    @abstractmethod
    def give(self) -> None:
        """Let others compute, and return when it is this run's turn again.

        The device must have no work of the run. Raises CancelledError after an abort.
        """


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

    def submit_here(self, work: Callable[[], None], done: Done) -> Callable[[], None] | None:
        """As `submit`, for a thread that waits for the work and may as well do it.

        Returns a function that does it, which this thread calls soon; later work waits for that.
        None if the stream has other work, or needs a thread of its own: nothing is queued then.
        """
        return None

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
