"""Inline runs and the plans that they name: everything that arrival would find out, found out once."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.errors import HeliographError
from heliograph_proto.inline_runs import InlineResult, ResultForm, RunForm
from heliograph_server.core.handles import PlanHandle


class Fit:
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


def fit_of(form: RunForm, plan: PlanHandle) -> Fit | None:
    """None for what is wrong with the plan, or touches tensors: the ordinary way says what."""
    sizes = [port.type.nbytes for port in plan.inputs]
    given = [plan.outputs[place].type.nbytes for place in form.outputs if place < len(plan.outputs)]
    is_right = (
        sorted(form.inputs) == list(enumerate(sizes))
        and len(given) == len(form.outputs) == len(set(form.outputs))
        and all(given)
    )
    is_alone = not (plan.read or plan.assigned or plan.tapped_bytes or plan.turns.lanes)
    return Fit(form, plan) if is_right and is_alone and _is_there(plan) else None


def _is_there(plan: PlanHandle) -> bool:
    """Nor is it one of a reservation, which may go at any time."""
    try:
        plan.check_there()
    except HeliographError:
        return False
    return plan.error is None and plan.reservation is None
