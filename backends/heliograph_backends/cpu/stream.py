"""The CPU's streams: a thread each, which runs queued work in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from heliograph_backends.contract import Device, Done, Stream
from heliograph_proto.errors import CancelledError

if TYPE_CHECKING:
    from typing import TypeAlias

    Item: TypeAlias = tuple[Callable[[], None], Done]

logger = logging.getLogger(__name__)

#: How long close waits for the running work, which an abort should end between two nodes.
CLOSE_SECONDS = 30.0


class CpuStream(Stream):
    """One worker thread. Work is computed when it returns, so `done` follows at once."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self._queue: deque[Item] = deque()
        self._ready = threading.Semaphore(0)
        self._closed = False
        # Held while an item is queued or the stream is closed, so that no item is queued too late.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._queue)} queued"
        return f"<CpuStream of {self.device.name}, {state}>"

    def submit(self, work: Callable[[], None], done: Done) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.append((work, done))
        if closed:
            _report(done, CancelledError("the stream is closed"))
        else:
            self._ready.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._ready.release()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            if self._closed:
                break
            self._run_one(*self._queue.popleft())
        while self._queue:
            _report(self._queue.popleft()[1], CancelledError("the stream was closed"))

    @staticmethod
    def _run_one(work: Callable[[], None], done: Done) -> None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # whatever it is, it belongs to who submitted the work
            failure = error
        _report(done, failure)


def _report(done: Done, failure: BaseException | None) -> None:
    """Calls `done`. What that raises must not end the thread: the work behind would never be done."""
    try:
        done(failure)
    except Exception:
        logger.exception("reporting the end of work on a stream failed")
