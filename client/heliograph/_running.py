"""Runs of a plan: binding inputs, sending the run, collecting its outputs.

Small inputs ride in the command and small outputs in its completion. A large input becomes a
temporary tensor that is written first; a large output becomes one that is read afterwards. So a run
is one message each way whenever its tensors are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from heliograph._arrays import byte_view, empty_array
from heliograph._credit import most_observed_bytes
from heliograph._effects import Procedure, Wait
from heliograph._feed import Feed, LoopFeed, output_key
from heliograph._gates import Gate
from heliograph._loops import unread_bytes
from heliograph._outcome import Outcome, Pending
from heliograph._procedures import Sending, credit, read, wait_for, write
from heliograph._tracing import LOOP_SPAN, RUN_SPAN, begin
from heliograph.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.description import PlanInfo, Port
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.graph import Graph
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType

#: An input of a run: an array of exactly the port's type, or the handle of a tensor.
Bound: TypeAlias = "np.ndarray[Any, Any] | int"

#: The part of a message that the bytes in one command or completion may fill.
_MESSAGE_SHARE = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a plan was compiled of, so that it can be compiled elsewhere."""

    graph: Graph
    #: Of weights, by digest.
    contents: Mapping[bytes, np.ndarray[Any, Any]]
    fusion: bool
    threads: int
    #: Whether leaves are tensors of the session, which no other session has.
    is_bound: bool
    #: Names of those that it may use, by priority.
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """A compiled plan, as far as running it needs."""

    handle: int
    info: PlanInfo
    #: The line of user code that built a node, by its number.
    source_of: Callable[[int], str]
    #: What it was compiled of.
    recipe: Recipe | None = None
    #: Compiles it once more, so that it observes nodes, behind a gate.
    observing: Callable[[tuple[int, ...], Gate | None], Procedure[PlanSpec]] | None = None
    #: Compiles it once more, for those of its devices that are left.
    placing: Callable[[tuple[str, ...]], Procedure[PlanSpec]] | None = None
    #: The names of the devices that were asked for, also of those that are lost.
    asked: tuple[str, ...] = ()

    def what(self) -> str:
        """A run of the plan, in words."""
        return f"the run of the plan {self.signature}"

    @property
    def signature(self) -> str:
        """The inputs and outputs with their types, and the devices."""
        taken, given = (
            ", ".join(f"{port.name}: {port.type}" for port in ports)
            for ports in (self.info.inputs, self.info.outputs)
        )
        return f"({taken}) -> ({given}) on {', '.join(self.info.devices or (self.info.device,))}"


