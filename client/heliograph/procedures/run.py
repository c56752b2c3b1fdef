"""Runs of a plan: binding inputs, sending the run, collecting its outputs.

Small inputs travel in the command and small outputs in its completion. A large input becomes a
temporary tensor that is written first; a large output becomes one that is read afterwards. So a run
is one message each way if its tensors are small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np

from heliograph.core.arrays import byte_view, empty_array
from heliograph.core.credit import OrderGate, most_observed_bytes
from heliograph.core.effects import Procedure, WaitFor
from heliograph.core.feed import Feed, LoopFeed, cost_of, output_key
from heliograph.core.future import Outcome, Pending
from heliograph.core.progress.bars import Waiting
from heliograph.core.protocol import ClientCore
from heliograph.core.tracing import LOOP_SPAN, RUN_SPAN, begin
from heliograph.graph.arguments import counted
from heliograph.graph.files.mapped_files import readable
from heliograph.procedures.transfer import Sending, read, send_on_credit, wait_for, write
from heliograph_proto import commands as c
from heliograph_proto.commands import check_until
from heliograph_proto.errors import (
    InvalidArgumentError,
    LimitExceededError,
)
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanInfo, Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType

#: The inputs (one or several) by the name of the output that they take from the previous step.
Carries: TypeAlias = Mapping[str, "str | Collection[str]"] | None

#: A loop's unread values may take this fraction of the free room for observed values, or the size
#: of one value if that is larger: 8 MiB for the first loop, if the server holds 256 MiB.
UNREAD_PART = 24

#: The names of the inputs that may be fed while a loop runs: one, or several.
Fed: TypeAlias = "str | Collection[str] | None"

#: The room for feeds of a loop that wait for a step, beyond twice the size of all its fed inputs.
FED_BYTES = 64 * 1024


def loop_of(
    plan: PlanInfo, steps: int, carry: Carries, until: str | None, feed: Fed, gather: float | None
) -> c.Loop:
    """Return the loop with numbers in place of names, without taps. Raises InvalidArgumentError."""
    if not isinstance(steps, Integral) or isinstance(steps, bool) or not 1 <= steps <= c.MAX_LOOP_STEPS:
        raise InvalidArgumentError(
            f"steps is {steps!r:.80}", advice=f"a loop runs from 1 to {c.MAX_LOOP_STEPS:,} steps"
        )
    carries = tuple(_carry(plan, output, name) for output, name in _pairs(carry))
    if twice := [place for place, count in Counter(one.input for one in carries).items() if count > 1]:
        raise InvalidArgumentError(
            f"input {plan.inputs[twice[0]].name!r} takes its value from two outputs",
            advice="carry one of them, or combine them in the graph",
        )
    fed = _fed(plan, feed)
    fed_bytes = sum(plan.inputs[place].type.nbytes for place in fed)
    room = 2 * (fed_bytes + c.FEED_BYTES) + FED_BYTES if fed else 0
    ends = None if until is None else _until(plan, until)
    return c.Loop(int(steps), carries, ends, fed_inputs=fed, fed_bytes=room, gather_ms=_gather_ms(gather))


def _gather_ms(gather: Any) -> int:
    """Return the milliseconds for which values may gather. Raises InvalidArgumentError."""
    if gather is None:
        return 0
    seconds = float(gather) if isinstance(gather, Real) and not isinstance(gather, bool) else 0.0
    if not 0.001 <= seconds <= c.MOST_GATHER_MS / 1e3:
        raise InvalidArgumentError(
            f"gather is {gather!r:.80}", advice=f"seconds, from 0.001 to {c.MOST_GATHER_MS / 1e3:g}"
        )
    return round(seconds * 1e3)


def _fed(plan: PlanInfo, names: Fed) -> tuple[int, ...]:
    """Return the numbers of the inputs that may be fed. Raises InvalidArgumentError."""
    chosen = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(chosen, Collection) or isinstance(chosen, Mapping):
        raise InvalidArgumentError(
            f"feed is {type(names).__name__}", advice="the names of inputs: feed=['token', 'active']"
        )
    return tuple(sorted({_place(plan.inputs, name, "input") for name in chosen}))


def _pairs(carry: Carries) -> list[tuple[Any, Any]]:
    """Return pairs of the names of an output and an input."""
    if carry is None:
        return []
    if not isinstance(carry, Mapping):
        raise InvalidArgumentError(
            f"carry is {type(carry).__name__}",
            advice="inputs by the names of outputs: carry={'next': 'token'}",
        )
    pairs: list[tuple[Any, Any]] = []
    for output, names in carry.items():
        several = isinstance(names, Collection) and not isinstance(names, str)
        pairs += [(output, name) for name in (names if several else (names,))]
    return pairs


def _carry(plan: PlanInfo, output: Any, name: Any) -> c.Carry:
    carry = c.Carry(output_place(plan, output), _place(plan.inputs, name, "input"))
    given, taken = plan.outputs[carry.output].type, plan.inputs[carry.input].type
    if given != taken:
        raise InvalidArgumentError(
            f"output {output!r} is {given}, but the next step's input {name!r} that takes it is {taken}",
            advice="give both the same shape and data type: hg.astype or hg.reshape in the graph",
        )
    return carry


def _until(plan: PlanInfo, name: Any) -> int:
    place = output_place(plan, name)
    check_until(plan.outputs[place])
    return place


def output_place(plan: PlanInfo, name: Any) -> int:
    """Return the number of an output. Raises InvalidArgumentError for an unknown name."""
    return _place(plan.outputs, name, "output")


def _place(ports: Sequence[Port], name: Any, what: str) -> int:
    names = [port.name for port in ports]
    if name in names:
        return names.index(name)
    near = get_close_matches(str(name), names, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    raise InvalidArgumentError(f"the plan has no {what} {name!r:.80}", advice=advice)


def unread_bytes(types: Collection[TensorType], free_bytes: int) -> int:
    """Return the most unread bytes of a loop that streams values of these types in each step.

    It is the size of one value at least, and depends on the bytes that are free for observed
    values: the more loops, the less for each.
    """
    largest = max((cost_of(type_.nbytes) for type_ in types), default=0)
    return max(largest, free_bytes // UNREAD_PART)


#: An input of a run: an array of exactly the port's type, or the handle of a tensor.
Bound: TypeAlias = "np.ndarray[Any, Any] | int"

#: The fraction of a message that the data in one command or completion may fill.
_MESSAGE_SHARE = 4


@dataclass(frozen=True, slots=True)
class CompileRecipe:
    """The sources of a compiled plan, to compile it elsewhere."""

    graph: Graph
    #: The arrays of the weights, by digest.
    contents: Mapping[bytes, np.ndarray[Any, Any]]
    fusion: bool
    threads: int
    #: True if leaves are tensors of the session, which no other session has.
    is_bound: bool
    #: The names of the devices that it may use, by priority.
    devices: tuple[str, ...] = ()
    #: The first elements of variables, by name; zeros for others.
    initial: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """A compiled plan, as far as runs need it."""

    handle: int
    info: PlanInfo
    #: Returns the line of user code that built a node, by its number.
    source_of: Callable[[int], str]
    #: The sources that it was compiled from.
    recipe: CompileRecipe | None = None
    #: Compiles it once more, to observe nodes, at a gate's place in the order.
    observing: Callable[[tuple[int, ...], OrderGate | None], Procedure[PlanSpec]] | None = None
    #: Compiles it once more, for the remaining devices.
    placing: Callable[[tuple[str, ...]], Procedure[PlanSpec]] | None = None
    #: The names of the requested devices, including those that are lost.
    requested_devices: tuple[str, ...] = ()
    #: The handles of the tensors that are weights.
    weights: tuple[int, ...] = ()

    def what(self) -> str:
        """Return the words for a run of the plan."""
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
class RunOutput:
    """An output of a run, returned in the completion, as a new tensor, or in an existing one."""

    place: int
    port: Port
    #: The handle of the new tensor; 0 without one.
    handle: int = 0
    #: The handle of the existing tensor; 0 without one.
    into: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed values of a run."""

    graph: Graph
    nodes: tuple[int, ...]
    #: True if the run waits after each node until the next value is requested.
    pauses: bool
    #: Lets a run go on that has no reader any more; safe in destructors.
    let_go: Callable[[Pending], None]
    #: The loop, whose outputs may be streamed.
    loop: c.Loop | None = None
    #: For a loop: the most bytes of values to keep here once its reader is gone.
    kept_bytes: int = 0

    @property
    def waits(self) -> bool:
        """True if the run may wait for its reader."""
        return self.pauses or self.loop is not None

    def types(self) -> dict[int, TensorType]:
        """Return the types of the observed values, by their keys in a feed."""
        found = {node: self.graph.nodes[node].type for node in self.nodes}
        for place in self.loop.taps if self.loop is not None else ():
            found[output_key(place)] = self.graph.type_of(self.graph.outputs[place].value)
        return found

    def feed(self, free_bytes: int) -> Feed:
        """Return the feed for the values, for so many free bytes of room."""
        types = self.types()
        if self.loop is None:
            return Feed(types, self.pauses)
        window = unread_bytes(types.values(), free_bytes)
        return LoopFeed(types, self.loop.steps, window, self.kept_bytes)

    def check_fits(self, limits: Limits) -> None:
        """Raise LimitExceededError for values that have no room even alone."""
        size, most = self.feed(0).held_bytes, most_observed_bytes(limits)
        if size > most:
            what, one = ("the tapped nodes have", "run")
            if self.loop is not None:
                what, one = ("the tapped values of a step and one in transit have", "loop")
            raise LimitExceededError(
                f"{what} {size:,} bytes; a session may hold {most:,}",
                advice=f"tap fewer in one {one}",
            )


