"""Loops on the members of a pool, as their head relays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heliograph._base.inputs import step_of
from heliograph._base.streams import StreamBase, stream_handle
from heliograph.core.arrays import byte_view
from heliograph.head.members import submission_of
from heliograph.plan import Plan
from heliograph.procedures.run import Observed, submit
from heliograph.procedures.taps import next_value
from heliograph.run_future import RunFuture
from heliograph.tensor import Tensor
from heliograph_proto.commands import FeedLoop, Loop
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph


class MemberLoop(RunFuture):
    """A loop on a member, whose values are bytes here."""

    def next(self) -> tuple[int, int, memoryview] | None:
        """Wait for the next streamed output: its step, its number and its bytes; None after the
        last one.

        Raises the loop's error.
        """
        if self._run.observed is None:
            return None
        found = self._shell.drive(next_value(self._shell.core, self._run), None, self._what)
        return None if found is None else (found[1], -1 - found[0], byte_view(found[2]))

    def when_counted(self, call: Callable[[int], None]) -> None:
        """Call `call` with the steps that the member tells of, from the thread that reads its
        completions."""
        self._pending.on_steps = call
        # The one that counts has this loop, whose memory would wait for the garbage collector.
        self._pending.add_callback(self._count_no_more)

    def _count_no_more(self) -> None:
        self._pending.on_steps = None

    @property
    def error(self) -> HeliographError | None:
        """The error with which it ended."""
        return self._pending.error

    def feed_bytes(self, feed: FeedLoop, done: Callable[[int | HeliographError], None]) -> Callable[[], None]:
        """Feed the loop without waiting. `done` gets the step that took the values, or the error.

        Return a call that withdraws them if no step took them.
        """
        core = self._shell.core
        try:
            pending = self._shell.advance(lambda: core.feed(self._pending, feed, 0))
        except HeliographError as error:
            done(error)
            return lambda: None

        def told() -> None:
            done(step_of(pending) if pending.error is None else pending.error)

        pending.add_callback(told)
        return lambda: self._shell.advance(lambda: core.cancel(pending))


def submit_loop(
    plan: Plan,
    graph: Graph,
    loop: Loop,
    number: int,
    inputs: Sequence[Tensor | np.ndarray[Any, Any]],
    fetched: Sequence[int],
    into: Mapping[int, Tensor],
    stream: StreamBase | None = None,
) -> MemberLoop:
    """Send a loop of a plan, or of its part of the whole `graph`'s loop from run `number` on.

    Other arguments are those of `submit_partition`. Raises LimitExceededError if the member has no
    room for more loops that stream.
    """
    shell, spec = plan._shell, plan._spec
    submission = submission_of(plan, number, inputs, fetched, into, stream_handle(shell, stream))
    limits = shell.core.limits
    observed = Observed(graph, (), False, shell.let_go, loop, limits.in_flight_bytes) if loop.taps else None
    if observed is not None:
        observed.check_fits(limits)
    submission = replace(submission, loop=loop, observed=observed)
    run = shell.drive(submit(shell.core, submission), None, spec.what)
    return MemberLoop(shell, run, {}, spec.what)
