"""A program bound to memory, and one run of it."""

from __future__ import annotations

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

# Waking a helper costs it some 30 us until it is there.
WAKE_NS = 30_000.0
_STATUSES = tuple(Status)


class BoundProgram:
    """A program with its addresses, control block and scratch. One run at a time; `abort` from any
    thread. Programs that share scratch do not run at the same time.
    """

    def __init__(
        self, program: Program, slots: Sequence[int] | NDArray[np.int64], scratch: Scratch | None = None
    ) -> None:
        self.program = program
        self._entries = native.entries()
        if isinstance(slots, np.ndarray):
            self._slots = slots
        else:
            self._slots = np.zeros(max(1, program.slots), dtype=np.int64)
        self._pool: WorkerPool | None = None
        self._control = aligned_words(words.COUNTERS + program.shared_steps * words.COUNTER_WORDS)
        self._control[words.HEAVY] = self._entries.heavy_block.address
        self._code_at = int(program.code.ctypes.data)
        self._slots_at = int(self._slots.ctypes.data)
        self._control_at = int(self._control.ctypes.data)
        self._scratch = Scratch() if scratch is None else scratch
        self._scratch.require(program.scratch_bytes)
        # Of the leader's block, once there is one for as many workers.
        self._scratch_at = 0
        self._reserved = 0
        # Whether the shared steps take longer than it takes to wake a helper.
        self._worth_sharing = program.shared_steps > 0 and program.shared_cost_ns > WAKE_NS
        self.rebind(slots)

    def rebind(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Give other base addresses; not during a run."""
        if len(slots) < self.program.slots:
            raise ValueError(f"{len(slots)} slots for a program of {self.program.slots}")
        self._slots[: self.program.slots] = slots[: self.program.slots]

    def run(self, workers: WorkerPool | None = None, threads: int = 0) -> Status:
        """Run all steps and return how that ended; helpers are woken when the shared steps are
        worth it. `threads` is the most workers that take part, the calling one among them; 0: all.

        The pool is the same for all runs. Raises ValueError for another.
        """
        if workers is not None and self._pool not in (None, workers):
            raise ValueError("a program runs on one pool of workers; bind it anew for another")
        self._pool = workers or self._pool
        helpers = 0 if workers is None else workers.helpers
        if threads:
            helpers = min(helpers, threads - 1)
        if workers is None or not self._worth_sharing:
            helpers = 0
        self._reserve(helpers + 1)
        if workers is not None and helpers:
            self._control[words.MAILS] = workers.mails_at
            if self._entries.open_program(self._control_at, self.program.shared_steps, helpers):
                workers.wake(helpers, int(self._control[words.PROCESSOR]))
        return _STATUSES[self._run(helpers)]

    def abort(self) -> None:
        """End the run in progress, or else the next, with ABORTED; holds until `clear_abort`."""
        self._control[words.ABORT] = 1

    def clear_abort(self) -> None:
        """Let runs proceed again."""
        self._control[words.ABORT] = 0

    @property
    def failed_step(self) -> int:
        """The step at which the last run that was not OK stopped."""
        return int(self._control[words.FAILED_STEP])

    @property
    def outside(self) -> int:
        """The index that ended the last run with OUTSIDE."""
        return int(self._control[words.FAILED_INDEX])

    def _reserve(self, workers: int) -> None:
        """Have scratch for so many workers."""
        if workers > self._reserved:
            self._scratch.reserve(workers)
            self._scratch_at = self._scratch.addresses[0]
            # The scratch makes its table anew when it grows; we keep the one that we name.
            self._table = self._scratch.table
            self._control[words.SCRATCHES] = int(self._table.ctypes.data)
            self._reserved = workers

    def _run(self, helpers: int) -> int:
        status: int = self._entries.run_program(
            self._code_at, self._slots_at, self._control_at, self._scratch_at, helpers
        )
        return status