@dataclass(slots=True)
class SentRun:
    """A run that was sent."""

    pending: Pending
    #: The outputs that become arrays.
    fetched: list[RunOutput]
    #: The outputs that stay on the server.
    kept: list[RunOutput]
    #: Frees a handle; safe in destructors.
    release: Callable[[int], None]
    results: dict[str, np.ndarray[Any, Any]] | None = None
    #: Set while a caller collects the results.
    collecting: Outcome | None = field(default=None, repr=False)
    #: The values to observe.
    observed: Observed | None = None

    @property
    def steps(self) -> int | None:
        """The number of steps that were run; None before the end, or if it is unknown.

        A run that succeeded has 1. A loop that failed has the steps that it completed; a failed run
        has None.
        """
        pending, completion = self.pending, self.pending.completion
        if not pending.done:
            return None
        if pending.error is None:
            return completion.steps or 1 if completion is not None else 1
        return completion.steps if self.is_loop and completion is not None else None

    @property
    def is_loop(self) -> bool:
        """True for a loop, false for a run."""
        kind = self.pending.kind
        return isinstance(kind, c.RunCommand) and kind.loop is not None

    @property
    def described(self) -> str:
        """The text of its bar."""
        kind = self.pending.kind
        loop = kind.loop if isinstance(kind, c.RunCommand) else None
        return "a run" if loop is None else f"a loop of up to {counted(loop.steps, 'step')}"

    def drop(self) -> None:
        """Free the tensors of large outputs, which were fetched or are not wanted any more."""
        for output in self.fetched:
            handle, output.handle = output.handle, 0
            if handle:
                self.release(handle)

    def let_go(self) -> None:
        """Let the run go on without a reader of its observed values. Safe in destructors."""
        if self.observed is not None and self.observed.waits and not self.pending.done:
            self.observed.let_go(self.pending)

    def __del__(self) -> None:
        self.drop()
        self.let_go()


