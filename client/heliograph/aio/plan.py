"""`hg.aio.Plan`: a compiled graph, run as often as one likes."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from heliograph._base.pins import MemoryLimits, Pins
from heliograph._base.placement import Bindings, BufferTypes, PlanArguments
from heliograph._base.plan import Fetch, Inputs, Out, Outputs, PlanBase, RunRequest
from heliograph._base.session import updating
from heliograph._base.split_buffer_type import Splits
from heliograph._base.streams import StreamBase
from heliograph.aio.run_future import InlineFuture, RunFuture, repeat, send
from heliograph.aio.tensor import Tensor
from heliograph.graph.builder import Graph
from heliograph.procedures.checkpoint import Checkpoint
from heliograph.procedures.run import Carries, WantedValue, run_once
from heliograph.procedures.taps import Taps

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
        """Runs the plan and waits for its outputs, by name.

        Inputs are given by name, in a mapping or as keywords: arrays (or lists) of exactly the plan's
        shapes and data types, or tensors, which stay where they are. With `fetch=False` the outputs
        stay on the server as tensors; a collection of names fetches only those. `out`: existing tensors by
        the names of outputs, which are written to them and returned as them.

        Raises InvalidInputError, the run's error, DeadlineExceededError after `timeout` seconds (the run
        is cancelled then, as it is by cancelling the task).
        """
        if self._group is not None:
            request = RunRequest("run", inputs, keywords, fetch, out, timeout, stream, copy)
            return await repeat(self, request).result_or_cancel()
        is_plain = fetch is True and out is None and stream is None
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=True)) is not None:
            return await InlineFuture(self._shell, *inline).result_or_cancel(timeout)
        request = RunRequest("run", inputs, keywords, fetch, out, timeout, stream, copy)
        asked = self._submission(request)
        run = await self._shell.drive(run_once(self._shell.core, asked), timeout, self._spec.what)
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
        """As `run`, without waiting for the outputs: a future.

        When it returns, the caller may overwrite its arrays, unless it passed `copy=False`: then only
        after the future is done. The run fails if it is not done `timeout` seconds after it arrived.

        Under asyncio later commands of the session come after this run. Where credit, or a compile for other
        taps, must be waited for, a task sends the run; arrays are copied then, unless `copy=False`.

        `taps`: nodes that are observed, by patterns of their names as in fnmatch, or by functions of a node
        (`number`, `name`, `op`, `shape`, `dtype`); `future.taps()` gives their values while the run goes on.
        For other nodes than before the plan is compiled once more first; the last few are kept. The run waits
        for nobody, unless with `pause`: then after each observed node until the next is asked for, and what
        was sent behind it on its stream waits with it.

        Raises InvalidArgumentError for a pattern that no node matches, LimitExceededError for more bytes
        than the server holds (three quarters of `session.info.limits.in_flight_bytes` for all observed runs
        together; there may also be no room as long as runs that pause, or loops, wait for who takes their
        taps), and what `session.compile` does.
        """
        is_plain = fetch is True and out is None and stream is None and taps is None and not pause
        if is_plain and self._group is None:
            inline = self._send_inline(inputs, keywords, timeout, waits=False)
            if inline is not None:
                return InlineFuture(self._shell, *inline)
        observed = self._observed(taps, pause)
        request = RunRequest("submit", inputs, keywords, fetch, out, timeout, stream, copy, observed)
        return send(self, request) if self._group is None else repeat(self, request)

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
        """Runs the plan again and again on the server, in one message: a future, as of `submit`.

        `carry`: which outputs of a step are inputs of the next, names of inputs (or several) by the names of
        outputs; what is carried has the same shape and data type, and `inputs` has it for the first step. The
        other inputs stay as they are, and a tensor that is an input is not written. Variables keep what
        steps assign to them.

        The loop ends after `steps` steps at most; after the first in which the output `until`, of one element
        of bool or integers, is not zero; when a step fails, with its error, which names the step, from 0;
        `timeout` seconds after it arrived, with DeadlineExceededError; or with `cancel()`. The result is the
        outputs of the last step, bit for bit what `run` called so often gives; `future.steps` tells how many
        there were, also of a loop that failed.

        `taps`: what `future.taps()` gives while it goes on, each with its `step`: names of outputs, whose
        values come after each step, and patterns and functions of nodes as in `submit` (what is exactly the
        name of an output means the output). It waits while too much is unread, see `RunFuture.taps`, and what
        was sent behind it on its stream waits with it. The more such loops are under way, the less of each is
        sent ahead; LimitExceededError where another has no room until somebody takes their taps.

        Other arguments and errors are those of `submit`. InvalidArgumentError also for a name that is none,
        types that differ, an input that is carried twice, and steps that are not 1 to 1,000,000,000;
        UnsupportedError for a server that knows no loops.
        """
        looping, observed = self._looping(steps, carry, until, taps)
        request = RunRequest("loop", inputs, keywords, fetch, out, timeout, stream, copy, observed, looping)
        return send(self, request) if self._group is None else repeat(self, request)

    def _tensors(self, kept: list[WantedValue], out: Out) -> dict[str, Any]:
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
        """Becomes the plan of another graph, on the same devices, and takes over the memory where it
        suffices: cheaper than compiling anew for graphs that differ a little.

        Arguments and errors are those of `session.compile`. When the server refuses, the plan is what it
        was. When nobody knows whether it did it (DeadlineExceededError, a cancelled task), the plan is
        freed. Runs that were sent before are those of the old graph.
        """
        given = PlanArguments(None, fusion, threads, weights, variables, pins, memory, split, buffer_types)
        procedure = updating(self._shell, self, graph, given, self._progress)
        await self._shell.drive(procedure, timeout, lambda: f"updating the plan to {graph!r}")

    async def explain(self, timeout: float | None = None) -> Explanation:
        """Where its nodes run and why, what is copied between devices, and how long the last run took.

        Raises UnknownHandleError when it was freed, DeadlineExceededError.
        """
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
        """The variables' elements by name, as they are after everything sent before: arrays in this process's
        memory, and `save`, for a file.

        With `on_loss="rebuild"` it has the variables of all plans that share some with this one, waits for
        their runs, and is what they go on from when a device is lost: runs before are not replayed. Its
        arrays are read-only then. Raises the error of what was to compute a variable, DeadlineExceededError.
        """
        what = lambda: f"a checkpoint of {self!r}"  # noqa: E731
        return await self._shell.drive(self._checkpointing(), timeout, what)

    async def restore(self, checkpoint: Checkpoint, timeout: float | None = None) -> None:
        """Gives the variables what they had, behind everything sent before; returns when that is done. The
        checkpoint may be of another session, or have more variables.

        With `on_loss="rebuild"` that goes for all plans that share variables with this one, which are placed
        again if a device was lost, and go on from there at the next loss.

        Raises InvalidArgumentError for a checkpoint without one of the variables, or of other types, and
        DeadlineExceededError.
        """
        await self._shell.drive(self._restoring(checkpoint), timeout, lambda: f"restoring {self!r}")