@dataclass(slots=True)
class Wanted:
    """An output that somebody wants: in the completion, as a new tensor, or in one that there is."""

    place: int
    port: Port
    #: Of the new tensor; 0: none.
    handle: int = 0
    #: The handle of the tensor that it is written to; 0: none.
    into: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What of a run is observed."""

    graph: Graph
    nodes: tuple[int, ...]
    #: Whether it waits after each until the next is asked for.
    pauses: bool
    #: Lets a run go on that nobody will ask any more; safe in destructors.
    let_go: Callable[[Pending], None]
    #: The loop that it is, whose outputs may be streamed.
    loop: c.Loop | None = None
    #: Of a loop: how many bytes of values are kept here once nobody takes them.
    kept_bytes: int = 0

    @property
    def waits(self) -> bool:
        """Whether the run may wait for somebody to ask."""
        return self.pauses or self.loop is not None

    def types(self) -> dict[int, TensorType]:
        """Of what is observed, as a feed has it."""
        found = {node: self.graph.nodes[node].type for node in self.nodes}
        for place in self.loop.taps if self.loop is not None else ():
            found[output_key(place)] = self.graph.type_of(self.graph.outputs[place].value)
        return found

    def feed(self, free_bytes: int) -> Feed:
        """Where it arrives, where so many bytes are free for what is observed."""
        types = self.types()
        if self.loop is None:
            return Feed(types, self.pauses)
        window = unread_bytes(types.values(), free_bytes)
        return LoopFeed(types, self.loop.steps, window, self.kept_bytes)

    def check_fits(self, limits: Limits) -> None:
        """Raises LimitExceededError for what has no room even alone."""
        size, most = self.feed(0).held_bytes, most_observed_bytes(limits)
        if size > most:
            what, one = ("the tapped nodes have", "run")
            if self.loop is not None:
                what, one = ("the tapped values of a step, and one that is on its way, have", "loop")
            raise LimitExceededError(
                f"{what} {size:,} bytes; {most:,} may be held of a session's",
                advice=f"tap fewer in one {one}",
            )


@dataclass(slots=True)
class Run:
    """A run that was sent."""

    pending: Pending
    #: To be turned into arrays.
    fetched: list[Wanted]
    #: That stay on the server.
    kept: list[Wanted]
    #: Frees a handle; safe in destructors.
    release: Callable[[int], None]
    results: dict[str, np.ndarray[Any, Any]] | None = None
    #: Set while somebody collects the results.
    collecting: Outcome | None = field(default=None, repr=False)
    #: What of it is observed.
    observed: Observed | None = None

    @property
    def steps(self) -> int | None:
        """How often the plan was run; None before that has ended. Of a loop that failed, the steps that were
        done; None of a run that did, or where the server did not say."""
        pending, completion = self.pending, self.pending.completion
        if not pending.done:
            return None
        if pending.error is None:
            return completion.steps or 1 if completion is not None else 1
        is_loop = isinstance(pending.kind, c.Run) and pending.kind.loop is not None
        return completion.steps if is_loop and completion is not None else None

    def drop(self) -> None:
        """Frees the tensors of large outputs that were fetched, or that nobody will fetch."""
        for wanted in self.fetched:
            handle, wanted.handle = wanted.handle, 0
            if handle:
                self.release(handle)

    def let_go(self) -> None:
        """Nobody will ask for what is observed of it: it waits for nobody. Safe in destructors."""
        if self.observed is not None and self.observed.waits and not self.pending.done:
            self.observed.let_go(self.pending)

    def __del__(self) -> None:
        self.drop()
        self.let_go()


def submit(
    core: ClientCore,
    plan: PlanSpec,
    inputs: Sequence[Bound],
    wanted: tuple[list[Wanted], list[Wanted]],
    how: Sending,
    timeout_ms: int,
    release: Callable[[int], None],
    observed: Observed | None = None,
    loop: c.Loop | None = None,
    exchange_run: int = 0,
) -> Procedure[Run]:
    """Sends a run, or a loop. Ends when the caller may overwrite its arrays (at once with `how.keep`).

    `plan` is one that observes the nodes that are to be observed; `exchange_run`: the whole's run, of a plan
    that is a portion.
    """
    fetched, kept = wanted
    span = begin(RUN_SPAN if loop is None else LOOP_SPAN)
    inline = _choose_inline(core, inputs)
    temporary: list[int] = []
    try:
        bindings = []
        for place, value in enumerate(inputs):
            bindings.append((yield from _bind(core, plan, place, value, inline, temporary, how)))
        rest = observed, loop, exchange_run, "" if span is None else span.trace_parent
        pending = yield from _send_run(core, plan, tuple(bindings), wanted, how, timeout_ms, *rest)
        if span is not None:
            span.end_with(pending)
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise
    finally:
        for handle in temporary:
            release(handle)
    return Run(pending, fetched, kept, release, observed=observed)


def fits_inline(core: ClientCore, inputs: Sequence[Bound]) -> bool:
    """Whether all arrays ride in the command, so that sending the run copies them at once."""
    return len(_choose_inline(core, inputs)) == sum(not isinstance(one, int) for one in inputs)


def _choose_inline(core: ClientCore, inputs: Sequence[Bound]) -> set[int]:
    """The places of the arrays that ride in the command."""
    room = core.limits.message_bytes // _MESSAGE_SHARE
    chosen = set()
    for place, value in enumerate(inputs):
        if not isinstance(value, int) and value.nbytes <= min(core.limits.inline_bytes, room):
            chosen.add(place)
            room -= value.nbytes
    return chosen


def _bind(
    core: ClientCore,
    plan: PlanSpec,
    place: int,
    value: Bound,
    inline: set[int],
    temporary: list[int],
    how: Sending,
) -> Procedure[c.InputBinding]:
    if isinstance(value, int):
        return c.InputBinding(place, tensor=value)
    if place in inline:
        return c.InputBinding(place, value.tobytes())
    port = plan.info.inputs[place]
    handle = core.handle()
    core.send(
        c.Allocate(handle, port.type, plan.info.device), stream=how.stream, gate=how.gate, observed=True
    )
    temporary.append(handle)
    target, item = c.SetTensor(handle, 0), port.type.dtype.block_bytes
    # Its error is the run's: the run meets the poisoned tensor.
    quiet = Sending(how.stream, how.gate, observed=True, keep=how.keep)
    yield from write(core, target, byte_view(value), item, quiet)
    return c.InputBinding(place, tensor=handle)


def _send_run(
    core: ClientCore,
    plan: PlanSpec,
    bindings: tuple[c.InputBinding, ...],
    wanted: tuple[list[Wanted], list[Wanted]],
    how: Sending,
    timeout_ms: int,
    observed: Observed | None,
    loop: c.Loop | None,
    exchange_run: int,
    trace_parent: str,
) -> Procedure[Pending]:
    outputs = tuple(
        c.OutputBinding(one.place, one.handle, fetch=not (one.handle or one.into), into=one.into)
        for one in chain(*wanted)
    )
    inline_bytes = sum(len(one.data) for one in bindings if one.data is not None)
    run = c.Run(
        plan.handle, bindings, outputs, loop=loop, exchange_run=exchange_run, trace_parent=trace_parent
    )
    if observed is not None:
        pending = yield from _send_observed(core, run, observed, inline_bytes, how, timeout_ms)
    else:
        yield from credit(core, inline_bytes, how.gate)
        try:
            pending = _send(core, run, how, timeout_ms, inline_bytes)
        except HeliographError:
            core.give_back(inline_bytes)
            raise
    pending.source_of, pending.what = plan.source_of, plan.what
    return pending


def _send(core: ClientCore, run: c.Run, how: Sending, timeout_ms: int, credit_bytes: int = 0) -> Pending:
    return core.send(
        run,
        stream=how.stream,
        observed=True,
        timeout_ms=timeout_ms,
        credit_bytes=credit_bytes,
        gate=how.gate,
    )


def _send_observed(
    core: ClientCore, run: c.Run, observed: Observed, inline_bytes: int, how: Sending, timeout_ms: int
) -> Procedure[Pending]:
    """Sends a run or a loop when there is room for what it tells. Raises LimitExceededError where that may be
    never."""
    feed = observed.feed(core.free_observed_bytes)
    if run.loop is not None and isinstance(feed, LoopFeed):
        run = replace(run, loop=replace(run.loop, unread_bytes=feed.unread_bytes))
    grant = core.reserve_observed(feed, inline_bytes, how.gate)
    try:
        yield from wait_for(core, grant)
        pending = _send(core, replace(run, pause=feed.pauses), how, timeout_ms)
    except BaseException:
        core.withdraw_observed(grant)
        raise
    pending.feed = feed
    return pending


def choose_outputs(core: ClientCore, plan: PlanInfo, names: Sequence[str], fetch: bool) -> list[Wanted]:
    """How the outputs of these names come: those that are too large for a completion get a handle."""
    room = core.limits.message_bytes // _MESSAGE_SHARE
    wanted = []
    for place, port in enumerate(plan.outputs):
        if port.name not in names:
            continue
        size = port.type.nbytes
        inline = fetch and size <= min(core.limits.inline_bytes, room)
        room -= size if inline else 0
        wanted.append(Wanted(place, port, 0 if inline else core.handle()))
    return wanted


def collect(core: ClientCore, run: Run, cancel: bool) -> Procedure[dict[str, np.ndarray[Any, Any]]]:
    """The outputs as arrays, in memory of their own; the same ones each time.

    Breaking off the waiting cancels the run, except that a deadline does so only with `cancel`.
    """
    # Whoever waits for the end asks for no more of what is on the way.
    core.flow(run.pending)
    while run.results is None:
        if run.collecting is not None:
            yield Wait(run.collecting)
            continue
        run.collecting = turn = Outcome()
        try:
            run.results = yield from _collect(core, run)
        except BaseException as error:
            if cancel or not isinstance(error, Exception):
                core.cancel(run.pending)
            raise
        finally:
            run.collecting = None
            core.settle(turn)
    return run.results


def _collect(core: ClientCore, run: Run) -> Procedure[dict[str, np.ndarray[Any, Any]]]:
    yield from wait_for(core, run.pending)
    inline = run.pending.outputs()
    results: dict[str, np.ndarray[Any, Any]] = {}
    for wanted in run.fetched:
        array = empty_array(wanted.port.type)
        if wanted.handle:
            source = c.GetTensor(wanted.handle, 0, array.nbytes)
            item = wanted.port.type.dtype.block_bytes
            yield from read(core, source, byte_view(array), item, run.pending.stream)
        else:
            byte_view(array)[:] = inline[wanted.place]
        results[wanted.port.name] = array
    run.drop()
    return results


def run_once(
    core: ClientCore,
    plan: PlanSpec,
    inputs: Sequence[Bound],
    wanted: tuple[list[Wanted], list[Wanted]],
    how: Sending,
    timeout_ms: int,
    release: Callable[[int], None],
) -> Procedure[Run]:
    """Sends a run and collects its outputs; breaking off cancels it."""
    run = yield from submit(core, plan, inputs, wanted, how, timeout_ms, release)
    yield from collect(core, run, cancel=True)
    return run
