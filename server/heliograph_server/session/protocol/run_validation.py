"""Runs: what their inputs and outputs are, and which of them fit the short way. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, ResultForm, RunForm
from heliograph_proto.errors import HeliographError, InvalidArgumentError, InvalidInputError, UnsupportedError
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import check_separate, check_writable, len_bytes
from heliograph_server.resources.handles import PlanHandle, TensorHandle
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import Progress, RunTask, WantedOutput
from heliograph_server.session.protocol.loop_rules import Unread, check_loop, streamed_bytes
from heliograph_server.session.protocol.validation_context import ValidationContext


class RunValidator:
    """The command that runs a plan."""

    def __init__(self, context: ValidationContext) -> None:
        self._context = context
        self._handles = context.handles

    def run(self, state: CommandState, kind: c.RunCommand) -> None:
        plan = self._handles.get(kind.plan, PlanHandle)
        plan.check_there()
        _check_exchange(plan, kind)
        for variable in plan.assigned:
            check_writable(variable)
        inputs = self._inputs(plan, kind.inputs)
        outputs = self._outputs(state, plan, kind.outputs)
        sent = sum(len_bytes(one) for one in inputs if not isinstance(one, TensorHandle))
        fetched = sum(plan.outputs[one.output].type.nbytes for one in outputs if one.fetch)
        self._context.hold(state, sent + fetched + self._told_bytes(state, plan, kind))
        slot = plan.slots.next()
        progress = None if kind.loop is None else Progress()
        task = RunTask(plan, kind, inputs, outputs, slot, progress)
        self._context.work(state, task, plan.device)
        if plan.exchange_run is not None:
            plan.exchange_run = kind.exchange_run
        if plan.slots.queues:
            state.queue, state.overlaps = plan.slots.queues[slot], True
        bound = tuple(one for one in inputs if isinstance(one, TensorHandle))
        state.uses = (*bound, *plan.read, *plan.assigned)
        made = tuple(one.tensor for one in outputs if one.tensor is not None)
        state.heals = tuple(one.into for one in outputs if one.into is not None)
        check_separate(state.heals, state.uses)
        state.targets = (*made, *plan.assigned, *state.heals)
        for binding, wanted in zip(kind.outputs, outputs, strict=True):
            if wanted.tensor is not None:
                self._handles.add(binding.tensor, wanted.tensor)

    def _told_bytes(self, state: CommandState, plan: PlanHandle, kind: c.RunCommand) -> int:
        """What is held of the values that it tells of. Raises InvalidArgumentError for a bad loop."""
        if kind.loop is None:
            return plan.tapped_bytes
        check_loop(kind, plan.inputs, plan.outputs)
        state.unread = Unread(kind.loop.unread_bytes)
        return kind.loop.unread_bytes + plan.tapped_bytes + streamed_bytes(kind.loop, plan.outputs)

    def _inputs(
        self, plan: PlanHandle, bindings: tuple[c.InputBinding, ...]
    ) -> tuple[c.Bytes | TensorHandle, ...]:
        given: dict[int, c.Bytes | TensorHandle] = {}
        for binding in bindings:
            if not 0 <= binding.input < len(plan.inputs):
                raise InvalidInputError(f"input {binding.input} of a plan with {len(plan.inputs)}")
            if binding.input in given:
                raise InvalidInputError(f"input {plan.inputs[binding.input].name!r} is given twice")
            given[binding.input] = self._input(plan, binding)
        missing = [port.name for place, port in enumerate(plan.inputs) if place not in given]
        if missing:
            raise InvalidInputError(f"input {missing[0]!r} is missing", advice="give every input of the plan")
        return tuple(given[place] for place in range(len(plan.inputs)))

    def _input(self, plan: PlanHandle, binding: c.InputBinding) -> c.Bytes | TensorHandle:
        port = plan.inputs[binding.input]
        if binding.data is None:
            tensor = self._handles.get(binding.tensor, TensorHandle)
            if tensor.type != port.type:
                raise InvalidInputError(f"input {port.name!r} is {port.type}, not {tensor.type}")
            return tensor
        size = len_bytes(binding.data)
        if size != port.type.nbytes:
            raise InvalidInputError(
                f"input {port.name!r} is {port.type} of {port.type.nbytes} bytes, not {size}"
            )
        self._context.check_inline(size, "a command")
        return binding.data

    def _outputs(
        self, state: CommandState, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]
    ) -> tuple[WantedOutput, ...]:
        self._check_outputs(plan, bindings)
        wanted = []
        for binding in bindings:
            type = plan.outputs[binding.output].type
            tensor = self._context.new_output(state, type, plan.device) if binding.tensor else None
            into = self._existing_output(binding, type) if binding.into else None
            wanted.append(WantedOutput(binding.output, tensor, binding.fetch, into))
        return tuple(wanted)

    def _existing_output(self, binding: c.OutputBinding, type: TensorType) -> TensorHandle:
        if binding.tensor:
            raise InvalidArgumentError(f"output {binding.output} is to be a new tensor and an existing one")
        tensor = self._handles.get(binding.into, TensorHandle)
        if tensor.type != type:
            raise InvalidArgumentError(f"output {binding.output} is {type}, not {tensor.type}")
        if tensor.layout.overlaps_itself:
            raise InvalidArgumentError(f"output {binding.output} into a tensor whose elements share bytes")
        check_writable(tensor)
        return tensor

    def _check_outputs(self, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]) -> None:
        places, numbers = set(), set()
        for binding in bindings:
            if not 0 <= binding.output < len(plan.outputs):
                raise InvalidArgumentError(f"output {binding.output} of a plan with {len(plan.outputs)}")
            if binding.output in places or binding.tensor in numbers:
                raise InvalidArgumentError(f"output {binding.output}, or its handle, is bound twice")
            places.add(binding.output)
            if binding.tensor:
                numbers.add(binding.tensor)
                self._handles.check_new(binding.tensor, TensorHandle, len(numbers))
            if binding.fetch:
                self._context.check_inline(plan.outputs[binding.output].type.nbytes, "a completion")


def _check_exchange(plan: PlanHandle, kind: c.RunCommand) -> None:
    """Raises InvalidArgumentError, UnsupportedError unless it says which run of the whole it is, where it is
    a part of one."""
    if plan.exchange_run is None:
        if kind.exchange_run:
            raise InvalidArgumentError(
                f"run {kind.exchange_run} of a whole, of a plan that is no part of one",
                advice="compile it as a partition, or leave exchange_run out",
            )
        return
    if kind.exchange_run <= plan.exchange_run:
        raise InvalidArgumentError(
            f"run {kind.exchange_run} of a partition whose last run was {plan.exchange_run}",
            advice="number the runs from 1, each higher than the one before",
        )
    if kind.loop is not None or kind.pause:
        raise UnsupportedError(
            "a part of a graph on several daemons runs once, without pauses", advice="loop over the whole"
        )


class InlineRunFit:
    """A form of runs that is right for a plan, and touches no tensor: what it takes it brings along, and what
    it gives goes back, so that only the runs of its plan and its stream are in its way."""

    __slots__ = ("_inputs", "_outputs", "_result", "carried", "plan")

    def __init__(self, form: RunForm, plan: PlanHandle) -> None:
        self.plan = plan
        places = [place for place, _ in form.inputs]
        in_order = list(range(len(places)))
        #: Where each input of the plan is in the command; None: in the plan's order.
        self._inputs = None if places == in_order else [places.index(place) for place in in_order]
        self._outputs = form.outputs
        sizes = [(place, plan.outputs[place].type.nbytes) for place in form.outputs]
        self._result = ResultForm(sizes)
        #: Bytes of its inputs, and of the outputs that it gives.
        self.carried = sum(size for _, size in form.inputs), sum(size for _, size in sizes)

    def inputs(self, given: Sequence[bytes]) -> Sequence[bytes]:
        """A command's inputs in the plan's order."""
        return given if self._inputs is None else [given[place] for place in self._inputs]

    def result(self, sequence: int, outputs: Sequence[bytes], device_us: float) -> InlineResult:
        """The completion of a run with all outputs of the plan."""
        return InlineResult(self._result, sequence, [outputs[place] for place in self._outputs], device_us)


def fit_of(form: RunForm, plan: PlanHandle) -> InlineRunFit | None:
    """None for what is wrong with the plan, or touches tensors: the ordinary way says what."""
    sizes = [port.type.nbytes for port in plan.inputs]
    given = [plan.outputs[place].type.nbytes for place in form.outputs if place < len(plan.outputs)]
    is_right = (
        sorted(form.inputs) == list(enumerate(sizes))
        and len(given) == len(form.outputs) == len(set(form.outputs))
        and all(given)
    )
    is_alone = not (plan.read or plan.assigned or plan.tapped_bytes or plan.slots.queues)
    return InlineRunFit(form, plan) if is_right and is_alone and _is_there(plan) else None


def _is_there(plan: PlanHandle) -> bool:
    """Nor is it one of a reservation, which may go at any time."""
    try:
        plan.check_there()
    except HeliographError:
        return False
    return plan.error is None and plan.reservation is None
