"""A program bound to memory, and one run of it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program import words
from heliograph_backends.cpu.kernels.program.program import Program
from heliograph_backends.cpu.kernels.program.words import Status
from heliograph_backends.cpu.kernels.runtime import native
from heliograph_backends.cpu.kernels.runtime.memory import Scratch, aligned_words

if TYPE_CHECKING:
    from heliograph_backends.cpu.kernels.runtime.workers import WorkerPool

# The time that a helper takes to wake up.
WAKE_NS = 30_000.0
_STATUSES = tuple(Status)


def _clock() -> tuple[int, int]:
    """Return the address of clock_gettime, and the number of the monotonic clock."""
    function = ctypes.CDLL(None).clock_gettime
    return ctypes.cast(function, ctypes.c_void_p).value or 0, time.CLOCK_MONOTONIC


class BoundProgram:
    """A program with its addresses, control block and scratch.

    Only one run at a time; `abort` and `pause` may be called from any thread. Programs that share
    scratch must not run at the same time.
    """

    def __init__(
        self, program: Program, slots: Sequence[int] | NDArray[np.int64], scratch: Scratch | None = None
    ) -> None:
        self.program = program
        self._entries = native.entries(program.needs)
        if isinstance(slots, np.ndarray):
            self._slots = slots
        else:
            self._slots = np.zeros(max(1, program.slots), dtype=np.int64)
        self._pool: WorkerPool | None = None
        self._control = aligned_words(words.COUNTERS + program.shared_steps * words.COUNTER_WORDS)
        self._control[words.ENTRIES] = native.table_address()
        self._code_at = int(program.code.ctypes.data)
        self._slots_at = int(self._slots.ctypes.data)
        self._control_at = int(self._control.ctypes.data)
        self._scratch = Scratch() if scratch is None else scratch
        self._scratch.require(program.scratch_bytes)
        # The address of the leader's block; 0 before the first run.
        self._scratch_at = 0
        # True if the run was begun with helpers, and while it is paused.
        self._is_helped = False
        self._is_paused = False
        # The times of measured runs: see `words.TIMES`.
        self._times = aligned_words(0)
        # True if the shared steps take longer than waking a helper.
        self._worth_sharing = program.shared_steps > 0 and program.shared_cost_ns > WAKE_NS
        self.rebind(slots)

    def rebind(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Set other base addresses; not during a run."""
        if len(slots) < self.program.slots:
            raise ValueError(f"{len(slots)} slots for a program of {self.program.slots}")
        self._slots[: self.program.slots] = slots[: self.program.slots]

    def run(self, workers: WorkerPool | None = None, threads: int = 0) -> Status:
        """Run all steps and return the status. Helpers are woken if the shared steps are worth it.

        `threads` is the most workers that take part, with the calling one; 0: all. All runs must
        use the same pool; raises ValueError for another one. After PAUSED, the next call goes on;
        it has helpers if the first one had.
        """
        if workers is not None and self._pool not in (None, workers):
            raise ValueError("a program runs on one pool of workers; bind it anew for another")
        self._pool = workers or self._pool
        helpers = 0 if workers is None else workers.helpers
        if threads:
            helpers = min(helpers, threads - 1)
        if workers is None or not (self._is_helped if self._is_paused else self._worth_sharing):
            helpers = 0
        if not self._is_paused:
            self._is_helped = helpers > 0
        if not self._scratch_at:
            self._scratch.reserve(1)
            self._scratch_at = self._scratch.addresses[0]
        if workers is not None and helpers:
            self._control[words.MAILS] = workers.mails_at
            self._control[words.SCRATCHES] = workers.scratch_at(self.program.scratch_bytes, helpers)
            new_steps = 0 if self._is_paused else self.program.shared_steps
            if self._entries.open_program(self._control_at, new_steps, helpers):
                workers.wake(helpers, int(self._control[words.PROCESSOR]))
        status: int = self._entries.run_program(
            self._code_at, self._slots_at, self._control_at, self._scratch_at, helpers, self._is_helped
        )
        self._is_paused = status == Status.PAUSED
        return _STATUSES[status]

    def abort(self) -> None:
        """End the current run, or else the next ones, with ABORTED, until `clear`."""
        self._control[words.ABORT] = 1

    def pause(self) -> None:
        """End the current run, or else the next one, with PAUSED at a tile, until
        `clear_pause`."""
        self._control[words.PAUSE] = 1

    def clear_pause(self) -> None:
        """Allow that a paused run is resumed."""
        self._control[words.PAUSE] = 0

    def clear(self) -> None:
        """Allow runs again, and give a paused run up."""
        self._control[words.ABORT] = self._control[words.PAUSE] = 0
        if self._is_paused:
            self._is_paused = False
            self._control[words.REACHED_STEP] = self._control[words.REACHED_TILE] = 0

    def measure(self, *, on: bool) -> None:
        """Add up the time of each step in the runs from now on, or end that.

        It may be called during a run, of which a part is then measured.
        """
        if not on:
            self._control[words.TIMES] = 0
            return
        if not len(self._times):
            # A run may still write to it after the measurement has ended.
            self._times = aligned_words(self.program.steps + 1)
        self._times.fill(0)
        self._control[words.CLOCK], self._control[words.CLOCK_NUMBER] = _clock()
        self._control[words.STEP_BEGAN] = 0
        self._control[words.TIMES] = self._times.ctypes.data

    @property
    def mean_ns(self) -> NDArray[np.float64]:
        """The mean time of each step in measured runs; zeros without one."""
        if not len(self._times):
            return np.zeros(self.program.steps)
        return self._times[:-1] / max(1, int(self._times[-1]))

    @property
    def failed_step(self) -> int:
        """The step at which the last run that was not OK stopped."""
        return int(self._control[words.FAILED_STEP])

    @property
    def outside(self) -> int:
        """The index that ended the last run with OUTSIDE."""
        return int(self._control[words.FAILED_INDEX])
