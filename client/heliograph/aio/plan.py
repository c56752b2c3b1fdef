"""`hg.aio.Plan`: a compiled graph that can run many times."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from heliograph._base.named_inputs import names_inputs
from heliograph._base.placement import Bindings, PlanArguments, UpdateOptions
from heliograph._base.plan import Fetch, Inputs, Out, Outputs, PlanBase, RunRequest
from heliograph._base.session import updating
from heliograph._base.streams import StreamBase
from heliograph.aio.run_future import InlineFuture, RunFuture, repeat, send
from heliograph.aio.tensor import Tensor
from heliograph.graph.builder import Graph
from heliograph.procedures.checkpoint import Checkpoint
from heliograph.procedures.run import Carries, Fed, RunOutput, run_once
from heliograph.procedures.taps import Taps
from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from heliograph.explain.explanation import Explanation
    from heliograph.transport.aio import AioShell


class Plan(PlanBase):
    """A graph compiled for a set of devices. Made by `session.compile`."""

    _shell: AioShell

    @overload
    async def run(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Literal[True] = True,
        out: None = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> dict[str, np.ndarray[Any, Any]]: ...
    @overload
    async def run(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Literal[False],
        out: Out = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> dict[str, Tensor]: ...
    @overload
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
    ) -> Outputs: ...
    @names_inputs
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
    ) -> Outputs:
        """Run the plan and wait for its outputs.

        Args:
            inputs: Inputs by name, here or as keywords. Arrays (or lists) must have exactly the
                plan's shapes and data types; only float64 is cast to f32, with a note the first
                time. Tensors stay where they are.
            fetch: True returns all outputs as arrays, and False as tensors that stay on the server.
                A collection of names returns those as arrays, and no others.
            out: Existing tensors by output name. The outputs are written to them, and they are
                returned.
            timeout: Seconds to wait; None means no limit.
            stream: The stream whose order the run joins (default: the session's own).
            copy: With False, arrays are sent without a copy, and must not change until the run is
                done.

        Returns the outputs by name.

        Raises InvalidInputError, the run's error, or DeadlineExceededError after `timeout` seconds.
        The run is cancelled then, and also by cancelling the task.
        """
        if self._group is not None:
            request = RunRequest("run", inputs, keywords, fetch, out, timeout, stream, copy)
            return await repeat(self, request).result_or_cancel()
        is_plain = fetch is True and out is None and stream is None
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=True)) is not None:
            return await InlineFuture(self._shell, *inline).result_or_cancel(timeout)
        request = RunRequest("run", inputs, keywords, fetch, out, timeout, stream, copy)
        submission = self._submission(request)
        run = await self._shell.drive(run_once(self._shell.core, submission), timeout, self._spec.what)
        return {**(run.results or {}), **self._tensors(run.kept, out)}

    @names_inputs
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
        """Send a run like `run`, without waiting for its outputs.

        When this returns, the caller may overwrite its arrays; with `copy=False` only once the
        future is done. The run fails if it is not done `timeout` seconds after it arrived at the
        server.

        Under asyncio later commands of the session come after this run. If the run must wait for
        credit, or for a compile for other taps, a task sends it; arrays are copied then, unless
        `copy=False`.

        Args:
            taps: Nodes to observe, by patterns of their names as in fnmatch, by values of the graph
                that was compiled, or by functions of a node (`number`, `name`, `op`, `shape`,
                `dtype`). `future.taps()` yields their values while the run goes on. A new set of
                nodes compiles the plan once more first; the last few of these plans are kept.
            pause: Whether the run waits after each observed node until the next value is requested.
                Work sent later on its stream waits as well. Without it a run never waits for its
                reader.

        The other arguments are those of `run`. Returns a future of the outputs.

        Raises InvalidArgumentError for a pattern that matches no node, and the errors of
        `session.compile`. Raises LimitExceededError if the observed values exceed three quarters of
        `session.info.limits.in_flight_bytes`, for all observed runs together, or while paused runs
        or loops whose taps are not read hold that room.
        """
        is_plain = fetch is True and out is None and stream is None and taps is None and not pause
        if is_plain and self._group is None:
            inline = self._send_inline(inputs, keywords, timeout, waits=False)
            if inline is not None:
                return InlineFuture(self._shell, *inline)
        observed = self._observed(taps, pause)
        request = RunRequest("submit", inputs, keywords, fetch, out, timeout, stream, copy, observed)
        return send(self, request) if self._group is None else repeat(self, request)

    @names_inputs
    def loop(
        self,
        inputs: Inputs = None,
        /,
        *,
        steps: int,
        carry: Carries = None,
        until: str | None = None,
        taps: Taps = None,
        feed: Fed = None,
        gather: float | None = None,
        fetch: Fetch = True,
        out: Out = None,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> RunFuture:
        """Run the plan repeatedly on the server, in one message.

        The loop ends after `steps` steps or earlier:

        - after the first step in which the output `until` is not zero;
        - when a step fails, with its error, which names the step, counted from 0;
        - `timeout` seconds after it arrived at the server, with DeadlineExceededError;
        - after its present step with `future.stop()`, and with CancelledError with
          `future.cancel()`.

        Args:
            inputs: Inputs of the first step, as in `run`. Inputs that are not carried stay the same
                for all steps. An input tensor is never written. Variables keep the values that
                steps assign.
            steps: The most steps, 1 to 1,000,000,000.
            carry: Names of inputs (one or several) by the name of the output that they take from
                the previous step. Both have the same shape and data type.
            until: The name of an output of one element, bool or integer, that ends the loop when it
                is not zero.
            taps: Names of outputs, whose values come after each step, and patterns and functions of
                nodes as in `submit`. A string that equals the name of an output means the output.
                `future.taps()` yields the values, each with its `step`. The loop pauses while too
                much is unread, see `RunFuture.taps`; work sent later on its stream waits as well.
                Several such loops share the room for values sent ahead.
            feed: Names of inputs (one or several) that `future.feed` may give new values while the
                loop runs.
            gather: Seconds, 0.001 to 1, for which small values of outputs may wait for others, for
                fewer messages. The default is 5 ms behind a first one that does not wait; with
                `feed` none does.

        The other arguments are those of `submit`. Returns a future of the last step's outputs,
        which are bit for bit those of as many calls of `run`. `future.steps` counts the steps, also
        of a loop that failed.

        Raises the errors of `submit`, InvalidArgumentError for an unknown name, types that differ,
        an input that is carried twice or a bad number of steps, UnsupportedError if the server has
        no loops, and LimitExceededError if there is no room for the loop's taps until other taps
        are read.
        """
        looping, observed = self._looping(steps, carry, until, taps, feed, gather)
        request = RunRequest("loop", inputs, keywords, fetch, out, timeout, stream, copy, observed, looping)
        return send(self, request) if self._group is None else repeat(self, request)

    def _tensors(self, kept: list[RunOutput], out: Out) -> dict[str, Any]:
        made = [one for one in kept if one.handle]
        new = {one.port.name: Tensor(self._shell, one.handle, one.port.type, self.device) for one in made}
        return {**new, **(out or {})}

    async def update(
        self,
        graph: Graph,
        *,
        weights: Bindings = None,
        variables: Bindings = None,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> None:
        """Replace the plan's graph by another one, on the same devices.

        The plan keeps its memory where that is large enough, so this costs less than `compile` for
        graphs that differ little. Runs that were sent before use the old graph.

        Arguments and errors are those of `session.compile`. If the server refuses, the plan is
        unchanged. If the outcome is unknown (DeadlineExceededError, a cancelled task), the plan is
        freed.
        """
        given = PlanArguments.of("update", None, weights, variables, options)
        procedure = updating(self._shell, self, graph, given, self._progress)
        await self._shell.drive(procedure, timeout, lambda: f"updating the plan to {graph!r}")

    async def explain(self, timeout: float | None = None, *, measure: bool | None = None) -> Explanation:
        """Return where the nodes run and why, what is copied, and the time of the last run.

        Args:
            timeout: Seconds to wait; None means no limit.
            measure: True measures the time of each step of the nodes in the runs from now on, in
                place of what was measured before, and False ends that. Later explanations have the
                mean times, as `steps`. None changes nothing.

        Raises UnknownHandleError if the plan was freed, and DeadlineExceededError.
        """
        explaining = self._explaining(measure)
        return await self._shell.drive(explaining, timeout, lambda: f"explaining {self!r}")

    @names_inputs
    async def profile(
        self, inputs: Inputs = None, /, *, runs: int = 10, timeout: float | None = None, **keywords: Any
    ) -> Explanation:
        """Run the plan and return its explanation with the mean time of each step, as `steps`.

        A first run, which may compile kernels, is not measured. Runs assign variables as usual. A
        GPU launches the steps of measured runs one by one.

        Args:
            inputs: As in `run`.
            runs: The number of measured runs.
            timeout: Seconds to wait for each run.

        Raises InvalidArgumentError for less than one run, and the errors of `run`.
        """
        if runs < 1:
            raise InvalidArgumentError(f"a profile of {runs} runs", advice="measure 1 run or more")
        await self.run(inputs, fetch=False, timeout=timeout, **keywords)
        await self.explain(timeout, measure=True)
        try:
            for _ in range(runs):
                await self.run(inputs, fetch=False, timeout=timeout, **keywords)
        finally:
            found = await self.explain(timeout, measure=False)
        return found

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables that the plan reads or writes, as tensors by name."""
        return {
            one.port.name: Tensor(
                self._shell, one.tensor, one.port.type, one.device or self.device, owned=False
            )
            for one in self._spec.info.variables
        }

    async def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """Return the variables' elements by name, as they are after everything sent before.

        The result holds arrays in this process's memory; its `save` writes a file. With
        `on_loss="rebuild"` it has the variables of all plans that share one with this plan, and
        waits for their runs. The plans continue from it when a device is lost, and do not replay
        earlier runs. Its arrays are read-only then.

        Raises the error of the work that computes a variable, and DeadlineExceededError.
        """
        what = lambda: f"a checkpoint of {self!r}"  # noqa: E731
        return await self._shell.drive(self._checkpointing(), timeout, what)

    async def restore(self, checkpoint: Checkpoint, timeout: float | None = None) -> None:
        """Set the variables to a checkpoint's values, after everything sent before.

        Returns when it is done. The checkpoint may be from another session, and may have more
        variables. With `on_loss="rebuild"` this applies to all plans that share variables with this
        one. They are placed again if a device was lost, and continue from here at the next loss.

        Raises InvalidArgumentError for a checkpoint that lacks one of the variables or has other
        types, and DeadlineExceededError.
        """
        await self._shell.drive(self._restoring(checkpoint), timeout, lambda: f"restoring {self!r}")
