"""The CPU's streams: queued work runs in order, on a thread of the stream or of its submitter."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from heliograph_backends.contract import Device, Done, Stream
from heliograph_backends.contract.stream import report_done
from heliograph_proto.errors import CancelledError

if TYPE_CHECKING:
    from typing import TypeAlias

    Item: TypeAlias = tuple[Callable[[], None], Done]


#: The most seconds that close waits for the running work. An abort should end that between two
#: nodes.
CLOSE_SECONDS = 30.0


class CpuStream(Stream):
    """One worker thread, whose turn a submitter may take.

    Work is computed when it returns, so `done` is called right after it.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self._queue: deque[Item] = deque()
        self._ready = threading.Semaphore(0)
        self._closed = False
        # Held to queue an item or to close the stream, so that no item is queued after the close.
        self._lock = threading.Lock()
        # Held while work runs. Of a submitter that holds it: its thread, 0 for none, and its work.
        self._turn = threading.Lock()
        self._taken_by = self._taken = 0
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
            report_done(done, CancelledError("the stream is closed"))
        else:
            self._ready.release()

    def submit_here(self, work: Callable[[], None], done: Done) -> Callable[[], None] | None:
        with self._lock:
            if self._closed or self._queue:
                return None
            if self._taken_by != threading.get_ident():
                if not self._turn.acquire(blocking=False):
                    return None
                self._taken_by = threading.get_ident()
            self._taken += 1
        return partial(self._run_here, work, done)

    def _run_here(self, work: Callable[[], None], done: Done) -> None:
        try:
            if self._closed:
                report_done(done, CancelledError("the stream was closed"))
            else:
                self._run_one(work, done)
        finally:
            with self._lock:
                self._taken -= 1
                if not self._taken:
                    self._taken_by = 0
                    self._turn.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._ready.release()
        # The end of work may close the stream.
        if threading.get_ident() in (self._thread.ident, self._taken_by):
            return
        if self._turn.acquire(timeout=CLOSE_SECONDS):
            self._turn.release()
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            with self._turn:
                if self._closed:
                    break
                self._run_one(*self._queue.popleft())
        while self._queue:
            report_done(self._queue.popleft()[1], CancelledError("the stream was closed"))

    @staticmethod
    def _run_one(work: Callable[[], None], done: Done) -> None:
        # A function of its own, so that an idle stream keeps no reference to its last work.
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # any error belongs to the submitter of the work
            failure = error
        report_done(done, failure)