@dataclass(slots=True)
class Submission:
    """A run or a loop that was checked and is to be sent."""

    #: The plan, or its variant that observes the nodes.
    plan: PlanSpec
    inputs: Sequence[Bound]
    fetched: list[RunOutput]
    kept: list[RunOutput]
    how: Sending
    #: Frees a handle; safe in destructors.
    release: Callable[[int], None]
    timeout_ms: int = 0
    observed: Observed | None = None
    loop: c.Loop | None = None
    #: For a partition: the number of the whole graph's run.
    exchange_run: int = 0


def submit(core: ClientCore, submission: Submission) -> Procedure[SentRun]:
    """Send a run, or a loop.

    Ends when the caller may overwrite its arrays; at once with `how.keep`.
    """
    span = begin(RUN_SPAN if submission.loop is None else LOOP_SPAN)
    inline = _choose_inline(core, submission.inputs)
    temporary: list[int] = []
    try:
        bindings = []
        for place, value in enumerate(submission.inputs):
            if isinstance(value, int):
                bindings.append(c.InputBinding(place, tensor=value))
            elif place in inline:
                bindings.append(c.InputBinding(place, bytes(readable(byte_view(value)))))
            else:
                handle = yield from _write_input(core, submission, place, temporary)
                bindings.append(c.InputBinding(place, tensor=handle))
        trace_parent = "" if span is None else span.trace_parent
        pending = yield from _send_run(core, submission, tuple(bindings), trace_parent)
        if span is not None:
            span.end_with(pending)
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise
    finally:
        for handle in temporary:
            submission.release(handle)
    return SentRun(
        pending, submission.fetched, submission.kept, submission.release, observed=submission.observed
    )


