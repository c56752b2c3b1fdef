"""Runs of a session that has no command under way, on the thread that submits its commands.

Such a run is the next command of the session, and can be aborted as any other. But nothing can
stand before it, nothing comes behind it before it ends, and it takes and gives no bytes. So it
needs no validation, no place among the users of each tensor, and no queue. A run that repeats an
earlier one is done so; others are refused, and the caller sends a command.
"""

from __future__ import annotations

import time
from functools import partial

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.commands import Completion, RunCommand
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.resources.handles import PlanHandle
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.session.parts.inside import SessionInside
from heliograph_server.session.protocol.run_validation import LoneRun, lone_run


class RunsAlone:
    """The runs of a session between two commands. One thread, which submits its commands."""

    def __init__(self, inside: SessionInside) -> None:
        self._inside, self._core, self._executor = inside, inside.core, inside.executor
        self._holding = inside.holding

    def run(self, command: RunCommand) -> bool:
        """Run a plan as the next command, which fails as any other. False if a command must."""
        began = time.monotonic()
        with self._inside.lock:
            if self._executor.stillness.keeps is not None or (run := self._begun(command)) is None:
                return False
            abort = self._executor.aborts[run.sequence] = Abort()
        loaded: LoadedPlan = run.plan.plan
        failure: HeliographError | None = None
        try:
            _compute(loaded, [None if one is None else one.placed for one in run.into], abort)
        except BaseException as error:  # it becomes the command's error
            failure = loaded.explain(self._executor.failure_of(error, run.sequence))
        self._end(run, began, failure, torn=abort.is_writing)
        return True

    def _begun(self, command: RunCommand) -> LoneRun | None:
        core = self._core
        plan = core.handles.peek(command.plan, PlanHandle)
        if core.unretired or core.closed is not None or plan is None or not _is_plain(plan):
            return None
        try:
            self._holding.take(QuotaKind.RUNS)
        except LimitExceededError:
            return None
        if (run := lone_run(plan, command, core.last_sequence + 1, core.handles)) is None:
            self._holding.give(QuotaKind.RUNS)
            return None
        core.begin_alone(run.state)
        return run

    def _end(self, run: LoneRun, began: float, failure: HeliographError | None, *, torn: bool) -> None:
        executor, sequence = self._executor, run.sequence
        loaded: LoadedPlan = run.plan.plan
        with self._inside.lock:
            executor.aborts.pop(sequence, None)
            if failure is not None:
                run.note_targets()
                self._core.fail(sequence, failure, torn=torn)
            if executor.book.is_kept:
                executor.book.did(sequence, loaded.device_names, began, (0, 0), "", failure)
            executor.decide(partial(self._core.finish, sequence, None, Completion(sequence)))
        loaded.note(0, (time.monotonic() - began) * 1e6)
        executor.deliver()


def _is_plain(plan: PlanHandle) -> bool:
    """True if a plan runs on this host's processor alone: a GPU has a thread of its own."""
    loaded: LoadedPlan = plan.plan
    return loaded.is_on_host and len(loaded.copies) == 1 and not loaded.is_lost


def _compute(loaded: LoadedPlan, outputs: list[Tensor | None], abort: Abort) -> None:
    copy = loaded.copies[0]
    with copy.turn(abort) as turn:
        copy.compute((), outputs, abort, None, 0, turn)
