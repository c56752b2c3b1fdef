"""A device queue without a switch of threads: the thread that submits a command performs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from heliograph_backends.contract import Done, Stream
from heliograph_backends.contract.stream import report_done

#: Makes a call without the session's lock, after those before it.
Later: TypeAlias = Callable[[Callable[[], object]], None]
#: Makes a session's queue of a device's stream.
QueueOf: TypeAlias = Callable[[Stream, Later], Stream]


class CallersStream(Stream):
    """Performs work in the thread that submits it, once that holds no lock of its session.

    Another thread may deliver for the session just then. It may not block, so it hands the work to
    the stream's own thread, and work after that follows it there until all of it is done.
    """

    def __init__(self, stream: Stream, later: Later) -> None:
        """`stream`: one whose work is computed when it returns."""
        self.device = stream.device
        self._stream, self._later = stream, later
        self._lock = threading.Lock()
        #: Work in the stream's own thread.
        self._elsewhere = 0

    def submit(self, work: Callable[[], None], done: Done) -> None:
        self._later(partial(self._perform, threading.get_ident(), work, done))

    def _perform(self, thread: int, work: Callable[[], None], done: Done) -> None:
        with self._lock:
            is_mine = thread == threading.get_ident() and not self._elsewhere
            self._elsewhere += not is_mine
        if not is_mine:
            self._stream.submit(work, partial(self._done_elsewhere, done))
            return
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # any error belongs to the submitter of the work
            failure = error
        report_done(done, failure)

    def _done_elsewhere(self, done: Done, failure: BaseException | None) -> None:
        with self._lock:
            self._elsewhere -= 1
        report_done(done, failure)

    def close(self) -> None:
        self._stream.close()


def own_thread(stream: Stream, later: Later) -> Stream:
    """Return the stream, whose own thread does its work."""
    return stream


def by_caller(stream: Stream, later: Later) -> Stream:
    """Return a stream whose work its submitter performs, if the device allows that."""
    return CallersStream(stream, later) if stream.is_done_on_return else stream
