"""Helper threads that join a run.

An idle helper looks into its mail for a while, in native code. Then its thread is parked on a lock
of its own, used as a binary semaphore: waking it is a release, which costs a microsecond, and takes
some thirty until it runs. A run wakes the parked helpers and posts the program to all. The thread
that calls `BoundProgram.run` is worker 0. A helper that wakes up after the end of the run finds
nothing.

A helper on the leader's processor would wait until the leader yields, and the run would not be
shared. Linux wakes a thread there even with idle processors. It leaves a thread where it slept
unless it finds an idle processor, and it does not look for one among few that share a cache while
these have been busy for half of the time (`SIS_UTIL` in its kernel/sched/fair.c); the leader may
have woken on that processor in the meantime. Or it takes the thread to the processor that wakes it:
on a virtual machine with two processors it did so after every sleep, and helpers missed the runs of
two milliseconds. So the leader removes its own processor from those allowed for a helper that
sleeps, wakes it, and restores them. A helper that is where another worker is goes where none is.
Helpers are not pinned during a run, and the system may move them.
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
from heliograph_backends.cpu.kernels.runtime.memory import Scratch, aligned_words

#: The processor of a thread that has not reported it yet, or on a system without this information.
UNKNOWN: Final = -1


def colliding(leader: int, helpers: Sequence[int]) -> list[int]:
    """Return the indices of the helpers on the processor of the leader or of an earlier helper."""
    used, found = {leader}, []
    for number, processor in enumerate(helpers):
        if processor in used and processor != UNKNOWN:
            found.append(number)
        used.add(processor)
    return found


def choices(allowed: AbstractSet[int], leader: int, helpers: Sequence[int]) -> set[int]:
    """Return the allowed processors without a worker, for a helper that should move; if empty, it
    stays."""
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
        """Its processor when it last looked for a program, or UNKNOWN."""
        return int(self._mail[words.MAIL_PROCESSOR])

    @contextmanager
    def elsewhere(self, processors: AbstractSet[int]) -> Iterator[None]:
        """Restrict the thread to these processors inside the block. A sleeping thread wakes there,
        a running one moves at once. After the block the system places it as before.
        """
        before = self.allowed
        moved = bool(processors) and self._allow(processors)
        yield
        if moved:
            self._allow(before)

    def _allow(self, processors: AbstractSet[int]) -> bool:
        """Set the allowed processors; False if the system refuses."""
        try:
            os.sched_setaffinity(self._native_id, processors)
        except OSError:
            return False
        return True

    @property
    def allowed(self) -> set[int]:
        """The processors on which it may run; empty if unknown."""
        try:
            return os.sched_getaffinity(self._native_id)
        except (AttributeError, OSError):
            return set()

    def wake_if_parked(self) -> None:
        """Wake the thread if it sleeps or is about to."""
        if self.parked:
            self.wake()

    def wake(self) -> None:
        """Wake the thread; repeated calls before it looks count once."""
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
    """`threads` workers: the caller and `threads - 1` helpers. Used by one thread at a time."""

    def __init__(self, threads: int) -> None:
        self._helpers: list[_Helper] = []
        #: The helpers' blocks, as large as the programs that they have run needed.
        self.scratch: Scratch
        self.resize(threads)

    @property
    def helpers(self) -> int:
        """Number of helper threads."""
        return len(self._helpers)

    @property
    def parked(self) -> int:
        """Number of helper threads that sleep or are about to."""
        return sum(helper.parked for helper in self._helpers)

    @property
    def processors(self) -> list[int]:
        """Each helper's processor when it last looked for a program; negative if unknown."""
        return [helper.processor for helper in self._helpers]

    def resize(self, threads: int) -> None:
        """Change the number of workers, also for programs that are already bound; not during a run.

        Raises ValueError, or RuntimeError if the system refuses more threads; those already started
        stay.
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
            self.scratch = Scratch()
            self._table = np.array([helper.mail_at for helper in self._helpers], np.int64)
            self.mails_at = int(self._table.ctypes.data)

    def scratch_at(self, size_bytes: int, helpers: int) -> int:
        """Return the address of the table of the first helpers' blocks, for a program that needs so
        many bytes; before its run."""
        self.scratch.require(size_bytes)
        return self.scratch.reserve(helpers)

    def wake(self, helpers: int, processor: int = UNKNOWN) -> None:
        """Wake the parked ones of the first `helpers` for a new run, away from the calling thread,
        which is on `processor`. Move helpers that share a processor with another worker.
        """
        chosen = self._helpers[:helpers]
        places = [helper.processor for helper in chosen]
        moved = colliding(processor, places)
        for number, helper in enumerate(chosen):
            if number in moved or helper.parked:
                others = places if number in moved else ()
                with helper.elsewhere(choices(helper.allowed, processor, others)):
                    helper.wake_if_parked()

    def close(self) -> None:
        """End the helper threads and wait for them; not during a run."""
        self.resize(1)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
