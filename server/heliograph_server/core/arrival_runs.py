"""Runs: what their inputs and outputs are."""

from __future__ import annotations

from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError, InvalidInputError, UnsupportedError
from heliograph_proto.types import TensorType
from heliograph_server.core.arrival_base import ArrivalBase
from heliograph_server.core.checks import check_separate, check_writable, len_bytes
from heliograph_server.core.handles import PlanHandle, TensorHandle
from heliograph_server.core.loops import Unread, check_loop, streamed_bytes
from heliograph_server.core.ordering import Entry
from heliograph_server.core.tasks import Progress, RunTask, Wanted


class RunArrivals(ArrivalBase):
    """The command that runs a plan."""

    def _run(self, entry: Entry, kind: c.Run) -> None:
        plan = self._table.get(kind.plan, PlanHandle)
        plan.check_there()
        _check_exchange(plan, kind)
        for variable in plan.assigned:
            check_writable(variable)
        inputs = self._inputs(plan, kind.inputs)
        outputs = self._outputs(entry, plan, kind.outputs)
        sent = sum(len_bytes(one) for one in inputs if not isinstance(one, TensorHandle))
        fetched = sum(plan.outputs[one.output].type.nbytes for one in outputs if one.fetch)
        self._hold(entry, sent + fetched + self._told_bytes(entry, plan, kind))
        turn = plan.turns.next()
        progress = None if kind.loop is None else Progress()
        parts = kind.exchange_run, kind.trace_parent
        task = RunTask(plan, inputs, outputs, turn, kind.pause, kind.loop, progress, *parts)
        self._work(entry, task, plan.device)
        if plan.exchange_run is not None:
            plan.exchange_run = kind.exchange_run
        if plan.turns.lanes:
            entry.lane, entry.overlaps = plan.turns.lanes[turn], True
        bound = tuple(one for one in inputs if isinstance(one, TensorHandle))
        entry.uses = (*bound, *plan.read, *plan.assigned)
        made = tuple(one.tensor for one in outputs if one.tensor is not None)
        entry.heals = tuple(one.into for one in outputs if one.into is not None)
        check_separate(entry.heals, entry.uses)
        entry.targets = (*made, *plan.assigned, *entry.heals)
        for binding, wanted in zip(kind.outputs, outputs, strict=True):
            if wanted.tensor is not None:
                self._table.add(binding.tensor, wanted.tensor)

    def _told_bytes(self, entry: Entry, plan: PlanHandle, kind: c.Run) -> int:
        """What is held of the values that it tells of. Raises InvalidArgumentError for a bad loop."""
        if kind.loop is None:
            return plan.tapped_bytes
        check_loop(kind, plan.inputs, plan.outputs)
        entry.unread = Unread(kind.loop.unread_bytes)
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
            tensor = self._table.get(binding.tensor, TensorHandle)
            if tensor.type != port.type:
                raise InvalidInputError(f"input {port.name!r} is {port.type}, not {tensor.type}")
            return tensor
        size = len_bytes(binding.data)
        if size != port.type.nbytes:
            raise InvalidInputError(
                f"input {port.name!r} is {port.type} of {port.type.nbytes} bytes, not {size}"
            )
        self._check_inline(size, "a command")
        return binding.data

    def _outputs(
        self, entry: Entry, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]
    ) -> tuple[Wanted, ...]:
        self._check_outputs(plan, bindings)
        wanted = []
        for binding in bindings:
            type = plan.outputs[binding.output].type
            tensor = self._new_output(entry, type, plan.device) if binding.tensor else None
            into = self._existing_output(binding, type) if binding.into else None
            wanted.append(Wanted(binding.output, tensor, binding.fetch, into))
        return tuple(wanted)

    def _existing_output(self, binding: c.OutputBinding, type: TensorType) -> TensorHandle:
        if binding.tensor:
            raise InvalidArgumentError(f"output {binding.output} is to be a new tensor and an existing one")
        tensor = self._table.get(binding.into, TensorHandle)
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
                self._table.check_new(binding.tensor, TensorHandle, len(numbers))
            if binding.fetch:
                self._check_inline(plan.outputs[binding.output].type.nbytes, "a completion")


def _check_exchange(plan: PlanHandle, kind: c.Run) -> None:
    """Raises InvalidArgumentError, UnsupportedError unless it says which run of the whole it is, where it is
    a part of one."""
    if plan.exchange_run is None:
        if kind.exchange_run:
            raise InvalidArgumentError(
                f"run {kind.exchange_run} of a whole, of a plan that is no part of one",
                advice="compile it as a portion, or leave exchange_run out",
            )
        return
    if kind.exchange_run <= plan.exchange_run:
        raise InvalidArgumentError(
            f"run {kind.exchange_run} of a portion whose last run was {plan.exchange_run}",
            advice="number the runs from 1, each higher than the one before",
        )
    if kind.loop is not None or kind.pause:
        raise UnsupportedError(
            "a part of a graph on several daemons runs once, without pauses", advice="loop over the whole"
        )
