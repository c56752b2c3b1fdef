"""Runs in progress and their observed values for asyncio; how the runs of a plan are sent."""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph._base.inputs import FedInputs, not_fed, step_of
from heliograph._base.plan import Outputs, RunRequest, fed_inputs
from heliograph.core.credit import OrderGate
from heliograph.core.effects import Procedure
from heliograph.core.future import Deadline, Outcome, Pending, What, cancelled
from heliograph.core.inline_run import InlinePlan
from heliograph.core.loop_feeds import MOST_UNSENT
from heliograph.graph.arguments import timeout_ms
from heliograph.procedures.rebuild import RepeatedRun
from heliograph.procedures.run import SentRun, collect
from heliograph.procedures.taps import Tap, next_tap, not_observed
from heliograph_proto.commands import FeedLoop, loop_ended
from heliograph_proto.errors import DeadlineExceededError, HeliographError, LimitExceededError

if TYPE_CHECKING:
    from heliograph.aio.plan import Plan
    from heliograph.transport.aio import AioShell


def send(plan: Plan, request: RunRequest) -> RunFuture:
    """Send a run or a loop, or start a task that sends it."""
    shell, core = plan._shell, plan._shell.core
    gate = core.open_gate()
    try:
        submission = plan._submission(request, gate)
    except BaseException:
        shell.advance(lambda: core.close_gate(gate))
        raise
    kept = plan._tensors(submission.kept, request.out)
    deadline = Deadline(request.timeout, plan._spec.what)
    sent = _send(shell, plan._submitting(submission), gate, deadline, request)
    made = RunFuture(shell, sent, kept, plan._spec.what, request.observed is not None)
    made._fed = fed_inputs(plan, request)
    return made


def _send(
    shell: AioShell, procedure: Procedure[SentRun], gate: OrderGate, deadline: Deadline, request: RunRequest
) -> asyncio.Future[SentRun]:
    """Send at once if possible; otherwise a task does the rest."""
    try:
        effect = shell.advance(lambda: next(procedure))
    except StopIteration as stop:
        shell.advance(lambda: shell.core.close_gate(gate))
        return _done(stop.value)
    except BaseException:
        shell.advance(lambda: shell.core.close_gate(gate))
        raise

    async def rest() -> SentRun:
        try:
            return await shell.resume(procedure, lambda: effect, deadline)
        finally:
            shell.advance(lambda: shell.core.close_gate(gate))
            # Tensors that are collected before the run is sent would be freed before it.
            del_later = request  # noqa: F841

    return shell.spawn(rest())


def repeat(plan: Plan, request: RunRequest) -> RepeatedFuture:
    """Create a run that is repeated when a device is lost.

    It is sent at once if nothing is before it, otherwise by a task.
    """
    shell, repeated, out = plan._shell, plan._enqueue(request), request.out
    deadline = Deadline(request.timeout, plan._spec.what)
    sent = _send_repeated(shell, repeated, deadline)
    tensors = lambda run: plan._tensors(run.kept, out)  # noqa: E731
    made = RepeatedFuture(shell, repeated, sent, tensors, deadline, request.observed is not None)
    made._fed = fed_inputs(plan, request)
    return made


def _send_repeated(shell: AioShell, repeated: RepeatedRun, deadline: Deadline) -> asyncio.Future[SentRun]:
    procedure = repeated.sending()
    try:
        effect = shell.advance(lambda: next(procedure))
    except StopIteration:
        assert repeated.run is not None
        return _done(repeated.run)

    async def rest() -> SentRun:
        await shell.resume(procedure, lambda: effect, deadline)
        assert repeated.run is not None
        return repeated.run

    return shell.spawn(rest())


def _done(run: SentRun) -> asyncio.Future[SentRun]:
    sent: asyncio.Future[SentRun] = asyncio.get_running_loop().create_future()
    sent.set_result(run)
    return sent


