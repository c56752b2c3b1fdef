"""`hg.aio.copy_plan`: a plan on another session, with its weights and its state."""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

from heliograph._copying import Carrying, recompiling
from heliograph._deadline import Deadline
from heliograph._devices import DevicesArgument
from heliograph.aio.plan import Plan
from heliograph.aio.session import Session


async def copy_plan(
    plan: Plan, session: Session, devices: DevicesArgument = None, *, timeout: float | None = None
) -> Plan:
    """As hg.copy_plan."""
    deadline = Deadline(timeout, lambda: f"copying {plan!r}")
    procedure = recompiling(plan, session, devices)
    spec = await session._shell.drive(procedure, timeout, lambda: f"copying {plan!r}")
    copy = Plan(session._shell, spec, session._progress)
    try:
        for reading, writing in Carrying(plan, copy).pieces():
            await plan._shell.drive(reading, deadline.remaining(), lambda: f"copying {plan!r}")
            await session._shell.drive(writing, deadline.remaining(), lambda: f"copying {plan!r}")
    except BaseException as error:
        copy.free()
        raise deadline.worded(error) from None
    return copy
