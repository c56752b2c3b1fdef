"""Runs of a plan's steps: issued one by one at first, then captured once and replayed as a CUDA
graph.

Steps that cannot be captured run between the graphs of the others. A recording contains addresses,
so a plan whose inputs and outputs have no fixed places has a recording for each set of tensors; the
most recent ones are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from heliograph_backends.contract import Abort
from heliograph_backends.cuda.driver.driver import DriverError, Mark, Queue, Recording
from heliograph_backends.cuda.driver.failures import is_sticky
from heliograph_proto.errors import CancelledError

if TYPE_CHECKING:
    from heliograph_backends.cuda.binding import CudaPlanMemory
    from heliograph_backends.cuda.steps import Step

#: The number of sets of tensors whose recordings are kept.
MOST_KEYS = 4
#: The fewest calls worth capturing: replaying a single launch or call gains nothing.
LEAST_CALLS = 2
#: The most steps that the note names as reasons against capturing.
MOST_NAMED = 3

_Key: TypeAlias = tuple[int, ...]


class Replays:
    """The runs of one plan, which are serial."""

    def __init__(self, steps: Sequence[Step], memory: CudaPlanMemory) -> None:
        self._memory = memory
        self._segments = [
            (can, list(part)) for can, part in groupby(steps, lambda step: not step.why_not_captured)
        ]
        self._captured_segments = [
            number
            for number, (can, part) in enumerate(self._segments)
            if can and sum(step.calls for step in part) >= LEAST_CALLS
        ]
        self._count = len(steps)
        self._reasons = list(dict.fromkeys(step.why_not_captured for step in steps if step.why_not_captured))
        self._failed = ""
        #: By the run's addresses: the recording of each segment; empty after the first run of a
        #: key.
        self._recordings: OrderedDict[_Key, dict[int, Recording]] = OrderedDict()

    @property
    def note(self) -> str:
        """A description of how the plan runs."""
        if self._failed:
            return f"not replayed: {self._failed}"
        if not self._captured_segments:
            return f"not replayed: {self._reason()}"
        inside = sum(len(self._segments[number][1]) for number in self._captured_segments)
        parts = f"{inside} of {self._count} steps replayed as {len(self._captured_segments)} CUDA graph(s)"
        each = "" if self._memory.is_fixed else ", captured for each set of input and output tensors"
        rest = f"; {self._reason()}" if self._reasons else ""
        return f"{parts}, captured with the second run{each}{rest}"

    def _reason(self) -> str:
        if not self._reasons:
            return f"{self._count} step(s) are too few to gain from it"
        more = len(self._reasons) - MOST_NAMED
        return "; ".join(self._reasons[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")

    def run(self, queue: Queue, abort: Abort) -> None:
        """Put all steps on a queue. Raises CancelledError; steps that were issued still run."""
        found = self._of_this_run()
        for number, (_, steps) in enumerate(self._segments):
            if found is None or number not in self._captured_segments:
                self._issue(steps, queue, abort)
                continue
            _check(abort)
            if number not in found:
                self._capture(found, number)
            if number in found:
                self._memory.device.driver.replay(found[number], queue)
            else:
                self._issue(steps, queue, abort)

    def run_marked(self, queue: Queue, abort: Abort) -> list[Mark]:
        """As `run`, one step after the other, with a time mark before each and after the last."""
        driver = self._memory.device.driver
        marks = [driver.time_mark(queue)]
        for _, steps in self._segments:
            for step in steps:
                self._issue([step], queue, abort)
                marks.append(driver.time_mark(queue))
        return marks

    def _of_this_run(self) -> dict[int, Recording] | None:
        """Return the recordings for the run's memory; None on its first run, which compiles and
        loads the kernels."""
        if self._failed or not self._captured_segments:
            return None
        memory = self._memory
        key = () if memory.is_fixed else tuple(memory.addresses[slot] for slot in sorted(memory.run_slots))
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        self._recordings[key] = {}
        if len(self._recordings) > MOST_KEYS:
            self._recordings.popitem(last=False)
        return None

    def _capture(self, found: dict[int, Recording], number: int) -> None:
        device, steps = self._memory.device, self._segments[number][1]

        def issue(queue: Queue) -> None:
            for step in steps:
                step.issue(queue)

        self._bind(steps)
        try:
            # Work on the default queue would wait for the capture, which CUDA refuses.
            with device.capturing:
                found[number] = device.driver.capture(issue)
        except Exception as error:
            # If the error is the steps' own, running them one by one raises it.
            if isinstance(error, DriverError) and is_sticky(error):
                raise
            self._failed = f"it could not be captured: {error}"

    def _issue(self, steps: Sequence[Step], queue: Queue, abort: Abort) -> None:
        self._bind(steps)
        for step in steps:
            _check(abort)
            step.issue(queue)

    def _bind(self, steps: Sequence[Step]) -> None:
        """Give steps the run's memory; replayed steps have their addresses in the graph."""
        if not self._memory.is_fixed:
            for step in steps:
                step.rebind()

    def free(self) -> None:
        """Drop the recordings."""
        self._recordings.clear()


def _check(abort: Abort) -> None:
    if abort.is_set:
        raise CancelledError("the run was cancelled")
