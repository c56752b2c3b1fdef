"""`hg.RunFuture`: a run under way, and its observed values; how runs of a plan are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph._base.plan import Outputs, RunRequest
from heliograph.core.future import Deadline, Pending, What
from heliograph.core.inline_run import InlinePlan
from heliograph.errors import DeadlineExceededError, HeliographError
from heliograph.procedures.rebuild import RepeatedRun
from heliograph.procedures.run import SentRun, collect
from heliograph.procedures.taps import Tap, next_tap, not_observed

if TYPE_CHECKING:
    from heliograph.plan import Plan
    from heliograph.transport.blocking import BlockingShell
    from heliograph_proto.commands import Bytes


def send(plan: Plan, request: RunRequest) -> RunFuture:
    """Sends a run or a loop. Returns when the caller may overwrite its arrays."""
    sending = plan._submitting(plan._submission(request))
    run = plan._shell.drive(sending, request.timeout, plan._spec.what)
    return RunFuture(plan._shell, run, plan._tensors(run.kept, request.out), plan._spec.what)


def repeat(plan: Plan, request: RunRequest) -> RepeatedFuture:
    """A run that is repeated when a device is lost. It is sent, unless somebody waits for it at once."""
    repeated, out = plan._ask(request), request.out
    future = RepeatedFuture(plan._shell, repeated, lambda run: plan._tensors(run.kept, out), request.timeout)
    if request.method != "run":
        future.send()
    return future


class RunFuture:
    """A run or a loop that was sent; `result` waits for its outputs."""

    def __init__(self, shell: BlockingShell, run: SentRun, tensors: Mapping[str, Any], what: What) -> None:
        self._shell = shell
        self._what = what
        self._run = run
        self._tensors = tensors

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._run.pending.done

    def cancel(self) -> bool:
        """Asks the server to cancel the run; False if it has ended already."""
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._run.pending))
        return True

    @property
    def steps(self) -> int | None:
        """Of a loop, how many steps it did, once it has ended; where it failed or was cancelled, those that
        were done by then, and None if the server could not say. 1 of a run that ended well; else None."""
        return self._run.steps

    def __repr__(self) -> str:
        pending = self._run.pending
        return f"<RunFuture {'pending' if not pending.done else 'failed' if pending.error else 'done'}>"

    def taps(self, timeout: float | None = None) -> TapIterator:
        """The values of the observed nodes as they are computed, each once; for a run with `taps=`.

        Ends when the run has ended, with its error if it failed. Waiting for the next one raises
        DeadlineExceededError after `timeout` seconds (the run goes on then); Ctrl-C cancels the run. To stop
        early: `run.cancel()`. Values that nobody takes stay in this process's memory as long as the run does.

        A loop waits on the server while a few MiB of its values are on their way and not taken, until
        somebody waits for its result, or the iterator is dropped. From then on no more than
        `session.info.limits.in_flight_bytes` of them stay here: where the first one is missing, iterating
        raises LimitExceededError.
        """
        if self._run.observed is None:
            raise not_observed()
        return TapIterator(self._shell, self._run, timeout, self._what)

    def result(self, timeout: float | None = None) -> Outputs:
        """The outputs by name: arrays, or tensors if the run was not to fetch them. A run that pauses goes on
        without pauses.

        Raises the run's error, or DeadlineExceededError (the run goes on then). Ctrl-C while waiting
        cancels the run.
        """
        arrays = self._shell.drive(collect(self._shell.core, self._run, cancel=False), timeout, self._what)
        return {**arrays, **self._tensors}

    def exception(self, timeout: float | None = None) -> HeliographError | None:
        """The run's error, or None when it went well. Raises DeadlineExceededError."""
        try:
            self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        """Calls function(self) when the run has ended, from another thread; it must not wait."""
        self._run.pending.add_callback(partial(function, self))


