"""Runs of a session that has no command under way, on the thread that submits its commands.

Such a run is the next command of the session, and can be aborted as any other. But nothing stands
before it, so it needs no validation and no queue. There are two kinds, and all others are refused,
so that the caller sends a command: a run that repeats an earlier one on the same tensors, and takes
and gives no bytes; and a run that takes all its inputs as bytes, gives all outputs as bytes, and
whose caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from heliograph_backends.contract import Abort, Tensor
from heliograph_backends.contract.access import read_whole
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.commands import Bytes, Completion, RunCommand
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_server.plans.loaded_plan import LoadedPlan, PlanCopy
from heliograph_server.resources.handles import PlanHandle
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.parts.inside import SessionInside
from heliograph_server.session.protocol.run_validation import InlineRunFit, LoneRun, lone_run


class RunsAlone:
    """The runs of a session between two commands."""

    def __init__(self, inside: SessionInside) -> None:
        self._inside, self._core, self._executor = inside, inside.core, inside.executor
        self._holding = inside.holding

    # On tensors

    def run(self, command: RunCommand) -> bool:
        """Run a plan as the next command, which fails as any other. False if a command must. Only
        one thread submits the session's commands."""
        began = time.monotonic()
        with self._inside.lock:
            if self._executor.stillness.keeps is not None or (run := self._begun(command)) is None:
                return False
            abort = self._executor.aborts[run.sequence] = Abort()
        loaded: LoadedPlan = run.plan.plan
        failure: HeliographError | None = None
        try:
            _compute(loaded.copies[0], (), [None if one is None else one.placed for one in run.into], abort)
        except BaseException as error:  # it becomes the command's error
            failure = loaded.explain(self._executor.failure_of(error, run.sequence))
            run.note_targets()
        self._end(loaded, Completion(run.sequence), began, failure, torn=abort.is_writing)
        return True

    def _begun(self, command: RunCommand) -> LoneRun | None:
        core = self._core
        plan = core.handles.peek(command.plan, PlanHandle)
        if core.unretired or core.closed is not None or plan is None or not _is_plain(plan):
            return None
        if not self._is_counted():
            return None
        if (run := lone_run(plan, command, core.last_sequence + 1, core.handles)) is None:
            self._holding.give(QuotaKind.RUNS)
            return None
        core.begin_alone(run.state)
        return run

    # On bytes

    def begin(self, run: InlineRun) -> Callable[[], None] | None:
        """Begin a run as the next command, and return the rest of its work. None if a command must
        run it, or if it is so short that it is done at once."""
        if run.form.is_traced:
            return None
        with self._inside.lock:
            if self._executor.stillness.keeps is not None or (fit := self._core.fit(run)) is None:
                return None
            loaded: LoadedPlan = fit.plan.plan
            is_taken = _is_plain(fit.plan) and not loaded.is_observed and loaded.short_run() is None
            if not is_taken or not self._is_counted():
                return None
            if (here := self._begun_here(run, fit)) is None:
                self._holding.give(QuotaKind.RUNS)
            return here

    def _begun_here(self, run: InlineRun, fit: InlineRunFit) -> Callable[[], None] | None:
        """Begin a run on this thread; None if another one works for the device's queue, or the
        queue must be opened first."""
        executor, seconds = self._executor, run.form.timeout_ms / 1e3
        fetching = _Fetching(run, fit)
        state = fit.begun(run.sequence, timed=seconds > 0)
        if state.queue is None or state.queue.stream is None:
            return None
        work = partial(fetching.compute, self._inside.room)
        here: Callable[[], None] | None = state.queue.stream.submit_here(work, partial(self._done, fetching))
        if here is not None:
            fit.enter(state)
            self._core.begin_alone(state)
            executor.aborts[run.sequence] = fetching.abort
            if seconds:
                executor.expire_after(seconds, run.sequence)
        return here

    def _done(self, fetching: _Fetching, error: BaseException | None) -> None:
        loaded: LoadedPlan = fetching.fit.plan.plan
        sequence, failure = fetching.run.sequence, None
        if error is not None:
            failure = loaded.explain(self._executor.failure_of(error, sequence))
        result = Completion(sequence, outputs=fetching.outputs, device_us=fetching.device_us)
        self._end(loaded, result, fetching.began, failure, carried=fetching.fit.carried)

    # Both

    def _is_counted(self) -> bool:
        """Count a run of the tenant. False above its quota."""
        try:
            self._holding.take(QuotaKind.RUNS)
        except LimitExceededError:
            return False
        return True

    def _end(
        self,
        loaded: LoadedPlan,
        result: Completion,
        began: float,
        failure: HeliographError | None,
        *,
        torn: bool = False,
        carried: tuple[int, int] = (0, 0),
    ) -> None:
        executor, sequence = self._executor, result.sequence
        with self._inside.lock:
            executor.aborts.pop(sequence, None)
            if failure is not None:
                self._core.fail(sequence, failure, torn=torn)
                carried = carried[0], 0
            if executor.book.is_kept:
                executor.book.did(sequence, loaded.device_names, began, carried, "", failure)
            executor.decide(partial(self._core.finish, sequence, None, result))
        loaded.note(0, (time.monotonic() - began) * 1e6)
        executor.deliver()


def _is_plain(plan: PlanHandle) -> bool:
    """True if a plan runs on this host's processor alone: a GPU has a thread of its own."""
    loaded: LoadedPlan = plan.plan
    return loaded.is_on_host and len(loaded.copies) == 1 and not loaded.is_lost


class _Fetching:
    """A run on bytes."""

    __slots__ = ("abort", "began", "device_us", "fit", "outputs", "run")

    def __init__(self, run: InlineRun, fit: InlineRunFit) -> None:
        self.run, self.fit = run, fit
        self.abort, self.began = Abort(), time.monotonic()
        #: Fetched outputs, by their places in the plan.
        self.outputs: tuple[tuple[int, Bytes], ...] = ()
        self.device_us = 0.0

    def compute(self, room: MemoryReclaim) -> None:
        """Run the plan, and fetch its outputs."""
        self.outputs = room.for_work(self._computed)
        self.device_us = (time.monotonic() - self.began) * 1e6

    def _computed(self) -> tuple[tuple[int, Bytes], ...]:
        plan, wanted = self.fit.plan, self.run.form.outputs
        copy: PlanCopy = plan.plan.copies[0]
        try:
            given = zip(plan.inputs, self.fit.inputs(self.run.inputs), strict=True)
            inputs = [copy.input_of(place, port.type, data) for place, (port, data) in enumerate(given)]
            outputs: list[Tensor | None] = [None] * len(plan.outputs)
            for place in wanted:
                outputs[place] = copy.output_for(place, plan.outputs[place].type)
            _compute(copy, inputs, outputs, self.abort)
            return tuple((place, read_whole(one)) for place in wanted if (one := outputs[place]) is not None)
        finally:
            copy.trim()


def _compute(
    copy: PlanCopy, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort
) -> None:
    with copy.turn(abort) as turn:
        copy.compute(inputs, outputs, abort, None, 0, turn)
