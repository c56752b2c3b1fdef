"""`hg.RunFuture`: a run in progress and its observed values; how the runs of a plan are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph._base.inputs import FedInputs, not_fed, step_of
from heliograph._base.plan import Outputs, RunRequest, fed_inputs
from heliograph.core.future import Deadline, Pending, What
from heliograph.core.inline_run import InlinePlan
from heliograph.errors import DeadlineExceededError, HeliographError
from heliograph.graph.arguments import timeout_ms
from heliograph.procedures.rebuild import RepeatedRun
from heliograph.procedures.run import SentRun, collect, feed
from heliograph.procedures.taps import Tap, next_tap, not_observed

if TYPE_CHECKING:
    from heliograph.plan import Plan
    from heliograph.transport.blocking import BlockingShell
    from heliograph_proto.commands import Bytes


def send(plan: Plan, request: RunRequest) -> RunFuture:
    """Send a run or a loop. Returns when the caller may overwrite its arrays."""
    sending = plan._submitting(plan._submission(request))
    run = plan._shell.drive(sending, request.timeout, plan._spec.what)
    tensors = plan._tensors(run.kept, request.out)
    return RunFuture(plan._shell, run, tensors, plan._spec.what, fed_inputs(plan, request))


def repeat(plan: Plan, request: RunRequest) -> RepeatedFuture:
    """Create a run that is repeated when a device is lost.

    It is sent at once unless `run` waits for it right away.
    """
    repeated, out, fed = plan._enqueue(request), request.out, fed_inputs(plan, request)
    tensors = lambda run: plan._tensors(run.kept, out)  # noqa: E731
    future = RepeatedFuture(plan._shell, repeated, tensors, request.timeout, fed)
    if request.method != "run":
        future.send()
    return future


class RunFuture:
    """A run or a loop in progress.

    Made by `plan.submit` and `plan.loop`; `result` waits for its outputs.
    """

    #: The inputs that may be fed; None if there are none.
    _fed: FedInputs | None = None

    def __init__(
        self,
        shell: BlockingShell,
        run: SentRun,
        tensors: Mapping[str, Any],
        what: What,
        fed: FedInputs | None = None,
    ) -> None:
        self._shell, self._run, self._tensors, self._what = shell, run, tensors, what
        self._fed = fed
        self._pending = run.pending

    def done(self) -> bool:
        """True if the run has ended, with or without an error."""
        return self._pending.done

    def cancel(self) -> bool:
        """Request the server to cancel the run. Returns False if it has already ended.

        Variables keep the values of the last step that was completed.
        """
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._pending))
        return True

    def stop(self) -> bool:
        """Request the server to end a loop after its present step. Returns False if it has already
        ended.

        `result` then returns the outputs of that step. A loop that has not begun runs one step. No
        effect on a run, which is one step.
        """
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.stop(self._pending))
        return True

    def feed(
        self, values: Mapping[str, Any], *, rows: Sequence[int] | None = None, timeout: float | None = None
    ) -> FeedFuture:
        """Give a running loop new values of inputs that `plan.loop(feed=...)` names.

        The loop takes all values together before one of its steps, and feeds in their order. A
        carried input has the value for that step alone, since the next step takes the step's
        output. Others keep it until the next feed. Each value reaches a step: two feeds of the same
        rows go to two steps. A step takes all others that wait.

        Args:
            values: Arrays by the names of inputs, of the plan's types.
            rows: Numbers of rows. The values are those rows of the inputs, and the other rows stay
                as they are; of a carried input, as the step before made them. None: whole inputs.
            timeout: Seconds, after which the feed fails unless a step took it.

        Returns when the values are on their way; it waits while the loop has too many that no step
        took. `result` of the returned future is the number of the step that took them.

        Raises InvalidArgumentError or InvalidInputError for inputs that may not be fed and values
        that do not fit, LimitExceededError for values that no message can carry, and
        DeadlineExceededError. The future raises LoopEndedError if the loop ended before it took the
        values.
        """
        if self._fed is None:
            raise not_fed()
        kind, limit_ms = self._fed.command(values, rows), timeout_ms(timeout)
        sending = feed(self._shell.core, self._to_feed(), kind, limit_ms)
        return FeedFuture(self._shell, self._shell.drive(sending, timeout, "a feed of a loop"))

    def _to_feed(self) -> Pending:
        return self._pending

    @property
    def steps(self) -> int | None:
        """The number of steps of a loop that has ended, also one that failed or was cancelled.

        None before the end, or if the server could not tell. 1 for a run that succeeded.
        """
        return self._run.steps

    def __repr__(self) -> str:
        pending = self._pending
        return f"<RunFuture {'pending' if not pending.done else 'failed' if pending.error else 'done'}>"

    def taps(self, timeout: float | None = None) -> TapIterator:
        """Iterate over the values of the observed nodes, in a run with `taps=`.

        Each value comes once, when it is computed. The iterator ends with the run, and raises the
        run's error if it failed. Waiting for a value raises DeadlineExceededError after `timeout`
        seconds; the run goes on then. Ctrl-C cancels the run. To stop early, call `run.cancel()`.
        Values that are not read stay in this process's memory as long as the run.

        A loop pauses on the server while a few MiB of its values are unread, until `result` is
        called or the iterator is dropped. From then on at most
        `session.info.limits.in_flight_bytes` of values are kept here. If values had to be dropped,
        iterating raises LimitExceededError at the first missing one.

        Raises InvalidArgumentError for a run without `taps=`.
        """
        if self._run.observed is None:
            raise not_observed()
        return TapIterator(self._shell, self._run, timeout, self._what)

    def result(self, timeout: float | None = None) -> Outputs:
        """Wait for the outputs, by name: arrays, or tensors for outputs that are not fetched.

        A run that pauses goes on without pauses.

        Raises the run's error, or DeadlineExceededError after `timeout` seconds; the run goes on
        then. Ctrl-C while waiting cancels the run.
        """
        arrays = self._shell.drive(collect(self._shell.core, self._run, cancel=False), timeout, self._what)
        return {**arrays, **self._tensors}

    def exception(self, timeout: float | None = None) -> HeliographError | None:
        """Wait for the end of the run and return its error, or None if it succeeded.

        Raises DeadlineExceededError.
        """
        try:
            self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        """Call function(self) when the run has ended, from any thread. It must not block."""
        self._pending.add_callback(partial(function, self))


class InlineFuture(RunFuture):
    """A run with one small message each way."""

    def __init__(self, shell: BlockingShell, plan: InlinePlan, pending: Pending) -> None:
        self._shell = shell
        self._plan = plan
        self._pending = pending
        self._arrays: Outputs | None = None

    @property
    def steps(self) -> int | None:
        return 1 if self.done() and self._pending.error is None else None

    def taps(self, timeout: float | None = None) -> TapIterator:
        raise not_observed()

    def result(self, timeout: float | None = None) -> Outputs:
        pending = self._pending
        if not pending.done:
            self._wait(Deadline(timeout, self._plan.spec.what))
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        if self._arrays is None:
            self._arrays = self._plan.arrays(pending)
        return dict(self._arrays)

    def data(self) -> Sequence[Bytes]:
        """Wait for the outputs as bytes, in order. Raises the errors of `result`."""
        pending = self._pending
        if not pending.done:
            self._wait(Deadline(None, self._plan.spec.what))
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        return self._plan.data(pending)

    def result_or_cancel(self, timeout: float | None) -> Outputs:
        """Return `result`; cancel a run that takes too long, since this is its only caller."""
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


class RepeatedFuture(RunFuture):
    """A run that is repeated when a device is lost.

    The call that waits for its result repeats it, in the order of the runs, within its own
    deadline.
    """

    def __init__(
        self,
        shell: BlockingShell,
        repeated: RepeatedRun,
        tensors: Callable[[SentRun], dict[str, Any]],
        timeout: float | None,
        fed: FedInputs | None = None,
    ) -> None:
        self._shell, self._repeated, self._make, self._fed = shell, repeated, tensors, fed
        self._what = repeated.plan._spec.what
        self._made: Outputs | None = None
        self._deadline = Deadline(timeout, self._what)

    @property
    def _run(self) -> SentRun:  # type: ignore[override]
        run = self._repeated.run
        assert run is not None, "it was sent"
        return run

    @property
    def _pending(self) -> Pending:  # type: ignore[override]
        return self._run.pending

    def stop(self) -> bool:
        return self._shell.advance(self._repeated.stop)

    def _to_feed(self) -> Pending:
        self._shell.advance(self._repeated.was_fed)
        return self._pending

    def send(self) -> None:
        self._shell.drive(self._repeated.sending(), self._deadline.remaining(), self._what)

    def result(self, timeout: float | None = None) -> Outputs:
        return self._result(timeout, cancel=False)

    def result_or_cancel(self) -> Outputs:
        """Return `result`; cancel a run that takes too long, since this is its only caller."""
        return self._result(None, cancel=True)

    def _result(self, timeout: float | None, cancel: bool) -> Outputs:
        if self._made is None:
            seconds = self._repeated.seconds(timeout, self._deadline, cancel)
            run = self._shell.drive(self._repeated.finishing(cancel), seconds, self._what)
            self._shell.advance(lambda: self._keep(run))
        return dict(self._made or {})

    def _keep(self, run: SentRun) -> None:
        """Make the tensors once, even if several threads wait: each frees its handle in the end."""
        if self._made is None:
            self._made = {**(run.results or {}), **self._make(run)}


class FeedFuture:
    """New values on their way to a step of a running loop. Made by `loop.feed`."""

    def __init__(self, shell: BlockingShell, pending: Pending) -> None:
        self._shell, self._pending = shell, pending

    def done(self) -> bool:
        """True if a step took the values, or none will."""
        return self._pending.done

    def result(self, timeout: float | None = None) -> int:
        """Wait until a step takes the values, and return its number, from 0.

        The step may still fail or be cancelled: `loop.steps` counts those that were completed.

        Raises LoopEndedError if the loop ended before, or DeadlineExceededError after `timeout`
        seconds; the values stay on their way then.
        """
        if not self._pending.done:
            self._shell.wait(self._pending, Deadline(timeout, "a feed of a loop"))
        self._shell.advance(lambda: self._shell.core.raise_error(self._pending))
        return step_of(self._pending)

    def exception(self, timeout: float | None = None) -> HeliographError | None:
        """Wait until a step took the values, and return None, or the error.

        Raises DeadlineExceededError.
        """
        try:
            self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def __repr__(self) -> str:
        pending = self._pending
        return f"<FeedFuture {'pending' if not pending.done else 'failed' if pending.error else 'done'}>"


class TapIterator:
    """The observed values of a run, in the order in which they come.

    A run that pauses goes on when the next value is requested, or when the iterator is dropped.
    """

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
