"""Validation of runs; of inline runs, which need none once they fit their plan; and of those that
repeat an earlier one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, ResultForm, RunForm
from heliograph_proto.errors import HeliographError, InvalidArgumentError, InvalidInputError, UnsupportedError
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import check_separate, len_bytes
from heliograph_server.resources.handles import HandleStorage, HandleTable, PlanHandle, TensorHandle
from heliograph_server.session.protocol.dependencies import (
    CommandPhase,
    CommandState,
    enter_storages,
    enter_stream,
)
from heliograph_server.session.protocol.instructions import Progress, RunTask, WantedOutput
from heliograph_server.session.protocol.loop_feeds import Mailbox
from heliograph_server.session.protocol.loop_rules import (
    Unread,
    check_loop,
    check_loop_exchange,
    streamed_bytes,
)
from heliograph_server.session.protocol.validation_context import ValidationContext


class RunValidator:
    """Validates the command that runs a plan."""

    def __init__(self, context: ValidationContext) -> None:
        self._context = context
        self._handles = context.handles

    def run(self, state: CommandState, kind: c.RunCommand) -> None:
        plan = self._handles.get(kind.plan, PlanHandle)
        plan.check_there()
        if plan.exchange_run is not None or kind.exchange_run:
            _check_exchange(plan, kind)
        inputs = self._inputs(plan, kind.inputs)
        outputs = self._outputs(state, plan, kind.outputs)
        held_bytes, bound, made, into = plan.tapped_bytes, [], [], []
        for given in inputs:
            if isinstance(given, TensorHandle):
                bound.append(given)
            else:
                held_bytes += len_bytes(given)
        for one in outputs:
            if one.fetch:
                held_bytes += plan.outputs[one.output].type.nbytes
            if one.tensor is not None:
                made.append(one.tensor)
            if one.into is not None:
                into.append(one.into)
        if kind.loop is not None:
            check_loop(kind, plan.inputs, plan.outputs)
            check_loop_exchange(kind, plan)
            state.unread = Unread(kind.loop.unread_bytes)
            held_bytes += kind.loop.unread_bytes + streamed_bytes(kind.loop, plan.outputs)
            held_bytes += kind.loop.fed_bytes
        self._context.hold(state, held_bytes)
        slot = plan.slots.next()
        progress = None
        if kind.loop is not None:
            progress = Progress(mailbox=Mailbox(kind.loop, plan.inputs) if kind.loop.is_fed else None)
        self._context.work(state, RunTask(plan, kind, inputs, outputs, slot, progress), plan.device)
        if plan.exchange_run is not None:
            plan.exchange_run = kind.exchange_run
        if plan.slots.queues:
            state.queue, state.overlaps = plan.slots.queues[slot], True
        state.uses, state.heals = (*bound, *plan.read, *plan.assigned, *plan.weights), tuple(into)
        if into:
            # Most plans are run on the same tensors again; the plan's own stay what they are.
            last = tuple(map(ref, into)), tuple(map(ref, bound))
            if last != plan.separate:
                check_separate(state.heals, state.uses)
                plan.separate = last
        state.targets = (*made, *plan.assigned, *into)
        if plan.assigned:
            state.in_place = dict(zip(plan.assigned, plan.assigned_names, strict=True))
        for binding, one in zip(kind.outputs, outputs, strict=True):
            if one.tensor is not None:
                self._handles.add(binding.tensor, one.tensor)

    def _inputs(
        self, plan: PlanHandle, bindings: tuple[c.InputBinding, ...]
    ) -> tuple[c.Bytes | TensorHandle, ...]:
        """Return the inputs in the plan's order. Raises InvalidInputError, or as a look-up does."""
        given: dict[int, c.Bytes | TensorHandle] = {}
        for binding in bindings:
            if not 0 <= binding.input < len(plan.inputs):
                raise InvalidInputError(f"input {binding.input} of a plan with {len(plan.inputs)}")
            port = plan.inputs[binding.input]
            if binding.input in given:
                raise InvalidInputError(f"input {port.name!r} is given twice")
            if binding.data is None:
                tensor = self._handles.get(binding.tensor, TensorHandle)
                if tensor.type != port.type:
                    raise InvalidInputError(f"input {port.name!r} is {port.type}, not {tensor.type}")
                given[binding.input] = tensor
                continue
            size = len_bytes(binding.data)
            if size != port.type.nbytes:
                raise InvalidInputError(
                    f"input {port.name!r} is {port.type} of {port.type.nbytes} bytes, not {size}"
                )
            self._context.check_inline(size, "a command")
            given[binding.input] = binding.data
        ordered = []
        for place, port in enumerate(plan.inputs):
            if place not in given:
                raise InvalidInputError(
                    f"input {port.name!r} is missing", advice="give every input of the plan"
                )
            ordered.append(given[place])
        return tuple(ordered)

    def _outputs(
        self, state: CommandState, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]
    ) -> tuple[WantedOutput, ...]:
        """Return the requested outputs, with their tensors. Raises InvalidArgumentError,
        LimitExceededError."""
        outputs: list[WantedOutput] = []
        places, numbers = set(), set()
        for binding in bindings:
            if not 0 <= binding.output < len(plan.outputs):
                raise InvalidArgumentError(f"output {binding.output} of a plan with {len(plan.outputs)}")
            if binding.output in places or binding.tensor in numbers:
                raise InvalidArgumentError(f"output {binding.output}, or its handle, is bound twice")
            places.add(binding.output)
            type, tensor, into = plan.outputs[binding.output].type, None, None
            if binding.tensor:
                numbers.add(binding.tensor)
                self._handles.check_new(binding.tensor, TensorHandle, len(numbers))
                tensor = self._context.new_output(state, type, plan.device)
            if binding.fetch:
                self._context.check_inline(type.nbytes, "a completion")
            if binding.into:
                into = self._existing_output(binding, type)
            outputs.append(WantedOutput(binding.output, tensor, binding.fetch, into))
        return tuple(outputs)

    def _existing_output(self, binding: c.OutputBinding, type: TensorType) -> TensorHandle:
        if binding.tensor:
            raise InvalidArgumentError(f"output {binding.output} goes to a new tensor and to an existing one")
        tensor = self._handles.get(binding.into, TensorHandle)
        if tensor.type != type:
            raise InvalidArgumentError(f"output {binding.output} is {type}, not {tensor.type}")
        if tensor.layout.overlaps_itself:
            raise InvalidArgumentError(f"output {binding.output} into a tensor whose elements share bytes")
        return tensor