def fits_inline(core: ClientCore, inputs: Sequence[Bound]) -> bool:
    """True if all arrays travel in the command, so that sending the run copies them at once."""
    return len(_choose_inline(core, inputs)) == sum(not isinstance(one, int) for one in inputs)


def _choose_inline(core: ClientCore, inputs: Sequence[Bound]) -> set[int]:
    """Return the numbers of the inputs whose arrays travel in the command."""
    room = core.limits.message_bytes // _MESSAGE_SHARE
    chosen = set()
    for place, value in enumerate(inputs):
        if not isinstance(value, int) and value.nbytes <= min(core.limits.inline_bytes, room):
            chosen.add(place)
            room -= value.nbytes
    return chosen


def _write_input(
    core: ClientCore, submission: Submission, place: int, temporary: list[int]
) -> Procedure[int]:
    """Create a temporary tensor for an array that is too large for the command."""
    plan, how, value = submission.plan, submission.how, submission.inputs[place]
    assert not isinstance(value, int)
    type_, handle = plan.info.inputs[place].type, core.handle()
    core.send(c.Allocate(handle, type_, plan.info.device), stream=how.stream, gate=how.gate, observed=True)
    temporary.append(handle)
    # Its error becomes the run's error, since the run uses the poisoned tensor.
    quiet = Sending(how.stream, how.gate, observed=True, keep=how.keep)
    yield from write(core, c.SetTensor(handle, 0), byte_view(value), type_.dtype.block_bytes, quiet)
    return handle


def _send_run(
    core: ClientCore, submission: Submission, bindings: tuple[c.InputBinding, ...], trace_parent: str
) -> Procedure[Pending]:
    plan, how = submission.plan, submission.how
    outputs = tuple(
        c.OutputBinding(one.place, one.handle, fetch=not (one.handle or one.into), into=one.into)
        for one in chain(submission.fetched, submission.kept)
    )
    inline_bytes = sum(len(one.data) for one in bindings if one.data is not None)
    # The server keeps this room until the loop has ended.
    inline_bytes += submission.loop.fed_bytes if submission.loop is not None else 0
    loop = submission.loop
    if loop is not None and core.bars is not None and core.bars.is_seen():
        loop = replace(loop, counts_steps=True)
    run = c.RunCommand(
        plan.handle,
        bindings,
        outputs,
        loop=loop,
        exchange_run=submission.exchange_run,
        trace_parent=trace_parent,
    )
    if submission.observed is None:
        pending = yield from send_on_credit(core, run, inline_bytes, how, submission.timeout_ms)
    else:
        pending = yield from _send_observed(core, run, submission, submission.observed, inline_bytes)
    pending.source_of, pending.what = plan.source_of, plan.what
    if submission.loop is not None and submission.loop.is_fed:
        core.feeds.open(pending, submission.loop.fed_bytes)
    return pending


def feed(core: ClientCore, run: Pending, kind: c.FeedLoop, timeout_ms: int) -> Procedure[Pending]:
    """Feed a loop, when the server has room for what was fed before."""
    while (waits := core.feeds.blocking(run)) is not None:
        yield WaitFor(waits)
    return core.feed(run, kind, timeout_ms)


