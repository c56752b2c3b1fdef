"""Plans and runs for asyncio; as `heliograph.plan`."""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph._arguments import timeout_ms
from heliograph._deadline import Deadline
from heliograph._effects import Procedure
from heliograph._gates import Gate
from heliograph._inline import InlinePlan
from heliograph._loops import Carries
from heliograph._outcome import Outcome, Pending
from heliograph._pins import MemoryLimits, Pins
from heliograph._placing import BufferTypes, Placing
from heliograph._plans import Fetch, Inputs, Out, PlanBase, Submission
from heliograph._procedures import Sending
from heliograph._rebuilding import Repeated
from heliograph._running import Bound, Observed, Run, Wanted, collect, fits_inline, run_once
from heliograph._sessions import Bindings, updating
from heliograph._split_buffer_type import Splits
from heliograph._streams import StreamBase, stream_handle
from heliograph._taps import Tap, Taps, next_tap, not_observed
from heliograph._words import cancelled
from heliograph.aio.tensor import Tensor
from heliograph.builder import Graph
from heliograph.checkpoints import Checkpoint
from heliograph_proto.commands import Loop
from heliograph_proto.errors import DeadlineExceededError, HeliographError

if TYPE_CHECKING:
    from heliograph._aio import AioShell
    from heliograph.explaining import Explanation


class RunFuture:
    """A run or a loop that was sent, or waits to be; `await future` or `await future.result(timeout)`."""

    def __init__(
        self,
        shell: AioShell,
        sent: asyncio.Future[Run],
        tensors: dict[str, Any],
        what: Callable[[], str],
        is_observed: bool = False,
    ) -> None:
        self._shell, self._sent, self._tensors, self._what = shell, sent, tensors, what
        self._is_observed = is_observed
        self._ended = Outcome()
        sent.add_done_callback(self._was_sent)
        if sent.done():
            self._was_sent(sent)

    def _was_sent(self, sent: asyncio.Future[Run]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            # Not to a method of this object: a run that pauses goes on when nobody has its future any more.
            sent.result().pending.add_callback(self._ended.finish)
        else:
            self._ended.finish()

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._ended.done

    def cancel(self) -> bool:
        """Asks the server to cancel the run; False if it has ended already."""
        if self.done():
            return False
        if not self._sent.cancel():
            pending = self._sent.result().pending
            self._shell.advance(lambda: self._shell.core.cancel(pending))
        return True

    def taps(self, timeout: float | None = None) -> TapIterator:
        """As hg.RunFuture.taps: `async for tap in future.taps()`. Cancelling the task that waits cancels the
        run."""
        if not self._is_observed:
            raise not_observed()
        return TapIterator(self, self._shell, timeout, self._what)

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The outputs by name: arrays, or tensors if the run was not to fetch them. A run that pauses goes on
        without pauses.

        Raises the run's error, or DeadlineExceededError (the run goes on then). Cancelling the task
        that waits cancels the run.
        """
        deadline = Deadline(timeout, self._what)
        run = await self._run(deadline)
        procedure = collect(self._shell.core, run, cancel=False)
        arrays = await self._shell.resume(procedure, lambda: next(procedure), deadline)
        return {**arrays, **self._tensors}

    async def _run(self, deadline: Deadline) -> Run:
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

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        return self.result().__await__()

    async def exception(self, timeout: float | None = None) -> HeliographError | None:
        """The run's error, or None when it went well. Raises DeadlineExceededError."""
        try:
            await self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        """Calls function(self) on the loop when the run has ended."""
        self._ended.add_callback(partial(function, self))

    @property
    def steps(self) -> int | None:
        """As hg.RunFuture.steps."""
        sent = self._sent
        if not sent.done() or sent.cancelled() or sent.exception() is not None:
            return None
        return sent.result().steps

    def __repr__(self) -> str:
        return f"<RunFuture {'done' if self.done() else 'pending'}>"


class InlineFuture(RunFuture):
    """A run that is one small message each way, and was sent."""

    def __init__(self, shell: AioShell, plan: InlinePlan, pending: Pending) -> None:
        self._shell, self._plan, self._pending = shell, plan, pending
        self._arrays: dict[str, Any] | None = None

    def done(self) -> bool:
        return self._pending.done

    def cancel(self) -> bool:
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._pending))
        return True

    def taps(self, timeout: float | None = None) -> TapIterator:
        raise not_observed()

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        pending = self._pending
        if not pending.sequence:
            self._shell.flush()
        try:
            if timeout is not None:
                await self._shell.wait(pending, Deadline(timeout, self._plan.spec.what))
            elif not pending.done:
                await self._shell.done(pending)
            elif self._shell.core.is_full:
                # Who takes many results in a row sends as many runs: they leave in between.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if pending.error is not None:
            self._shell.advance(lambda: self._shell.core.raise_error(pending))
        if self._arrays is None:
            self._arrays = self._plan.arrays(pending)
        return dict(self._arrays)

    async def result_or_cancel(self, timeout: float | None) -> dict[str, Any]:
        """As `result`, where nobody else has this future: a run that takes too long is cancelled."""
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
    """As hg's: a run of a plan that is placed again when a device is lost."""

    def __init__(
        self,
        shell: AioShell,
        repeated: Repeated,
        sent: asyncio.Future[Run],
        tensors: Callable[[Run], dict[str, Any]],
        deadline: Deadline,
        is_observed: bool,
    ) -> None:
        super().__init__(shell, sent, {}, repeated.plan._spec.what, is_observed)
        self._repeated, self._make, self._deadline = repeated, tensors, deadline
        self._made: dict[str, Any] | None = None

    def cancel(self) -> bool:
        if not self._sent.done() and self._sent.cancel():
            return True
        run = self._repeated.run
        if run is None or run.pending.done:
            return False
        self._shell.advance(lambda: self._shell.core.cancel(run.pending))
        return True

    @property
    def steps(self) -> int | None:
        run = self._repeated.run
        return None if run is None else run.steps

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        return await self._result(timeout, cancel=False)

    async def result_or_cancel(self) -> dict[str, Any]:
        """As `result`, where nobody else has this future: a run that takes too long is cancelled."""
        return await self._result(None, cancel=True)

    async def _result(self, timeout: float | None, cancel: bool) -> dict[str, Any]:
        if self._made is None:
            seconds = self._repeated.seconds(timeout, self._deadline, cancel)
            deadline = Deadline(seconds, self._what)
            await self._run(deadline)
            procedure = self._repeated.finishing(cancel)
            run = await self._shell.resume(procedure, lambda: next(procedure), deadline)
            self._made = self._made or {**(run.results or {}), **self._make(run)}
        return dict(self._made)


