"""Loops whose steps go on at other hosts: what this process passes on meanwhile.

    host ─▸ values, steps of feeds, end ─▸ loop's thread ─▸ client
    client ─▸ feeds, stop, cancel ─▸ host

Between two steps nothing comes here, so a step costs no round trip.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from heliograph_backends.contract import Abort, HostedLoop, Tensor
from heliograph_proto.errors import HeliographError
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.loop_runner import Inputs, Outputs, in_step
from heliograph_server.session.protocol.instructions import Progress, RunTask
from heliograph_server.session.taps import LoopObserver


class HostedLoopRun:
    """One loop that was started at other hosts."""

    def __init__(self, task: RunTask, hosted: HostedLoop, outputs: Outputs) -> None:
        assert task.progress is not None
        self._hosted, self._outputs = hosted, outputs
        self._progress: Progress = task.progress
        loaded: LoadedPlan = task.plan.plan
        self._times = loaded.copies[task.slot].times
        self._noting = threading.Lock()
        #: When the steps that are complete were last counted.
        self._counted_at = time.perf_counter()

    def __repr__(self) -> str:
        return f"<HostedLoopRun {self._hosted!r}>"

    @property
    def done(self) -> int:
        """The number of completed steps, as far as known."""
        return self._progress.done

    def run(self, observer: LoopObserver, abort: Abort, room: MemoryReclaim | None) -> None:
        """Pass on what comes, until the loop has ended. `room` is not needed.

        Raises the loop's error, and CancelledError after an abort.
        """
        hosted = self._hosted
        try:
            with ExitStack() as stack:
                if hosted.stops_together:
                    # An abort asks for the end of a step first, and takes effect after it.
                    abort.begin_writes()
                    stack.enter_context(abort.watch_request(hosted.stop))
                stack.enter_context(abort.watch(hosted.cancel))
                stack.enter_context(observer.hosting(hosted))
                hosted.when_counted(partial(self._count, observer))
                if self._progress.stops:
                    hosted.stop()
                self._relay(observer, abort)
        finally:
            hosted.close()
            self._progress.done = hosted.steps or self._progress.done
            self._note(self._progress.done)
        if hosted.stops_together:
            abort.end_writes()
            abort.check()

    def _count(self, observer: LoopObserver, steps: int) -> None:
        """Note the steps that the hosts have told of. Any thread."""
        self._note(steps)
        observer.count(steps)

    def _note(self, steps: int) -> None:
        with self._noting:
            more, now = steps - self._progress.told, time.perf_counter()
            if more > 0:
                self._times.note((now - self._counted_at) * 1e6 / more, more)
                self._progress.told, self._counted_at = steps, now

    def _relay(self, observer: LoopObserver, abort: Abort) -> None:
        while (found := self._hosted.next()) is not None:
            observer.step, place, data = found
            self._progress.done = max(self._progress.done, observer.step)
            observer.value(place, data, abort)

    def results(self) -> Outputs:
        """Return the outputs of the last step."""
        return self._outputs

    def explain(self, _step: int, error: HeliographError) -> HeliographError:
        """Return an error of the loop with the number of its step, which its host may have told.

        The step in which a host was lost may be unknown.
        """
        if error.message.startswith("in step ") or not self.done:
            return error
        return in_step(self.done, error)


def hosted_run(
    loaded: LoadedPlan, task: RunTask, inputs: Inputs, outputs: Sequence[Tensor | None]
) -> HostedLoopRun | None:
    """Start a loop at other hosts, if they can go on by themselves. None: each step runs from
    here."""
    assert task.command.loop is not None
    if loaded.is_observed:
        return None
    changing = {one.storage for one in task.plan.assigned}
    if any(isinstance(one, TensorHandle) and one.storage in changing for one in task.inputs):
        # Each step reads what the step before assigned.
        return None
    hosted = loaded.copies[task.slot].plan.hosted_loop(task.command.loop, inputs, outputs)
    return None if hosted is None else HostedLoopRun(task, hosted, outputs)
