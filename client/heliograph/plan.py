"""`hg.Plan`: a compiled graph, run as often as one likes; `hg.RunFuture`: a run under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph._arguments import timeout_ms
from heliograph._common import StreamBase, stream_handle
from heliograph._plans import Fetch, Inputs, PlanBase
from heliograph._procedures import Sending
from heliograph._running import Run, collect, run_once, submit
from heliograph._words import What
from heliograph.errors import HeliographError
from heliograph.tensor import Tensor

if TYPE_CHECKING:
    from heliograph._blocking import BlockingShell

Outputs = dict[str, Any]


class RunFuture:
    """A run that was sent; `result` waits for its outputs."""

    def __init__(self, shell: BlockingShell, run: Run, device: str, what: What) -> None:
        self._shell = shell
        self._what = what
        self._run = run
        self._kept = kept_tensors(shell, run, device)

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._run.pending.done

    def cancel(self) -> bool:
        """Asks the server to cancel the run; False if it has ended already."""
        if self.done():
            return False
        self._shell.advance(lambda: self._shell.core.cancel(self._run.pending))
        return True

    def __repr__(self) -> str:
        pending = self._run.pending
        return f"<RunFuture {'pending' if not pending.done else 'failed' if pending.error else 'done'}>"

    def result(self, timeout: float | None = None) -> Outputs:
        """The outputs by name: arrays, or tensors if the run was not to fetch them.

        Raises the run's error, or DeadlineExceededError (the run goes on then). Ctrl-C while waiting
        cancels the run.
        """
        arrays = self._shell.drive(collect(self._shell.core, self._run, cancel=False), timeout, self._what)
        return {**arrays, **self._kept}

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


def kept_tensors(shell: BlockingShell, run: Run, device: str) -> dict[str, Tensor]:
    """The outputs that stay on the server."""
    return {one.port.name: Tensor(shell, one.handle, one.port.type, device) for one in run.kept}


class Plan(PlanBase):
    """A graph compiled for a set of devices. Made by `session.compile`."""

    _shell: BlockingShell

    def run(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> Outputs:
        """Runs the plan and waits for its outputs, by name.

        Inputs are given by name, in a mapping or as keywords: arrays (or lists) of exactly the plan's
        shapes and data types, or tensors, which stay where they are. With `fetch=False` the outputs
        stay on the server as tensors; a collection of names fetches only those.

        Raises InvalidInputError, the run's error, DeadlineExceededError after `timeout` seconds (the run
        is cancelled then, as it is by Ctrl-C).
        """
        run = self._shell.drive(
            run_once(*self._running(inputs, keywords, fetch, timeout, stream, copy)), timeout, self._spec.what
        )
        return {**(run.results or {}), **kept_tensors(self._shell, run, self.device)}

    def submit(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> RunFuture:
        """As `run`, without waiting for the outputs: a future.

        When it returns, the caller may overwrite its arrays, unless it passed `copy=False`: then only
        after the future is done. The run fails if it is not done `timeout` seconds after it arrived.
        """
        run = self._shell.drive(
            submit(*self._running(inputs, keywords, fetch, timeout, stream, copy)), timeout, self._spec.what
        )
        return RunFuture(self._shell, run, self.device, self._spec.what)

    def _running(
        self,
        inputs: Inputs,
        keywords: dict[str, Any],
        fetch: Fetch,
        timeout: float | None,
        stream: StreamBase | None,
        copy: bool,
    ) -> tuple[Any, ...]:
        """The arguments of `submit` and `run_once`, checked."""
        self._live_handle  # noqa: B018 - raises when it was freed
        bound = self._bind(inputs, keywords)
        how = Sending(stream_handle(self._shell, stream), observed=True, keep=not copy)
        chosen = self._choose(fetch)
        return (self._shell.core, self._spec, bound, chosen, how, timeout_ms(timeout), self._shell.release)

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables that the plan reads or writes, by name, as tensors."""
        return {
            one.port.name: Tensor(self._shell, one.tensor, one.port.type, self.device, owned=False)
            for one in self._spec.info.variables
        }

    def checkpoint(self, timeout: float | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """The variables' elements by name, as they are after everything sent before.

        To restore one: `plan.variables[name].set(array)`.
        """
        return {name: tensor.get(timeout=timeout) for name, tensor in self.variables.items()}