class RunFuture:
    """A run or a loop in progress. Made by `plan.submit` and `plan.loop`.

    `await future` or `await future.result(timeout)` waits for its outputs.
    """

    #: The inputs that may be fed; None if there are none.
    _fed: FedInputs | None = None

    def __init__(
        self,
        shell: AioShell,
        sent: asyncio.Future[SentRun],
        tensors: dict[str, Any],
        what: What,
        is_observed: bool = False,
    ) -> None:
        self._shell, self._sent, self._tensors, self._what = shell, sent, tensors, what
        self._is_observed = is_observed
        self._ended = Outcome()
        #: Feeds from before the loop was sent.
        self._early: list[tuple[FeedFuture, FeedLoop, int]] = []
        sent.add_done_callback(self._was_sent)
        if sent.done():
            self._was_sent(sent)

    def _was_sent(self, sent: asyncio.Future[SentRun]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            # The callback holds no reference to this future: a run that pauses goes on once its
            # future is dropped.
            sent.result().pending.add_callback(self._ended.finish)
        else:
            self._ended.finish()
        early, self._early = self._early, []
        for made, kind, limit_ms in early:
            try:
                self._send_feed(made, kind, limit_ms)
            except HeliographError as error:
                made._ended.finish(error)

    def done(self) -> bool:
        """True if the run has ended, with or without an error."""
        return self._ended.done

    def cancel(self) -> bool:
        """Request the server to cancel the run. Returns False if it has already ended.

        Variables keep the values of the last step that was completed.
        """
        if self.done():
            return False
        if not self._sent.cancel():
            pending = self._sent.result().pending
            self._shell.advance(lambda: self._shell.core.cancel(pending))
        return True

    def stop(self) -> bool:
        """Request the server to end a loop after its present step. Returns False if it has already
        ended.

        `result` then returns the outputs of that step. A loop that has not begun runs one step. No
        effect on a run, which is one step.
        """
        if self.done():
            return False
        self._sent.add_done_callback(self._stop)
        return True

    def _stop(self, sent: asyncio.Future[SentRun]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            pending = sent.result().pending
            self._shell.advance(lambda: self._shell.core.stop(pending))

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
            timeout: Seconds from the arrival at the server, after which the feed fails unless a
                step took it.

        Returns at once; awaiting the future waits for the step that takes the values, and gives its
        number.

        Raises InvalidArgumentError or InvalidInputError for inputs that may not be fed and values
        that do not fit, and LimitExceededError for values that no message can carry, or while 1,024
        earlier feeds wait to be sent. The future raises LoopEndedError if the loop ended before it
        took the values.
        """
        if self._fed is None:
            raise not_fed()
        kind, limit_ms = self._fed.command(values, rows), timeout_ms(timeout)
        if len(self._early) >= MOST_UNSENT:
            raise LimitExceededError(f"{len(self._early):,} feeds wait for their loop to be sent")
        made = FeedFuture(self._shell)
        # The callback of the loop's sending keeps their order.
        if self._sent.done() and not self._early:
            self._send_feed(made, kind, limit_ms)
        else:
            self._early.append((made, kind, limit_ms))
        return made

    def _send_feed(self, made: FeedFuture, kind: FeedLoop, limit_ms: int) -> None:
        run, core = self._to_feed(), self._shell.core
        if run is None:
            made._ended.finish(loop_ended())
        else:
            made._follow(self._shell.advance(lambda: core.feed(run, kind, limit_ms)))

    def _to_feed(self) -> Pending | None:
        """The loop; None if it was not sent."""
        if self._sent.cancelled() or self._sent.exception() is not None:
            return None
        return self._sent.result().pending

    def taps(self, timeout: float | None = None) -> TapIterator:
        """Iterate over the values of the observed nodes, in a run with `taps=`.

        Each value comes once, when it is computed. The iterator ends with the run, and raises the
        run's error if it failed. Waiting for a value raises DeadlineExceededError after `timeout`
        seconds; the run goes on then. Cancelling the task that waits cancels the run. To stop
        early, call `run.cancel()`. Values that are not read stay in this process's memory as long
        as the run.

        A loop pauses on the server while a few MiB of its values are unread, until `result` is
        awaited or the iterator is dropped. From then on at most
        `session.info.limits.in_flight_bytes` of values are kept here. If values had to be dropped,
        iterating raises LimitExceededError at the first missing one.

        Raises InvalidArgumentError for a run without `taps=`.
        """
        if not self._is_observed:
            raise not_observed()
        return TapIterator(self, self._shell, timeout, self._what)

    async def result(self, timeout: float | None = None) -> Outputs:
        """Wait for the outputs, by name: arrays, or tensors for outputs that are not fetched.

        A run that pauses goes on without pauses.

        Raises the run's error, or DeadlineExceededError after `timeout` seconds; the run goes on
        then. Cancelling the task that waits cancels the run.
        """
        deadline = Deadline(timeout, self._what)
        run = await self._run(deadline)
        procedure = collect(self._shell.core, run, cancel=False)
        arrays = await self._shell.resume(procedure, lambda: next(procedure), deadline)
        return {**arrays, **self._tensors}

    async def _run(self, deadline: Deadline) -> SentRun:
        if not self._sent.done():
            sent = Outcome()
            self._sent.add_done_callback(lambda _: sent.finish())
            try:
                await self._shell.wait(sent, deadline)
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._sent.cancelled():
            raise cancelled(self._what)
        return self._sent.result()

    def __await__(self) -> Generator[Any, Any, Outputs]:
        return self.result().__await__()

    async def exception(self, timeout: float | None = None) -> HeliographError | None:
        """Wait for the end of the run and return its error, or None if it succeeded.

        Raises DeadlineExceededError.
        """
        try:
            await self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        """Call function(self) on the event loop when the run has ended."""
        self._ended.add_callback(partial(function, self))

    @property
    def steps(self) -> int | None:
        """The number of steps of a loop that has ended, also one that failed or was cancelled.

        None before the end, or if the server could not tell. 1 for a run that succeeded.
        """
        sent = self._sent
        if not sent.done() or sent.cancelled() or sent.exception() is not None:
            return None
        return sent.result().steps

    def __repr__(self) -> str:
        return f"<RunFuture {'done' if self.done() else 'pending'}>"


class InlineFuture(RunFuture):
    """A run with one small message each way, which was sent."""

    def __init__(self, shell: AioShell, plan: InlinePlan, pending: Pending) -> None:
        self._shell, self._plan, self._pending = shell, plan, pending
        self._arrays: Outputs | None = None

    def done(self) -> bool:
        return self._pending.done

    def cancel(self) -> bool:
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._pending))
        return True

    def stop(self) -> bool:
        return not self.done()

    @property
    def steps(self) -> int | None:
        return 1 if self.done() and self._pending.error is None else None

    def taps(self, timeout: float | None = None) -> TapIterator:
        raise not_observed()

    async def result(self, timeout: float | None = None) -> Outputs:
        pending = self._pending
        if not pending.sequence:
            self._shell.flush()
        try:
            if timeout is not None:
                await self._shell.wait(pending, Deadline(timeout, self._plan.spec.what))
            elif not pending.done:
                await self._shell.done(pending)
            elif self._shell.core.is_full:
                # A caller that takes many results in a row has sent as many runs; let them leave in
                # between.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        if self._arrays is None:
            self._arrays = self._plan.arrays(pending)
        return dict(self._arrays)

    async def result_or_cancel(self, timeout: float | None) -> Outputs:
        """Return `result`; cancel a run that takes too long, since this is its only caller."""
        if timeout is None:
            return await self.result()
        try:
            return await self.result(timeout)
        except DeadlineExceededError:
            self.cancel()
            raise

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        self._pending.add_callback(partial(function, self))


class RepeatedFuture(RunFuture):
    """A run that is repeated when a device is lost.

    The call that awaits its result repeats it, in the order of the runs, within its own deadline.
    """

    def __init__(
        self,
        shell: AioShell,
        repeated: RepeatedRun,
        sent: asyncio.Future[SentRun],
        tensors: Callable[[SentRun], dict[str, Any]],
        deadline: Deadline,
        is_observed: bool,
    ) -> None:
        super().__init__(shell, sent, {}, repeated.plan._spec.what, is_observed)
        self._repeated, self._make, self._deadline = repeated, tensors, deadline
        self._made: Outputs | None = None

    def cancel(self) -> bool:
        if not self._sent.done() and self._sent.cancel():
            return True
        run = self._repeated.run
        if run is None or run.pending.done:
            return False
        self._shell.advance(lambda: self._shell.core.cancel(run.pending))
        return True

    def done(self) -> bool:
        run = self._repeated.run
        return super().done() if run is None else run.pending.done

    def stop(self) -> bool:
        was_sent = self._repeated.run is not None
        stopped = self._shell.advance(self._repeated.stop)
        return stopped if was_sent else super().stop()

    def _to_feed(self) -> Pending | None:
        self._shell.advance(self._repeated.was_fed)
        run = self._repeated.run
        return None if run is None else run.pending

    @property
    def steps(self) -> int | None:
        run = self._repeated.run
        return None if run is None else run.steps

    async def result(self, timeout: float | None = None) -> Outputs:
        return await self._result(timeout, cancel=False)

    async def result_or_cancel(self) -> Outputs:
        """Return `result`; cancel a run that takes too long, since this is its only caller."""
        return await self._result(None, cancel=True)

    async def _result(self, timeout: float | None, cancel: bool) -> Outputs:
        if self._made is None:
            seconds = self._repeated.seconds(timeout, self._deadline, cancel)
            deadline = Deadline(seconds, self._what)
            await self._run(deadline)
            procedure = self._repeated.finishing(cancel)
            run = await self._shell.resume(procedure, lambda: next(procedure), deadline)
            self._made = self._made or {**(run.results or {}), **self._make(run)}
        return dict(self._made)


class FeedFuture:
    """New values on their way to a step of a running loop. Made by `loop.feed`.

    `await future` or `await future.result(timeout)` waits for the number of the step.
    """

    def __init__(self, shell: AioShell) -> None:
        self._shell = shell
        self._pending: Pending | None = None
        self._ended = Outcome()

    def _follow(self, pending: Pending) -> None:
        self._pending = pending
        pending.add_callback(self._ended.finish)

    def done(self) -> bool:
        """True if a step took the values, or none will."""
        return self._ended.done

    async def result(self, timeout: float | None = None) -> int:
        """Wait until a step takes the values, and return its number, from 0.

        The step may still fail or be cancelled: `loop.steps` counts those that were completed.

        Raises LoopEndedError if the loop ended before, or DeadlineExceededError after `timeout`
        seconds; the values stay on their way then.
        """
        if not self._ended.done:
            await self._shell.wait(self._ended, Deadline(timeout, "a feed of a loop"))
        self._ended.raise_error()
        pending = self._pending
        assert pending is not None
        self._shell.advance(lambda: self._shell.core.raise_error(pending))
        return step_of(pending)

    def __await__(self) -> Generator[Any, Any, int]:
        return self.result().__await__()

    async def exception(self, timeout: float | None = None) -> HeliographError | None:
        """Wait until a step took the values, and return None, or the error.

        Raises DeadlineExceededError.
        """
        try:
            await self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def __repr__(self) -> str:
        return f"<FeedFuture {'done' if self.done() else 'pending'}>"


class TapIterator:
    """The observed values of a run, in the order in which they come.

    A run that pauses goes on when the next value is requested, or when the iterator is dropped.
    """

    def __init__(self, future: RunFuture, shell: AioShell, timeout: float | None, what: What) -> None:
        self._future, self._shell, self._timeout, self._what = future, shell, timeout, what
        self._run: SentRun | None = None

    def __aiter__(self) -> TapIterator:
        return self

    async def __anext__(self) -> Tap:
        deadline = Deadline(self._timeout, self._what)
        self._run = await self._future._run(deadline)
        procedure = next_tap(self._shell.core, self._run)
        found = await self._shell.resume(procedure, lambda: next(procedure), deadline)
        if found is None:
            raise StopAsyncIteration
        return found

    def __repr__(self) -> str:
        return f"<TapIterator {'ended' if self._future.done() else 'open'}>"

    def __del__(self) -> None:
        if self._run is not None:
            self._run.let_go()