def _check_exchange(plan: PlanHandle, kind: c.RunCommand) -> None:
    """Check that a run of a partition, and no other, is numbered. Raises InvalidArgumentError,
    UnsupportedError."""
    if plan.exchange_run is None:
        raise InvalidArgumentError(
            f"run {kind.exchange_run} of a whole graph, of a plan that is no partition of one",
            advice="compile it as a partition, or leave exchange_run out",
        )
    if kind.exchange_run <= plan.exchange_run:
        raise InvalidArgumentError(
            f"run {kind.exchange_run} of a partition whose last run was {plan.exchange_run}",
            advice="number the runs from 1, each higher than the one before",
        )
    if kind.pause:
        raise UnsupportedError("a pause in the run of a partition", advice="run the whole graph")


class InlineRunFit:
    """A form of runs that is valid for a plan and touches no tensor but its weights.

    All inputs come with the command and all outputs go with the completion, so only the runs of its
    plan and its stream can block it.
    """

    __slots__ = ("_context", "_inputs", "_outputs", "_result", "_task", "carried", "plan")

    def __init__(self, form: RunForm, plan: PlanHandle, context: ValidationContext) -> None:
        self.plan, self._context = plan, context
        self._task = RunTask(plan, c.RunCommand(form.plan, (), ()), (), ())
        places = [place for place, _ in form.inputs]
        in_order = list(range(len(places)))
        #: The position in the command of each input of the plan; None: in the plan's order.
        self._inputs = None if places == in_order else [places.index(place) for place in in_order]
        self._outputs = form.outputs
        sizes = [(place, plan.outputs[place].type.nbytes) for place in form.outputs]
        self._result = ResultForm(sizes)
        #: Bytes of its inputs, and of its outputs.
        self.carried = sum(size for _, size in form.inputs), sum(size for _, size in sizes)

    def inputs(self, given: Sequence[bytes]) -> Sequence[bytes]:
        """Return a command's inputs in the plan's order."""
        return given if self._inputs is None else [given[place] for place in self._inputs]

    def result(self, sequence: int, outputs: Sequence[bytes], device_us: float) -> InlineResult:
        """Return the completion of a run, given all outputs of the plan."""
        return InlineResult(self._result, sequence, [outputs[place] for place in self._outputs], device_us)

    def begun(self, sequence: int, *, timed: bool) -> CommandState:
        """Return the state of a run that begins while no other command is left."""
        state = CommandState(sequence, notify=True, timed=timed, counts=True, uses=self.plan.weights)
        state.phase, state.stream = CommandPhase.RUNNING, self._context.stream(c.DEFAULT_STREAM)
        self._context.work(state, self._task, self.plan.device)
        return state

    def enter(self, state: CommandState) -> None:
        """Give a run that begins its place in the order: later commands wait for it."""
        assert state.stream is not None
        self.plan.slots.enter(self._task.slot, state)
        enter_storages(state)
        enter_stream(state, state.stream)


