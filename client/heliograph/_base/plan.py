"""Plans, for both APIs: checking the arguments of runs, and preparing what is sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from keyword import iskeyword
from types import FunctionType
from typing import TYPE_CHECKING, Any

from heliograph._base.inputs import FedInputs, bound_array
from heliograph._base.streams import StreamBase, stream_handle
from heliograph._base.tensor import TensorBase
from heliograph._base.type_advice import new_tensor, type_advice
from heliograph.core.credit import OrderGate
from heliograph.core.effects import Compute, Procedure, ask
from heliograph.core.future import Deadline, Pending
from heliograph.core.inline_run import InlinePlan, inline_plan
from heliograph.core.methods import EXPLAIN, ExplainQuery
from heliograph.core.progress.bars import Progress
from heliograph.core.shell import Handle, Shell
from heliograph.core.tracing import RUN_SPAN, begin
from heliograph.graph.arguments import counted, timeout_ms
from heliograph.procedures.checkpoint import Checkpoint, read_variables, restore_variables
from heliograph.procedures.compile import Compilation
from heliograph.procedures.journal import JournalEntry
from heliograph.procedures.rebuild import Rebuild, RebuildGroup, RepeatedRun
from heliograph.procedures.run import (
    Bound,
    Carries,
    Fed,
    Observed,
    PlanSpec,
    RunOutput,
    SentRun,
    Submission,
    choose_outputs,
    fits_inline,
    loop_of,
    submit,
    written_outputs,
)
from heliograph.procedures.taps import Taps, Variants, tapped_in_loop, tapped_nodes
from heliograph.procedures.transfer import Sending
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    InvalidInputError,
    UnknownHandleError,
)
from heliograph_proto.plans import PlanReport, Port, VariablePort
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph.explain.explanation import Explanation

Inputs = Mapping[str, Any] | None
#: True to return outputs as arrays, False to keep them as tensors, or the names of those to return.
Fetch = bool | Collection[str]
#: The results of a run by output name: arrays, and tensors for outputs that were not fetched.
Outputs = dict[str, Any]
#: Existing tensors to write outputs to, by output name.
Out = Mapping[str, TensorBase] | None

#: Keywords that are options of each method, not inputs.
_RUN_OPTIONS = ("copy", "fetch", "out", "stream", "timeout")
_OPTIONS = {
    "run": _RUN_OPTIONS,
    "submit": (*_RUN_OPTIONS, "pause", "taps"),
    "loop": (*_RUN_OPTIONS, "carry", "feed", "steps", "taps", "until"),
}


@dataclass(slots=True)
class RunRequest:
    """The arguments of `run`, `submit` or `loop` of a plan."""

    #: The method's name.
    method: str
    inputs: Inputs
    keywords: Mapping[str, Any]
    fetch: Fetch
    out: Out
    timeout: float | None
    stream: StreamBase | None
    #: True if the caller may overwrite arrays once the call returns.
    copy: bool
    observed: Observed | None = None
    loop: c.Loop | None = None


class PlanBase(Handle):
    """A graph compiled for a set of devices."""

    _kind = "plan"

    def __init__(self, shell: Shell, spec: PlanSpec, progress: Progress | None = None) -> None:
        super().__init__(shell, spec.handle)
        self._spec, self._since = spec, shell.watchers.replacements
        self._progress = progress
        self._updating = False
        #: The common parts of its small runs, once there was one.
        self._inline: InlinePlan | None = None
        self._variants = Variants(shell.release)
        #: With `on_loss="rebuild"`: the plans that share variables with it.
        self._group: RebuildGroup | None = None
        self._rebuilds: list[Rebuild] = []
        #: Its methods with signatures that name its inputs, by name, once they were looked up.
        self._methods: dict[str, FunctionType] = {}
        self._assigned: tuple[PlanSpec | None, frozenset[str]] = (None, frozenset())

    def __del__(self) -> None:
        super().__del__()
        if hasattr(self, "_variants"):
            self._variants.free()

    def free(self) -> None:
        """Free the plan on the server once earlier commands no longer need it. Idempotent."""
        self._drop_variants()
        super().free()

    def _drop_variants(self) -> None:
        self._variants.free()
        # This also drops the tensors that the plan was bound to.
        self._spec = replace(self._spec, observing=None)

    @property
    def rebuilds(self) -> tuple[Rebuild, ...]:
        """The times that it was placed again after a device loss, oldest first.

        Empty without `on_loss="rebuild"`.
        """
        return tuple(self._rebuilds)

    def _place_of(self, device: str) -> str:
        """The device that has the place of one for which it was compiled."""
        return self._shell.watchers.place_of(device, self._since)

    def _places_of(self, devices: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self._place_of, devices)))

    @property
    def _requested_devices(self) -> tuple[str, ...]:
        """The names of the devices that it may use while they are there, by priority."""
        requested = self._spec.requested_devices
        return tuple(dict.fromkeys((*self._places_of(requested), *requested))) or self.devices

    @property
    def _placed_devices(self) -> frozenset[str]:
        """The names of the devices that it was compiled for."""
        recipe = self._spec.recipe
        return frozenset(self.devices).union(self._places_of(recipe.devices) if recipe is not None else ())

    @property
    def _live_group(self) -> RebuildGroup:
        """The group that it is in now."""
        found = self._group
        assert found is not None
        while found.successor is not None:
            found = found.successor
        return found

    @property
    def _assigns(self) -> frozenset[str]:
        """The names of the variables that runs assign."""
        spec, known = self._assigned
        if spec is not self._spec:
            known = _assigned_by(self._spec)
            self._assigned = self._spec, known
        return known

    @property
    def inputs(self) -> dict[str, TensorType]:
        """The types of the inputs of a run, by name."""
        return {port.name: port.type for port in self._spec.info.inputs}

    @property
    def outputs(self) -> dict[str, TensorType]:
        """The types of the outputs of a run, by name."""
        return {port.name: port.type for port in self._spec.info.outputs}

    @property
    def device(self) -> str:
        """The name of the device that runs it; with several devices, that of the last split.

        New outputs are on this device.
        """
        return self._place_of(self._spec.info.device)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices that run a part of it, by priority."""
        return self._places_of(self._spec.info.devices) or (self.device,)

    @property
    def splits(self) -> int:
        """The number of splits: changes from one device to another in a run, plus one."""
        return self._spec.info.splits

    @property
    def copied_bytes(self) -> int:
        """The bytes that each run copies between devices."""
        return self._spec.info.copied_bytes

    @property
    def pipeline(self) -> int:
        """The number of its runs that may be in progress at once.

        It is 1 if one device runs all of the plan.
        """
        return self._spec.info.pipeline

    @property
    def compute_bytes(self) -> int:
        """The bytes of memory for intermediate results."""
        return self._spec.info.compute_bytes

    @property
    def reserved_bytes(self) -> int:
        """The part of `compute_bytes` that lies in the session's reservation.

        It is less than all of them if the plan did not fit there, or keeps constants that it
        computed once.
        """
        return self._spec.info.reserved_bytes

    @property
    def steps(self) -> int:
        """The number of steps that the nodes were compiled to."""
        return self._spec.info.steps

    def __repr__(self) -> str:
        return f"<Plan {self._spec.signature}, {counted(self.steps, 'step')}, {self._state}>"

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph._base.views.objects import plan_view

        return plan_view(self)

    def _explaining(self, measure: bool | None = None) -> Procedure[Explanation]:
        """Request the plan's report and add the names of nodes."""
        from heliograph.explain.explanation import explanation

        recipe, source_of = self._spec.recipe, self._spec.source_of
        assert recipe is not None
        report = yield from self._reporting(measure)
        found: Explanation = yield Compute(lambda: explanation(recipe.graph, report, source_of))
        return found

    def _reporting(self, measure: bool | None = None) -> Procedure[PlanReport]:
        return ask(EXPLAIN, ExplainQuery(self._live_handle, measure))

    # Updating

    def _used_in(self, shell: Shell) -> int:
        if self._updating:
            raise InvalidArgumentError(
                "the plan is being updated in another thread or task", advice="run it after the update"
            )
        return super()._used_in(shell)

    def _hand_over(self, how: Compilation) -> Compilation:
        """Return a compilation that takes over this plan's memory."""
        options = replace(how.options, pipeline=self.pipeline)
        return replace(how, options=options, updates=self._live_handle, doubt=self.free)

    def _replace(self, compiling: Procedure[PlanSpec]) -> Procedure[None]:
        """Replace the plan by the compiled one.

        It is unchanged if the server refuses, and freed if the outcome is unknown.
        """
        self._updating = True
        try:
            self._become((yield from compiling))
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                error.message,
                advice="the plan was freed: compile it again" if self._freed else error.advice,
            ) from None
        finally:
            self._updating = False

    def _become(self, spec: PlanSpec) -> None:
        self._variants.free()
        self._methods = {}
        self._spec, self._handle, self._variants = spec, spec.handle, Variants(self._shell.release)
        self._since = self._shell.watchers.replacements
        if self._freed:
            # It was freed during the update.
            self._shell.release(self._handle)
            self._drop_variants()

    def _give_up(self) -> None:
        """Record that the server has freed it."""
        self._owned, self._freed = False, True
        self._drop_variants()

    # Placed again

    def _was_rebuilt(self, spec: PlanSpec, how: Rebuild) -> None:
        """Take over the compilation on other devices."""
        watched, old = self._shell.core.watched, self._handle
        for port in self._spec.info.variables:
            watched.leave(port.tensor)
        self._become(spec)
        if self._owned:
            self._shell.release(old)
        self._owned = not self._freed
        self._rebuilds.append(replace(how, devices=self.devices))

    def _let_go(self) -> None:
        """Free what is left of the plan, before it is placed again. It has no handle until then."""
        self._variants.free()
        if self._owned:
            self._owned = False
            self._shell.release(self._handle)

    @property
    def _is_placed(self) -> bool:
        """True if it has a handle; otherwise it must be placed again."""
        return self._owned

    def _enqueue(self, request: RunRequest) -> RepeatedRun:
        """Check a run that is repeated after a loss, and fix its place in the order of runs."""
        stream = stream_handle(self._shell, request.stream)
        self._live_handle  # noqa: B018 - raises when it was freed
        bound = self._bind(request.inputs, request.keywords, request.method)
        self._choose(request.fetch, request.out)
        assigned = self._assigns
        if request.copy and (assigned or request.method != "run"):
            bound = [one if isinstance(one, int) else one.copy() for one in bound]
        why_not = once = ""
        if any(isinstance(one, int) for one in bound):
            why_not = "an input is a tensor of the session, which exists nowhere else"
        elif request.out:
            why_not = "it writes to existing tensors, out="
        if request.observed is not None:
            once = "it is observed (taps=), and its values may have been read"
        entry = JournalEntry(None, bound, assigned, bool(self._spec.info.variables), why_not, once)
        into, names = self._written(request.out), self._fetched(request.fetch)
        made = [name for name in names if name not in into]
        # The journal keeps the bound inputs, and nothing else from the caller.
        bare = replace(request, inputs=None, keywords={}, out=None, stream=None)
        send = partial(self._send_again, entry, bare, made, into, Deadline(request.timeout), stream)
        repeated = RepeatedRun(self, entry, send, is_loop=request.loop is not None)
        self._shell.advance(lambda: self._live_group.enqueue(entry))
        return repeated

    def _send_again(
        self,
        entry: JournalEntry,
        request: RunRequest,
        names: Sequence[str],
        into: Mapping[str, int],
        deadline: Deadline,
        stream: int | None,
        is_wanted: bool,
    ) -> Procedure[SentRun]:
        """Send a run of the journal, for the first time or again.

        Args:
            names: The outputs to create.
            into: Handles of tensors by the name of the output to write to them.
            is_wanted: True if the run's results are wanted.
        """
        core, info = self._shell.core, self._spec.info
        self._live_handle  # noqa: B018 - raises when it was freed
        gate = core.open_gate()
        try:
            how = Sending(stream, gate, observed=True, keep=True)
            submission = Submission(
                self._spec, entry.inputs, [], [], how, self._shell.release, loop=request.loop
            )
            if is_wanted:
                fetches = request.fetch is not False
                submission.timeout_ms, submission.observed = (
                    timeout_ms(deadline.remaining()),
                    request.observed,
                )
                made = choose_outputs(core, info, names, fetches)
                there = written_outputs(info, into)
                submission.fetched, submission.kept = (made, there) if fetches else ([], [*made, *there])
            return (yield from self._submitting(submission))
        finally:
            core.close_gate(gate)

    def _checkpointing(self) -> Procedure[Checkpoint]:
        """Return the values of its variables, and of those of plans that are rebuilt with it."""
        if self._group is not None:
            return (yield from self._live_group.checkpoint())
        return (yield from read_variables(self._shell.core, self._own_variables))

    def _restoring(self, checkpoint: Checkpoint) -> Procedure[None]:
        """Restore its variables, and those of plans that are rebuilt with it, from a checkpoint."""
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(
                f"restore needs a checkpoint, not {checkpoint!r:.80}", advice="plan.checkpoint() returns one"
            )
        if self._group is not None:
            return (yield from self._live_group.restore(checkpoint))
        return (yield from restore_variables(self._shell.core, self._own_variables, checkpoint))

    @property
    def _own_variables(self) -> dict[str, VariablePort]:
        self._live_handle  # noqa: B018 - raises when it was freed
        return {one.port.name: one for one in self._spec.info.variables}

    # Observing

    def _observed(self, taps: Taps, pause: bool) -> Observed | None:
        """Return the checked values to observe of a run, or None.

        Raises InvalidArgumentError, LimitExceededError and UnsupportedError.
        """
        if taps is None:
            if pause:
                raise InvalidArgumentError(
                    "pause=True needs observed nodes, and there are none",
                    advice="name some: taps=['layer0/*']",
                )
            return None
        recipe, info = self._spec.recipe, self._shell.info
        assert recipe is not None
        nodes = tapped_nodes(recipe.graph, taps)
        found = Observed(recipe.graph, nodes, bool(pause), self._shell.let_go)
        found.check_fits(info.limits)
        return found

    def _looping(
        self, steps: int, carry: Carries, until: str | None, taps: Taps, feed: Fed, gather: float | None
    ) -> tuple[c.Loop, Observed | None]:
        """Return a loop and its checked values to observe.

        Raises InvalidArgumentError and LimitExceededError.
        """
        recipe, info = self._spec.recipe, self._shell.info
        assert recipe is not None
        loop = loop_of(self._spec.info, steps, carry, until, feed, gather)
        if taps is None:
            return loop, None
        nodes, outputs = tapped_in_loop(recipe.graph, taps)
        loop = replace(loop, taps=outputs)
        kept_bytes = info.limits.in_flight_bytes
        found = Observed(recipe.graph, nodes, False, self._shell.let_go, loop, kept_bytes)
        found.check_fits(info.limits)
        return loop, found

    def _submitting(self, submission: Submission) -> Procedure[SentRun]:
        """Send a run of the plan, or a loop, or that of its variant that observes these nodes."""
        core, observed = self._shell.core, submission.observed
        if observed is None or not observed.nodes:
            return (yield from submit(core, submission))
        variants, observing = self._variants, submission.plan.observing
        if observing is None:
            raise UnknownHandleError("the plan was freed")
        compiling = partial(observing, observed.nodes, submission.how.gate)
        variant = yield from variants.of(core, observed.nodes, compiling)
        variant.users += 1
        try:
            return (yield from submit(core, replace(submission, plan=variant.spec)))
        finally:
            variant.users -= 1

    # Running

    def _submission(self, request: RunRequest, gate: OrderGate | None = None) -> Submission:
        """Check a run or a loop.

        With a `gate` it may be sent later. Arrays that may be overwritten, and do not travel in the
        command, are then copied.
        """
        shell = self._shell
        self._live_handle  # noqa: B018 - raises when it was freed
        bound = self._bind(request.inputs, request.keywords, request.method)
        is_late = gate is not None and (request.observed is not None or not fits_inline(shell.core, bound))
        if is_late and request.copy:
            bound = [one if isinstance(one, int) else one.copy() for one in bound]
        stream = stream_handle(shell, request.stream)
        how = Sending(stream, gate, observed=True, keep=gate is not None or not request.copy)
        fetched, kept = self._choose(request.fetch, request.out)
        time_ms = timeout_ms(request.timeout)
        return Submission(
            self._spec, bound, fetched, kept, how, shell.release, time_ms, request.observed, request.loop
        )

    def _send_inline(
        self, inputs: Inputs, keywords: Mapping[str, Any], timeout: float | None, *, waits: bool
    ) -> tuple[InlinePlan, Pending] | None:
        """Send a run that fetches all outputs, if it is plainly correct and small.

        Returns None if it must take the general path, which checks its arguments or needs more than
        one message each way. `waits` is True if no other command can join the message.
        """
        plan = self._inline_plan()
        given = keywords if inputs is None else inputs
        if plan is None or (inputs is not None and keywords):
            return None
        if timeout is not None and not (type(timeout) in (int, float) and timeout >= 0):
            return None
        limit_ms = 0 if timeout is None else timeout_ms(timeout)
        if not isinstance(given, dict) or (run := plan.run(given, limit_ms)) is None:
            return None
        pending = self._send_small(run, plan, waits)
        return None if pending is None else (plan, pending)

    def _send_small(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send a small run, within the caller's trace if there is one.

        Returns None if it must take the general path.
        """
        span = begin(RUN_SPAN)
        if span is None:
            return self._shell.send_inline(run, plan, waits)
        pending = self._shell.send_inline(plan.traced(run, span.trace_parent), plan, waits)
        # A span that does not end is never reported.
        if pending is not None:
            span.end_with(pending)
        return pending

    def _inline_plan(self) -> InlinePlan | None:
        """Return the common parts of small runs, or None if the plan has none or may not run."""
        plan = self._inline
        if plan is None or plan.spec is not self._spec:
            plan = self._inline = inline_plan(self._spec, self._shell.info.limits)
        return None if self._freed or self._updating else plan

    def _bind(self, inputs: Inputs, keywords: Mapping[str, Any], method: str) -> list[Bound]:
        """Return the checked inputs in the plan's order.

        Raises InvalidInputError, with advice for `method`.
        """
        if inputs is not None and not isinstance(inputs, Mapping):
            raise InvalidInputError(
                f"inputs are given by name; the {type(inputs).__name__} has none",
                advice=_form(method, self.inputs),
            )
        given = dict(inputs or {})
        if twice := given.keys() & keywords.keys():
            raise InvalidInputError(f"input {min(twice)!r} is given twice")
        given.update(keywords)
        ports = self._spec.info.inputs
        if given.keys() != {port.name for port in ports}:
            self._refuse_names(given, method)
        return [self._bound(port, given[port.name]) for port in ports]

    def _refuse_names(self, given: Mapping[str, Any], method: str) -> None:
        known = list(self.inputs)
        for name in given:
            if name not in known:
                others = [other for other, options in _OPTIONS.items() if name in options]
                if others:
                    message = f"the plan has no input {name!r}, and plan.{method} has no such option"
                    raise InvalidInputError(message, advice=f"plan.{others[0]}(..., {name}=...) has it")
                near = get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
                raise InvalidInputError(f"the plan has no input {name!r}", advice=hint)
        missing = [f"{name!r} ({type_})" for name, type_ in self.inputs.items() if name not in given]
        advice = _form(method, self.inputs)
        raise InvalidInputError(f"inputs are missing: {', '.join(missing)}", advice=advice)

    def _bound(self, port: Port, value: Any) -> Bound:
        if isinstance(value, TensorBase):
            if value.type != port.type:
                raise InvalidInputError(
                    f"input {port.name!r} is {port.type}, not {value.type}",
                    advice=type_advice(port.type, value.type),
                )
            return value._used_in(self._shell)
        return bound_array(port, value)

    def _choose(self, fetch: Fetch, out: Out) -> tuple[list[RunOutput], list[RunOutput]]:
        """Return the outputs to fetch, and those that stay as tensors, new and existing ones."""
        chosen, written = self._fetched(fetch), self._written(out)
        if not isinstance(fetch, bool) and (twice := written.keys() & set(chosen)):
            raise InvalidArgumentError(
                f"output {min(twice)!r} is both fetched and written to a tensor",
                advice="name it in fetch= or in out=",
            )
        names = [name for name in chosen if name not in written]
        made = self._shell.advance(
            lambda: choose_outputs(self._shell.core, self._spec.info, names, fetch is not False)
        )
        into = written_outputs(self._spec.info, written) if written else []
        return ([], [*made, *into]) if fetch is False else (made, into)

    def _fetched(self, fetch: Fetch) -> list[str]:
        names = self.outputs
        if isinstance(fetch, bool):
            return list(names)
        if not isinstance(fetch, Collection):
            raise InvalidArgumentError(
                f"fetch is {fetch!r:.80}",
                advice="True, False, or the names of the outputs to fetch",
            )
        chosen = [fetch] if isinstance(fetch, str) else list(fetch)
        for name in chosen:
            if name not in names:
                raise _no_output(name, names)
        return chosen

    def _written(self, out: Out) -> dict[str, int]:
        """Return the handles of the tensors that outputs are written to."""
        if out is None:
            return {}
        if not isinstance(out, Mapping):
            raise InvalidArgumentError(
                f"out is {type(out).__name__}", advice="tensors by the names of outputs: out={'y': tensor}"
            )
        types, handles = self.outputs, {}
        for name, tensor in out.items():
            if name not in types:
                raise _no_output(name, types)
            if not isinstance(tensor, TensorBase):
                raise InvalidArgumentError(
                    f"out[{name!r}] is {type(tensor).__name__}",
                    advice="a tensor of the session: session.empty(shape, dtype)",
                )
            if tensor.type != types[name]:
                raise InvalidArgumentError(
                    f"output {name!r} is {types[name]}, not {tensor.type}",
                    advice=f"write to a tensor of its type: {new_tensor(types[name])}",
                )
            handles[name] = tensor._used_in(self._shell)
        return handles


def fed_inputs(plan: PlanBase, request: RunRequest) -> FedInputs | None:
    """Return the inputs of a loop that may be fed; None if there are none."""
    if request.loop is None or not request.loop.fed_inputs:
        return None
    return FedInputs(plan._spec.info, request.loop, plan._shell.info.limits)


def _assigned_by(spec: PlanSpec) -> frozenset[str]:
    if spec.recipe is None or not spec.info.variables:
        return frozenset()
    leaves, nodes = spec.recipe.graph.leaves, spec.recipe.graph.nodes
    return frozenset(leaves[one.operands[0]].name for one in nodes if one.op == "assign")


def _no_output(name: object, known: Collection[str]) -> InvalidArgumentError:
    return InvalidArgumentError(f"the plan has no output {name!r}", advice=f"there are: {', '.join(known)}")


def _form(method: str, names: Collection[str]) -> str:
    """Return an example of how a method of a plan is given inputs of these names."""
    rest = ", steps=N" if method == "loop" else ""
    if not names:
        return f"the plan has no inputs: plan.{method}({rest[2:]})"
    taken = [name for name in names if name in _OPTIONS[method]]
    if not taken and all(name.isidentifier() and not iskeyword(name) for name in names):
        return f"name each: plan.{method}({', '.join(f'{name}={name.upper()}' for name in names)}{rest})"
    why = f"; as a keyword, {taken[0]}= is an option of plan.{method} itself" if taken else ""
    pairs = ", ".join(f"{name!r}: ARRAY" for name in names)
    return f"pass a mapping: plan.{method}({{{pairs}}}{rest}){why}"
