"""Helper threads that join a run.

A helper that has nothing to do looks into its mail for a while, in native code; then its thread is parked
on a lock of its own, used as a binary semaphore: waking it is a release, which costs a microsecond, and
some thirty until it is there. A run wakes those that are parked and posts the program to all. The thread
that calls `BoundProgram.run` is worker 0. A helper that is on its way when the run ends finds nothing.

One that is on the leader's processor when a run begins is sent elsewhere, see `placement`: the leader takes
that processor from what it allows the helper, wakes it, and gives it back. So nothing is pinned while it
runs, and the system may move it on.

Which helpers are to go to another processor, and to which. Pure.

A helper that wakes on the leader's processor waits until the leader gives way, and nothing of the run is
shared. Linux wakes it there, with others idle: it leaves a thread where it slept unless it finds an idle
processor, and among few that share a cache it does not look for one while they have been busy for half of
the time (`SIS_UTIL` in its kernel/sched/fair.c); the leader may have woken on that processor meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final

import numpy as np

from heliograph_backends.cpu.kernels.program import words
from heliograph_backends.cpu.kernels.program.words import Mail
from heliograph_backends.cpu.kernels.runtime import native
from heliograph_backends.cpu.kernels.runtime.memory import aligned_words

#: Of a thread that has not said where it is, and where the system does not tell.
UNKNOWN: Final = -1


def colliding(leader: int, helpers: Sequence[int]) -> list[int]:
    """Return the helpers, by their place in the list of their processors, that are where the leader or a
    helper before them is.
    """
    used, found = {leader}, []
    for number, processor in enumerate(helpers):
        if processor in used and processor != UNKNOWN:
            found.append(number)
        used.add(processor)
    return found


def choices(allowed: AbstractSet[int], leader: int, helpers: Sequence[int]) -> set[int]:
    """Return the processors to which a helper should go that may use those of `allowed`: where no worker is.
    Where there is none it stays.
    """
    return set(allowed) - {leader, *helpers}


class _Helper:
    """One thread and its mail."""

    def __init__(self, worker: int) -> None:
        self._mail = aligned_words(words.MAIL_WORDS)
        self._mail[words.MAIL_PROCESSOR] = UNKNOWN
        self.mail_at = int(self._mail.ctypes.data)
        self._wake = threading.Lock()
        self._wake.acquire()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"heliograph-kernel-{worker}", daemon=True)
        self._thread.start()
        assert self._thread.native_id is not None, "it was started"
        self._native_id = self._thread.native_id

    @property
    def parked(self) -> bool:
        return int(self._mail[words.MAIL_STATE]) == Mail.PARKED

    @property
    def processor(self) -> int:
        """Where it was when it last looked for a program, or UNKNOWN."""
        return int(self._mail[words.MAIL_PROCESSOR])

    @contextmanager
    def elsewhere(self, processors: AbstractSet[int]) -> Iterator[None]:
        """In the block it can only be on these processors: if it sleeps it wakes there, else it moves at
        once. Behind it the system places it as before.
        """
        before = self.allowed
        moved = bool(processors) and self._allow(processors)
        yield
        if moved:
            self._allow(before)

    def _allow(self, processors: AbstractSet[int]) -> bool:
        """Tell whether the system did as it was told; it may be forbidden."""
        try:
            os.sched_setaffinity(self._native_id, processors)
        except OSError:
            return False
        return True

    @property
    def allowed(self) -> set[int]:
        """The processors on which it may run; none where the system does not tell."""
        try:
            return os.sched_getaffinity(self._native_id)
        except (AttributeError, OSError):
            return set()

    def wake_if_parked(self) -> None:
        """Wake the thread where it sleeps, or is on its way."""
        if self.parked:
            self.wake()

    def wake(self) -> None:
        """Wake the thread; one that was woken already and did not look yet will look once."""
        try:
            self._wake.release()
        except RuntimeError:
            pass

    def close(self) -> None:
        self._closing = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            native.entries().serve(self.mail_at)


class WorkerPool:
    """`threads` workers for programs: the caller and `threads - 1` helpers. Used by one thread at a
    time.
    """

    def __init__(self, threads: int) -> None:
        self._helpers: list[_Helper] = []
        self.resize(threads)

    @property
    def helpers(self) -> int:
        """Number of helper threads."""
        return len(self._helpers)

    @property
    def parked(self) -> int:
        """Number of helper threads that sleep, or are on their way."""
        return sum(helper.parked for helper in self._helpers)

    @property
    def processors(self) -> list[int]:
        """Where each helper thread was when it last looked for a program; negative where that is unknown."""
        return [helper.processor for helper in self._helpers]

    def resize(self, threads: int) -> None:
        """Have as many workers from now on; not during a run. What was bound before runs on them too.

        Raises ValueError, and RuntimeError where the system gives no more threads; those that it gave stay.
        """
        if threads < 1:
            raise ValueError(f"{threads} threads: a pool has at least the calling one")
        try:
            for helper in self._helpers[threads - 1 :]:
                helper.close()
            del self._helpers[threads - 1 :]
            while len(self._helpers) < threads - 1:
                self._helpers.append(_Helper(len(self._helpers) + 1))
        finally:
            self._table = np.array([helper.mail_at for helper in self._helpers], np.int64)
            self.mails_at = int(self._table.ctypes.data)

    def wake(self, helpers: int, processor: int = UNKNOWN) -> None:
        """Wake those of the first `helpers` that are parked, for a run that begins, and send those elsewhere
        that would wait for each other or for the calling thread, which is on `processor`.
        """
        chosen = self._helpers[:helpers]
        places = [helper.processor for helper in chosen]
        moved = colliding(processor, places)
        for number in moved:
            helper = chosen[number]
            with helper.elsewhere(choices(helper.allowed, processor, places)):
                helper.wake_if_parked()
        for number, helper in enumerate(chosen):
            if number not in moved:
                helper.wake_if_parked()

    def close(self) -> None:
        """End the helper threads and wait for them; not during a run."""
        self.resize(1)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