def fit_of(form: RunForm, plan: PlanHandle, context: ValidationContext) -> InlineRunFit | None:
    """Return the fit of a form to a plan; None if it is invalid or uses tensors."""
    sizes = [port.type.nbytes for port in plan.inputs]
    given = [plan.outputs[place].type.nbytes for place in form.outputs if place < len(plan.outputs)]
    is_right = (
        sorted(form.inputs) == list(enumerate(sizes))
        and len(given) == len(form.outputs) == len(set(form.outputs))
        and all(given)
    )
    is_alone = not (plan.read or plan.assigned or plan.tapped_bytes or plan.slots.queues)
    # The memory of a reservation may be freed at any time.
    if not is_right or not is_alone or plan.error is not None or plan.reservation is not None:
        return None
    try:
        plan.check_there()
    except HeliographError:
        return None
    return InlineRunFit(form, plan, context)


@dataclass(frozen=True, slots=True)
class LoneRun:
    """A run under way. `into`: the tensor that each output of its plan is written to."""

    plan: PlanHandle
    state: CommandState
    into: Sequence[TensorHandle | None]

    @property
    def sequence(self) -> int:
        return self.state.sequence

    def note_targets(self) -> None:
        """Name what a failure leaves in doubt, before it is recorded."""
        state, plan = self.state, self.plan
        state.targets = (*plan.assigned, *(one for one in self.into if one is not None))
        state.in_place = dict(zip(plan.assigned, plan.assigned_names, strict=True))


def lone_run(plan: PlanHandle, command: c.RunCommand, sequence: int, handles: HandleTable) -> LoneRun | None:
    """Return a run that repeats an earlier one while no other command is left, and so begins at
    once. None if it takes the path of every command.

    It only reads and writes tensors that exist, are healthy, and are no weights of other plans.
    """
    if command.inputs or command.loop is not None or command.exchange_run or plan.inputs:
        return None
    if plan.exchange_run is not None or plan.reservation is not None or plan.error is not None:
        return None
    if plan.tapped_bytes or plan.slots.queues or not plan.slots.is_idle or not plan.assigned:
        return None
    into: list[TensorHandle | None] = [None] * len(plan.outputs)
    for one in command.outputs:
        if one.fetch or one.tensor or one.output >= len(into):
            return None
        if (found := handles.peek(one.into, TensorHandle)) is None:
            return None
        into[one.output] = found
    written = tuple(one for one in into if one is not None)
    # An earlier run on the same tensors was checked.
    if plan.separate != (tuple(map(ref, written)), ()):
        return None
    if any(one.problem() or (one.storage and one.storage.weights) for one in written):
        return None
    if not _is_healthy(plan):
        return None
    state = CommandState(sequence, RunTask(plan, command, (), ()), phase=CommandPhase.RUNNING, counts=True)
    for storage in (*plan.written_storages, *(one.storage for one in written)):
        if storage is not None:
            storage.version += 1
    plan.slots.enter(0, state)
    return LoneRun(plan, state, into)


def _is_healthy(plan: PlanHandle) -> bool:
    """True if a run finds its tensors as it needs them.

    A tensor's own error is known by the time that no command is left, so later looks are at the
    bytes alone.
    """
    if not plan.storages:
        tensors = (*plan.read, *plan.assigned, *plan.weights)
        if any(one.storage is None or one.problem() for one in tensors):
            return False
        plan.storages, plan.written_storages = _each_once(tensors), _each_once(plan.assigned)
    if any(one.error is not None or one.poisons or one.buffer is None for one in plan.storages):
        return False
    return not any(one.weights for one in plan.written_storages)


def _each_once(tensors: Sequence[TensorHandle]) -> tuple[HandleStorage, ...]:
    return tuple({one.storage: None for one in tensors if one.storage is not None})