def _send_observed(
    core: ClientCore, run: c.RunCommand, submission: Submission, observed: Observed, inline_bytes: int
) -> Procedure[Pending]:
    """Send a run or a loop when there is room for its observed values.

    Raises LimitExceededError if there might never be room.
    """
    how, feed = submission.how, observed.feed(core.free_observed_bytes)
    if run.loop is not None and isinstance(feed, LoopFeed):
        run = replace(run, loop=replace(run.loop, unread_bytes=feed.unread_bytes))
    grant = core.reserve_observed(feed, inline_bytes, how.gate)
    try:
        yield from wait_for(core, grant)
        run = replace(run, pause=feed.pauses)
        pending = core.send(
            run, stream=how.stream, observed=True, timeout_ms=submission.timeout_ms, gate=how.gate
        )
    except BaseException:
        core.withdraw_observed(grant)
        raise
    pending.feed = feed
    return pending


def choose_outputs(core: ClientCore, plan: PlanInfo, names: Sequence[str], fetch: bool) -> list[RunOutput]:
    """Return the outputs of these names; those too large for a completion get a new tensor."""
    room = core.limits.message_bytes // _MESSAGE_SHARE
    chosen = []
    for place, port in enumerate(plan.outputs):
        if port.name not in names:
            continue
        size = port.type.nbytes
        inline = fetch and size <= min(core.limits.inline_bytes, room)
        room -= size if inline else 0
        chosen.append(RunOutput(place, port, 0 if inline else core.handle()))
    return chosen


def written_outputs(plan: PlanInfo, into: Mapping[str, int]) -> list[RunOutput]:
    """Return the outputs that are written to existing tensors, whose handles are given by name."""
    return [
        RunOutput(place, port, into=into[port.name])
        for place, port in enumerate(plan.outputs)
        if port.name in into
    ]


def collect(core: ClientCore, run: SentRun, cancel: bool) -> Procedure[dict[str, np.ndarray[Any, Any]]]:
    """Return the outputs as arrays with their own memory, the same ones each time.

    Interrupting the wait cancels the run, except that a deadline does so only with `cancel`.
    """
    # A caller that waits for the end reads no more observed values.
    core.flow(run.pending)
    while run.results is None:
        if run.collecting is not None:
            yield WaitFor(run.collecting)
            continue
        run.collecting = turn = Outcome()
        waiting = _waiting(core, run)
        try:
            run.results = yield from _collect(core, run)
        except BaseException as error:
            if cancel or not isinstance(error, Exception):
                core.cancel(run.pending)
            raise
        finally:
            if waiting is not None:
                if run.pending.on_steps == waiting.count:
                    run.pending.on_steps = None
                waiting.end()
            run.collecting = None
            core.settle(turn)
    return run.results


def _waiting(core: ClientCore, run: SentRun) -> Waiting | None:
    """Return the bar of a loop, which shows its steps once the server tells of them; None for a
    run, or without bars."""
    kind = run.pending.kind
    is_seen = core.bars is not None and core.bars.is_seen()
    if not is_seen or not isinstance(kind, c.RunCommand) or kind.loop is None:
        return None
    waiting = Waiting(run.described, core.bars, total=kind.loop.steps)
    if run.pending.steps:
        waiting.count(run.pending.steps)
    # The head of a pool hears of its members' loops itself.
    run.pending.on_steps = run.pending.on_steps or waiting.count
    return waiting


def _collect(core: ClientCore, run: SentRun) -> Procedure[dict[str, np.ndarray[Any, Any]]]:
    yield from wait_for(core, run.pending)
    inline = run.pending.outputs()
    results: dict[str, np.ndarray[Any, Any]] = {}
    for output in run.fetched:
        array = empty_array(output.port.type)
        if output.handle:
            source = c.GetTensor(output.handle, 0, array.nbytes)
            item = output.port.type.dtype.block_bytes
            yield from read(core, source, byte_view(array), item, run.pending.stream)
        else:
            byte_view(array)[:] = inline[output.place]
        results[output.port.name] = array
    run.drop()
    return results


def run_once(core: ClientCore, submission: Submission) -> Procedure[SentRun]:
    """Send a run and collect its outputs; interrupting it cancels the run."""
    run = yield from submit(core, submission)
    yield from collect(core, run, cancel=True)
    return run
