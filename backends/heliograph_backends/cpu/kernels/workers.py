"""Helper threads that join a run.

Each helper is parked on its own lock, used as a binary semaphore: waking one is a release, which
costs a microsecond. The thread that calls `BoundProgram.run` is worker 0. A helper that is still on
its way when the run ends finds it closed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bound import BoundProgram


class _Helper:
    """One parked thread and the program that it shall help with."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._wake = threading.Lock()
        self._wake.acquire()
        self._program: BoundProgram | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"heliograph-kernel-{worker}", daemon=True)
        self._thread.start()

    def wake(self, program: BoundProgram) -> None:
        self._program = program
        self._release()

    def close(self) -> None:
        self._closing = True
        self._release()
        self._thread.join()

    def _release(self) -> None:
        """Wake the thread; one that was woken already and did not look yet will see the newest
        program.
        """
        try:
            self._wake.release()
        except RuntimeError:
            pass

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            self._help()

    def _help(self) -> None:
        """Join the newest program. Missing one is harmless: its leader does what nobody claims."""
        program, self._program = self._program, None
        if program is not None:
            program.help(self.worker)


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

    def resize(self, threads: int) -> None:
        """Have as many workers from now on; not during a run. What was bound before runs on them too.

        Raises ValueError, and RuntimeError where the system gives no more threads; those that it gave stay.
        """
        if threads < 1:
            raise ValueError(f"{threads} threads: a pool has at least the calling one")
        for helper in self._helpers[threads - 1 :]:
            helper.close()
        del self._helpers[threads - 1 :]
        while len(self._helpers) < threads - 1:
            self._helpers.append(_Helper(len(self._helpers) + 1))

    def wake(self, program: BoundProgram, helpers: int) -> None:
        """Send the first `helpers` of them to a program whose run begins."""
        for helper in self._helpers[:helpers]:
            helper.wake(program)

    def close(self) -> None:
        """End the helper threads and wait for them; not during a run."""
        self.resize(1)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
