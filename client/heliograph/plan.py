"""`hg.Plan`: a compiled graph, run as often as one likes; `hg.RunFuture`: a run under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from heliograph._arguments import timeout_ms
from heliograph._deadline import Deadline
from heliograph._inline import InlinePlan
from heliograph._loops import Carries
from heliograph._outcome import Pending
from heliograph._pins import MemoryLimits, Pins
from heliograph._placing import BufferTypes, Placing
from heliograph._plans import Fetch, Inputs, Out, PlanBase, Submission
from heliograph._procedures import Sending
from heliograph._rebuilding import Repeated
from heliograph._running import Observed, Run, collect, run_once
from heliograph._sessions import Bindings, updating
from heliograph._sharing import submit_part
from heliograph._split_buffer_type import Splits
from heliograph._streams import StreamBase, stream_handle
from heliograph._taps import Tap, Taps, next_tap, not_observed
from heliograph._words import What
from heliograph.builder import Graph
from heliograph.checkpoints import Checkpoint
from heliograph.errors import DeadlineExceededError, HeliographError
from heliograph.tensor import Tensor
from heliograph_proto.commands import Loop

if TYPE_CHECKING:
    from heliograph._blocking import BlockingShell
    from heliograph.explaining import Explanation
    from heliograph_proto.commands import Bytes
    from heliograph_proto.description import PlanReport

Outputs = dict[str, Any]


class RunFuture:
    """A run or a loop that was sent; `result` waits for its outputs."""

    def __init__(self, shell: BlockingShell, run: Run, tensors: Mapping[str, Any], what: What) -> None:
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
        repeated: Repeated,
        tensors: Callable[[Run], dict[str, Any]],
        timeout: float | None,
    ) -> None:
        self._shell, self._repeated, self._make = shell, repeated, tensors
        self._what = repeated.plan._spec.what
        self._made: Outputs | None = None
        self._deadline = Deadline(timeout, self._what)

    @property
    def _run(self) -> Run:  # type: ignore[override]
        run = self._repeated.run
        assert run is not None, "it was sent"
        return run

    def sent(self) -> Self:
        """Sends it, in its order."""
        self._shell.drive(self._repeated.sending(), self._deadline.remaining(), self._what)
        return self

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

    def _keep(self, run: Run) -> None:
        """Makes the tensors once, whoever asks: each frees its handle in the end."""
        if self._made is None:
            self._made = {**(run.results or {}), **self._make(run)}


class TapIterator:
    """The observed values of a run, as they come. A run that pauses goes on when the next one is asked for,
    or nobody will ask."""

    def __init__(self, shell: BlockingShell, run: Run, timeout: float | None, what: What) -> None:
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


class Plan(PlanBase):
    """A graph compiled for a set of devices. Made by `session.compile`."""

    _shell: BlockingShell

    def run(
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
        is cancelled then, as it is by Ctrl-C).
        """
        if self._group is not None:
            return self._repeated(
                "run", inputs, keywords, fetch, out, timeout, stream, copy
            ).result_or_cancel()
        is_plain = fetch is True and out is None and stream is None
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=True)) is not None:
            return InlineFuture(self._shell, *inline).result_or_cancel(timeout)
        arguments = self._running("run", inputs, keywords, fetch, out, timeout, stream, copy)
        run = self._shell.drive(run_once(*arguments), timeout, self._spec.what)
        return {**(run.results or {}), **self._tensors(run, out)}

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
        if self._group is not None:
            observed = self._observed(taps, pause)
            how = ("submit", inputs, keywords, fetch, out, timeout, stream, copy, observed)
            return self._repeated(*how).sent()
        is_plain = fetch is True and out is None and stream is None
        is_plain = is_plain and taps is None and not pause
        if is_plain and (inline := self._send_inline(inputs, keywords, timeout, waits=False)) is not None:
            return InlineFuture(self._shell, *inline)
        observed = self._observed(taps, pause)
        arguments = self._running("submit", inputs, keywords, fetch, out, timeout, stream, copy)
        run = self._shell.drive(self._submitting(arguments, observed), timeout, self._spec.what)
        return RunFuture(self._shell, run, self._tensors(run, out), self._spec.what)

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
        if self._group is not None:
            how = ("loop", inputs, keywords, fetch, out, timeout, stream, copy, observed, looping)
            return self._repeated(*how).sent()
        arguments = self._running("loop", inputs, keywords, fetch, out, timeout, stream, copy)
        sending = self._submitting(arguments, observed, looping)
        run = self._shell.drive(sending, timeout, self._spec.what)
        return RunFuture(self._shell, run, self._tensors(run, out), self._spec.what)

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
        """A run that is repeated when a device is lost; it is not sent yet."""
        number = stream_handle(self._shell, stream)
        given = (method, inputs, keywords, fetch, out, timeout, number, copy, observed, loop)
        return RepeatedFuture(self._shell, self._ask(*given), lambda run: self._tensors(run, out), timeout)

    def _submit_bytes(self, inputs: Sequence[bytes]) -> InlineFuture | None:
        """For servers that use other servers: a run that is one small message each way, with its inputs as
        their bytes, which fetches all outputs. None where it must go another way."""
        plan = self._inline_plan()
        if plan is None or (run := plan.run_of(inputs)) is None:
            return None
        pending = self._send_small(run, plan, waits=True)
        return None if pending is None else InlineFuture(self._shell, plan, pending)

    def _submit_part(
        self,
        number: int,
        inputs: Sequence[Tensor | np.ndarray[Any, Any]],
        fetched: Sequence[int],
        into: Mapping[int, Tensor],
        stream: StreamBase | None = None,
    ) -> RunFuture:
        """For servers that use other servers: the part of a run of the whole, by its number; 0: it is all of
        it.

        Inputs in order, as tensors or as their bytes; they stay as they are until it is done. Outputs by
        their places: `fetched` come as arrays, the others are written `into` tensors.
        """
        self._live_handle  # noqa: B018 - raises when it was freed
        bound = [one._used_in(self._shell) if isinstance(one, Tensor) else one for one in inputs]
        handles = {place: tensor._used_in(self._shell) for place, tensor in into.items()}
        lane = stream_handle(self._shell, stream)
        procedure = submit_part(self._shell, self._spec, number, bound, fetched, handles, lane)
        run = self._shell.drive(procedure, None, self._spec.what)
        return RunFuture(self._shell, run, {}, self._spec.what)

    def _report(self, timeout: float | None = None) -> PlanReport:
        """For servers that use other servers: what the server says of it, in numbers."""
        return self._shell.drive(self._reporting(), timeout, lambda: f"explaining {self!r}")

    def _running(
        self,
        method: str,
        inputs: Inputs,
        keywords: dict[str, Any],
        fetch: Fetch,
        out: Out,
        timeout: float | None,
        stream: StreamBase | None,
        copy: bool,
    ) -> Submission:
        """The arguments of `submit` and `run_once`, checked."""
        self._live_handle  # noqa: B018 - raises when it was freed
        bound = self._bind(inputs, keywords, method)
        how = Sending(stream_handle(self._shell, stream), observed=True, keep=not copy)
        chosen = self._choose(fetch, out)
        return (self._shell.core, self._spec, bound, chosen, how, timeout_ms(timeout), self._shell.release)

    def _tensors(self, run: Run, out: Out) -> dict[str, Any]:
        """The outputs that stay on the server."""
        made = [one for one in run.kept if one.handle]
        kept = {one.port.name: Tensor(self._shell, one.handle, one.port.type, self.device) for one in made}
        return {**kept, **(out or {})}

    def update(
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
        was. When nobody knows whether it did it (DeadlineExceededError, Ctrl-C), the plan is freed. Runs
        that were sent before are those of the old graph.
        """
        placing = Placing(pins, memory, split, buffer_types)
        procedure = updating(
            self._shell, self, graph, fusion, threads, weights, variables, placing, self._progress
        )
        self._shell.drive(procedure, timeout, lambda: f"updating the plan to {graph!r}")

    def explain(self, timeout: float | None = None) -> Explanation:
        """Where its nodes run and why, what is copied between devices, and how long the last run took.

        Raises UnknownHandleError when it was freed, DeadlineExceededError.
        """
        return self._shell.drive(self._explaining(), timeout, lambda: f"explaining {self!r}")

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables that the plan reads or writes, by name, as tensors."""
        return {
            one.port.name: Tensor(
                self._shell, one.tensor, one.port.type, one.device or self.device, owned=False
            )
            for one in self._spec.info.variables
        }

    def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """The variables' elements by name, as they are after everything sent before: arrays in this process's
        memory, and `save`, for a file.

        With `on_loss="rebuild"` it has the variables of all plans that share some with this one, waits for
        their runs, and is what they go on from when a device is lost: runs before are not replayed. Its
        arrays are read-only then. Raises the error of what was to compute a variable, DeadlineExceededError.
        """
        return self._shell.drive(self._checkpointing(), timeout, lambda: f"a checkpoint of {self!r}")

    def restore(self, checkpoint: Checkpoint, timeout: float | None = None) -> None:
        """Gives the variables what they had, behind everything sent before; returns when that is done. The
        checkpoint may be of another session, or have more variables.

        With `on_loss="rebuild"` that goes for all plans that share variables with this one, which are placed
        again if a device was lost, and go on from there at the next loss.

        Raises InvalidArgumentError for a checkpoint without one of the variables, or of other types, and
        DeadlineExceededError.
        """
        what = lambda: f"restoring {self!r}"  # noqa: E731
        self._shell.drive(self._restoring(checkpoint), timeout, what)