class InlineFuture(RunFuture):
    """A run that is one small message each way."""

    def __init__(self, shell: BlockingShell, plan: InlinePlan, pending: Pending) -> None:
        self._shell = shell
        self._plan = plan
        self._pending = pending
        self._arrays: Outputs | None = None

    def done(self) -> bool:
        return self._pending.done

    def cancel(self) -> bool:
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._pending))
        return True

    def __repr__(self) -> str:
        pending = self._pending
        return f"<RunFuture {'pending' if not pending.done else 'failed' if pending.error else 'done'}>"

    def taps(self, timeout: float | None = None) -> TapIterator:
        raise not_observed()

    def result(self, timeout: float | None = None) -> Outputs:
        pending = self._pending
        if not pending.done or timeout is not None:
            self._wait(Deadline(timeout, self._plan.spec.what))
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        if self._arrays is None:
            self._arrays = self._plan.arrays(pending)
        return dict(self._arrays)

    def data(self) -> Sequence[Bytes]:
        """The outputs as their bytes, in order, once it has ended. Raises what `result` does."""
        pending = self._pending
        if not pending.done:
            self._wait(Deadline(None, self._plan.spec.what))
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        return self._plan.data(pending)

    def result_or_cancel(self, timeout: float | None) -> Outputs:
        """As `result`, where nobody else has this future: a run that takes too long is cancelled."""
        try:
            return self.result(timeout)
        except DeadlineExceededError:
            self.cancel()
            raise

    def _wait(self, deadline: Deadline) -> None:
        try:
            self._shell.wait(self._pending, deadline)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.cancel()
            raise

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        self._pending.add_callback(partial(function, self))


class RepeatedFuture(RunFuture):
    """A run of a plan that is placed again when a device is lost: whoever waits for its result has it
    repeated then, in the order of the runs, within the time that it has."""

    def __init__(
        self,
        shell: BlockingShell,
        repeated: RepeatedRun,
        tensors: Callable[[SentRun], dict[str, Any]],
        timeout: float | None,
    ) -> None:
        self._shell, self._repeated, self._make = shell, repeated, tensors
        self._what = repeated.plan._spec.what
        self._made: Outputs | None = None
        self._deadline = Deadline(timeout, self._what)

    @property
    def _run(self) -> SentRun:  # type: ignore[override]
        run = self._repeated.run
        assert run is not None, "it was sent"
        return run

    def send(self) -> None:
        """Sends it, in its order."""
        self._shell.drive(self._repeated.sending(), self._deadline.remaining(), self._what)

    def result(self, timeout: float | None = None) -> Outputs:
        return self._result(timeout, cancel=False)

    def result_or_cancel(self) -> Outputs:
        """As `result`, where nobody else has this future: a run that takes too long is cancelled."""
        return self._result(None, cancel=True)

    def _result(self, timeout: float | None, cancel: bool) -> Outputs:
        if self._made is None:
            seconds = self._repeated.seconds(timeout, self._deadline, cancel)
            run = self._shell.drive(self._repeated.finishing(cancel), seconds, self._what)
            self._shell.advance(lambda: self._keep(run))
        return dict(self._made or {})

    def _keep(self, run: SentRun) -> None:
        """Makes the tensors once, whoever asks: each frees its handle in the end."""
        if self._made is None:
            self._made = {**(run.results or {}), **self._make(run)}


class TapIterator:
    """The observed values of a run, as they come. A run that pauses goes on when the next one is asked for,
    or nobody will ask."""

    def __init__(self, shell: BlockingShell, run: SentRun, timeout: float | None, what: What) -> None:
        self._shell, self._run, self._timeout, self._what = shell, run, timeout, what

    def __iter__(self) -> TapIterator:
        return self

    def __next__(self) -> Tap:
        found = self._shell.drive(next_tap(self._shell.core, self._run), self._timeout, self._what)
        if found is None:
            raise StopIteration
        return found

    def __repr__(self) -> str:
        return f"<TapIterator {'ended' if self._run.pending.done else 'open'}>"

    def __del__(self) -> None:
        self._run.let_go()