class TapIterator:
    """The observed values of a run, as they come; as hg's."""

    def __init__(
        self, future: RunFuture, shell: AioShell, timeout: float | None, what: Callable[[], str]
    ) -> None:
        self._future, self._shell, self._timeout, self._what = future, shell, timeout, what
        self._run: Run | None = None

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


class Plan(PlanBase):
    """A graph compiled for a set of devices; as hg.Plan, with `run`, `update` and `checkpoint` awaited."""

    _shell: AioShell

    async def run(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        out: Out = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> dict[str, Any]:
        """As hg.Plan.run; cancelling the task cancels the run."""
        if self._group is not None:
            made = self._repeated("run", inputs, keywords, fetch, out, timeout, stream, copy)
            return await made.result_or_cancel()
        is_plain = fetch is True and out is None and stream is None
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=True)) is not None:
            return await InlineFuture(self._shell, *inline).result_or_cancel(timeout)
        bound = self._bind(inputs, keywords, "run")
        how = Sending(stream_handle(self._shell, stream), observed=True, keep=not copy)
        arguments = self._running(bound, fetch, out, timeout, how)
        run = await self._shell.drive(run_once(*arguments), timeout, self._spec.what)
        return {**(run.results or {}), **self._tensors(run.kept, out)}

    def submit(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        out: Out = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        taps: Taps = None,
        pause: bool = False,
        **keywords: Any,
    ) -> RunFuture:
        """As hg.Plan.submit; a plain call. Later commands of the session come after this run.

        Where credit, or a compile for other taps, must be waited for, a task sends the run; arrays are copied
        then, unless `copy=False`.
        """
        if self._group is not None:
            observed = self._observed(taps, pause)
            return self._repeated("submit", inputs, keywords, fetch, out, timeout, stream, copy, observed)
        is_plain = fetch is True and out is None and stream is None
        is_plain = is_plain and taps is None and not pause
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=False)) is not None:
            return InlineFuture(self._shell, *inline)
        observed = self._observed(taps, pause)
        return self._sent(inputs, keywords, fetch, out, timeout, stream, copy, observed, None)

    def loop(
        self,
        inputs: Inputs = None,
        /,
        *,
        steps: int,
        carry: Carries = None,
        until: str | None = None,
        taps: Taps = None,
        fetch: Fetch = True,
        out: Out = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> RunFuture:
        """As hg.Plan.loop; a plain call, as `submit`."""
        looping, observed = self._looping(steps, carry, until, taps)
        if self._group is not None:
            how = ("loop", inputs, keywords, fetch, out, timeout, stream, copy, observed, looping)
            return self._repeated(*how)
        return self._sent(inputs, keywords, fetch, out, timeout, stream, copy, observed, looping)

    def _repeated(
        self,
        method: str,
        inputs: Inputs,
        keywords: dict[str, Any],
        fetch: Fetch,
        out: Out,
        timeout: float | None,
        stream: StreamBase | None,
        copy: bool,
        observed: Observed | None = None,
        loop: Loop | None = None,
    ) -> RepeatedFuture:
        """Sends a run that is repeated when a device is lost, or sees to it that it will be."""
        number = stream_handle(self._shell, stream)
        given = (method, inputs, keywords, fetch, out, timeout, number, copy, observed, loop)
        repeated = self._ask(*given)
        deadline = Deadline(timeout, self._spec.what)
        sent = self._begin(repeated, deadline)
        make = lambda run: self._tensors(run.kept, out)  # noqa: E731
        return RepeatedFuture(self._shell, repeated, sent, make, deadline, observed is not None)

    def _begin(self, repeated: Repeated, deadline: Deadline) -> asyncio.Future[Run]:
        """Sends it at once if nothing is before it; else a task does."""
        shell, procedure = self._shell, repeated.sending()
        sent: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
        try:
            effect = shell.advance(lambda: next(procedure))
        except StopIteration:
            assert repeated.run is not None
            sent.set_result(repeated.run)
            return sent

        async def rest() -> Run:
            await shell.resume(procedure, lambda: effect, deadline)
            assert repeated.run is not None
            return repeated.run

        return shell.spawn(rest())

    def _sent(
        self,
        inputs: Inputs,
        keywords: dict[str, Any],
        fetch: Fetch,
        out: Out,
        timeout: float | None,
        stream: StreamBase | None,
        copy: bool,
        observed: Observed | None,
        loop: Loop | None,
    ) -> RunFuture:
        """Sends a run or a loop, or sees to it that it will be."""
        method = "submit" if loop is None else "loop"
        core, bound = self._shell.core, self._bind(inputs, keywords, method)
        kept_alive = (inputs, keywords, out)
        if copy and (observed is not None or not fits_inline(core, bound)):
            bound = [one if isinstance(one, int) else one.copy() for one in bound]
        where = stream_handle(self._shell, stream)
        gate = core.open_gate()
        how = Sending(where, gate, observed=True, keep=True)
        try:
            arguments = self._running(bound, fetch, out, timeout, how)
        except BaseException:
            self._shell.advance(lambda: core.close_gate(gate))
            raise
        sending = self._submitting(arguments, observed, loop)
        sent = self._send(sending, gate, Deadline(timeout, self._spec.what), kept_alive)
        kept = self._tensors(arguments[3][1], out)
        return RunFuture(self._shell, sent, kept, self._spec.what, observed is not None)

    def _send(
        self, procedure: Procedure[Run], gate: Gate, deadline: Deadline, kept_alive: object
    ) -> asyncio.Future[Run]:
        """Sends at once what can be; the rest in a task."""
        shell = self._shell
        try:
            effect = shell.advance(lambda: next(procedure))
        except StopIteration as stop:
            shell.advance(lambda: shell.core.close_gate(gate))
            sent: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
            sent.set_result(stop.value)
            return sent
        except BaseException:
            shell.advance(lambda: shell.core.close_gate(gate))
            raise

        async def rest() -> Run:
            try:
                return await shell.resume(procedure, lambda: effect, deadline)
            finally:
                shell.advance(lambda: shell.core.close_gate(gate))
                # Tensors that were collected before the run was sent would be freed before it.
                del_later = kept_alive  # noqa: F841

        return shell.spawn(rest())

    def _running(
        self, bound: list[Bound], fetch: Fetch, out: Out, timeout: float | None, how: Sending
    ) -> Submission:
        """The arguments of `submit` and `run_once`, checked."""
        self._live_handle  # noqa: B018 - raises when it was freed
        chosen = self._choose(fetch, out)
        shell = self._shell
        return (shell.core, self._spec, bound, chosen, how, timeout_ms(timeout), shell.release)

    def _tensors(self, kept: list[Wanted], out: Out) -> dict[str, Any]:
        """The outputs that stay on the server."""
        made = [one for one in kept if one.handle]
        new = {one.port.name: Tensor(self._shell, one.handle, one.port.type, self.device) for one in made}
        return {**new, **(out or {})}

    async def update(
        self,
        graph: Graph,
        *,
        fusion: bool = True,
        threads: int = 0,
        weights: Bindings = None,
        variables: Bindings = None,
        pins: Pins = None,
        memory: MemoryLimits = None,
        split: Splits = None,
        buffer_types: BufferTypes = None,
        timeout: float | None = None,
    ) -> None:
        """As hg.Plan.update; cancelling the task frees the plan."""
        placing = Placing(pins, memory, split, buffer_types)
        procedure = updating(
            self._shell, self, graph, fusion, threads, weights, variables, placing, self._progress
        )
        await self._shell.drive(procedure, timeout, lambda: f"updating the plan to {graph!r}")

    async def explain(self, timeout: float | None = None) -> Explanation:
        """As hg.Plan.explain."""
        return await self._shell.drive(self._explaining(), timeout, lambda: f"explaining {self!r}")

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables that the plan reads or writes, by name, as tensors."""
        return {
            one.port.name: Tensor(
                self._shell, one.tensor, one.port.type, one.device or self.device, owned=False
            )
            for one in self._spec.info.variables
        }

    async def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """As hg.Plan.checkpoint."""
        what = lambda: f"a checkpoint of {self!r}"  # noqa: E731
        return await self._shell.drive(self._checkpointing(), timeout, what)

    async def restore(self, checkpoint: Checkpoint, timeout: float | None = None) -> None:
        """As hg.Plan.restore."""
        await self._shell.drive(self._restoring(checkpoint), timeout, lambda: f"restoring {self!r}")
