"""Partitions with short splits: the thread that brings a split's last input runs it.

    command ─▸ split ─▸ value to another host          (the thread that read the command)
    value ───▸ split ─▸ value to another host          (the thread that read the value)
    value ───▸ split ─▸ completion

A round trip through the queue's thread would take longer than such a split. Work that must wait,
for other work on the device or for room for a value, continues on the queue's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from heliograph_backends.contract import Abort, Done, Tensor
from heliograph_proto.commands import Bytes
from heliograph_proto.errors import CancelledError
from heliograph_server.plans.late_values import LateValues, LateValuesRun
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.scheduler.split_memory import Place

#: Runs a call on a thread that may wait; the second argument is called at its end.
Elsewhere: TypeAlias = Callable[[Callable[[], None], Done], None]


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A partition on one CPU device of this host, whose splits always read and write the same small
    tensors."""

    late: LateValues
    device_lock: DeviceLock
    #: The calls that run each split. They raise what its plan does.
    steps: Sequence[Callable[[], None]]
    tensors: Mapping[Place, Tensor]
    #: The bytes of the inputs that a run receives, and of its outputs.
    inputs: Sequence[memoryview]
    outputs: Sequence[memoryview]
    #: Called for each split with the times in seconds when it began, computed and was done.
    note: Callable[[int, float, float, float], None]


class SteppedRun:
    """One run. `done` is called once, from any thread, with the run's error or None."""

    def __init__(self, partition: Stepwise, run: int, abort: Abort, elsewhere: Elsewhere, done: Done) -> None:
        self._partition = partition
        self._run = run
        self._abort = abort
        self._elsewhere = elsewhere
        self._done = done
        self._lock = threading.Lock()
        #: True while the run waits for a value and no thread works on it.
        self._is_parked = False
        self._late: LateValuesRun | None = None
        self._next = 0
        #: For the next split: whether it has run, and the number of its values that were offered.
        self._has_run = False
        self._offered = 0

    def __repr__(self) -> str:
        return f"<SteppedRun {self._run}: {self._next} of {len(self._partition.steps)} splits>"

    def begin(self, inputs: Sequence[Bytes]) -> None:
        """Run the splits that can run now. Raises nothing."""
        try:
            for place, data in zip(self._partition.inputs, inputs, strict=True):
                place[:] = data
            self._late = self._partition.late.run(self._run, self._partition.tensors)
            self._abort.when_set(self._aborted)
        except BaseException as error:  # it becomes the run's error
            self._end(error)
            return
        self._go_on()

    def outputs(self) -> list[bytes]:
        """Return the outputs after a successful end."""
        return [one.tobytes() for one in self._partition.outputs]

    # Callbacks of other threads

    def _came(self) -> None:
        if self._take():
            self._go_on()

    def _aborted(self) -> None:
        """Continue on another thread: the aborting one must not wait."""
        if self._take():
            self._elsewhere(self._rest, self._end)

    def _take(self) -> bool:
        """True if the calling thread now continues the run."""
        with self._lock:
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def _go_on(self) -> None:
        assert self._late is not None
        try:
            while self._next < len(self._partition.steps):
                if not self._has_come():
                    # The thread is idle now.
                    self._late.ask_ahead()
                    return
                if not self._do_now():
                    self._elsewhere(self._rest, self._end)
                    return
        except BaseException as error:  # it becomes the run's error
            self._end(error)
            return
        self._end(None)

    def _has_come(self) -> bool:
        """True if the next split has its inputs; otherwise the thread that brings them continues.
        Raises CancelledError."""
        assert self._late is not None
        with self._lock:
            self._is_parked = True
        if not self._late.coming(self._next, self._came) and not self._abort.is_set:
            return False
        if not self._take():
            return False
        if self._abort.is_set:
            raise CancelledError("the run was cancelled")
        return True

    def _do_now(self) -> bool:
        """Run the next split, whose inputs have come, and offer its results. False if that had to
        wait."""
        begun = time.perf_counter()
        assert self._late is not None
        self._late.before(self._next, self._abort)
        if not self._partition.device_lock.at_once(partial(self._compute, begun)):
            return False
        places, made = self._late.departing(self._next)
        for place in places:
            if not self._late.offer_now(place, self._partition.tensors[made]):
                return False
            self._offered += 1
        self._follow()
        return True

    def _compute(self, begun: float) -> None:
        computing = time.perf_counter()
        self._partition.steps[self._next]()
        self._has_run = True
        self._partition.note(self._next, begun, computing, time.perf_counter())

    def _follow(self) -> None:
        self._next += 1
        self._has_run, self._offered = False, 0

    # On the queue's thread

    def _rest(self) -> None:
        """Run the remaining splits, and wait where necessary."""
        assert self._late is not None
        while self._next < len(self._partition.steps):
            if self._abort.is_set:
                raise CancelledError("the run was cancelled")
            begun = time.perf_counter()
            if not self._has_run:
                self._late.before(self._next, self._abort)
                with self._partition.device_lock.computing(self._abort):
                    self._compute(begun)
            places, made = self._late.departing(self._next)
            for place in places[self._offered :]:
                self._late.offer(place, self._partition.tensors[made], self._abort)
            self._follow()

    def _end(self, error: BaseException | None) -> None:
        if self._late is not None:
            self._late.end(error)
        self._done(error)
