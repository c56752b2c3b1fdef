"""The status of a session's plans for people who watch: totals of their runs, and those under way.

Any thread; a report asks the hosts of the plan's devices, and blocks meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from heliograph_proto.errors import DeviceLostError, UnknownHandleError
from heliograph_proto.plans import PlanReport, PlanStatus
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.plans.plan_times import run_times
from heliograph_server.session.protocol.dependencies import CommandPhase, CommandState
from heliograph_server.session.protocol.instructions import RunTask

if TYPE_CHECKING:
    from heliograph_server.session.session import Session


def plan_statuses(session: Session) -> list[PlanStatus]:
    """The plans of a session that have a handle."""
    return [_status(session.number, *one) for one in _plans_now(session).items()]


def plan_status(session: Session, plan: int, *, explain: bool = True) -> PlanStatus:
    """One plan, with its report unless it is lost.

    Raises UnknownHandleError, and the errors of its hosts.
    """
    found = _plans_now(session).get(plan)
    if found is None:
        raise UnknownHandleError(f"session {session.number} has no plan {plan}", advice="it may be freed")
    status = _status(session.number, plan, found)
    if status.lost or not explain:
        return status
    try:
        return replace(status, report=_brief(session.explain(plan)))
    except DeviceLostError as error:
        return replace(status, lost=error.message)


def _plans_now(session: Session) -> dict[int, tuple[LoadedPlan, Sequence[CommandState]]]:
    """The plans that have a handle, with their runs that have not ended. Handles of one plan share
    its runs."""
    runs: dict[LoadedPlan, list[CommandState]] = defaultdict(list)
    with session.inside.lock:
        plans = session.plans_now()
        for state in session.inside.core.runs if plans else ():
            assert isinstance(state.task, RunTask)
            runs[state.task.plan.plan].append(state)
    return {number: (one, runs.get(one, ())) for number, one in plans.items()}


def _status(session: int, number: int, found: tuple[LoadedPlan, Sequence[CommandState]]) -> PlanStatus:
    plan, runs = found
    splits = len(plan.plan.schedule.splits) if isinstance(plan.plan, MultiDevicePlan) else 1
    times = run_times(one.times for one in plan.copies)
    running = [one.task for one in runs if one.phase is CommandPhase.RUNNING]
    loop = next((one for one in running if isinstance(one, RunTask) and one.progress is not None), None)
    lost = plan.lost
    return PlanStatus(
        session,
        number,
        plan.device_names,
        len(plan.client_graph.nodes),
        splits,
        sum(one.runs for one in times),
        times,
        plan.took_us,
        plan.predicted_us,
        sum(one.times.waited_us for one in plan.copies),
        len(runs) - len(running),
        len(running),
        max(loop.progress.done, loop.progress.told) if loop is not None and loop.progress else 0,
        loop.command.loop.steps if loop is not None and loop.command.loop is not None else 0,
        0 if plan.is_lost else sum(plan.kept_bytes().values()),
        "" if lost is None else lost.message,
    )


def _brief(report: PlanReport) -> PlanReport:
    """The parts of a report that do not grow with the graph's nodes."""
    return replace(report, nodes=(), weights=(), parts=(), links=(), blocks=(), stored=())
