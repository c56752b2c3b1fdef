"""`hg.copy_plan`: a plan on another session, with its weights and its state."""

from __future__ import annotations

from heliograph._copying import Carrying, recompiling
from heliograph._deadline import Deadline
from heliograph._devices import DevicesArgument
from heliograph.plan import Plan
from heliograph.session import Session


def copy_plan(
    plan: Plan, session: Session, devices: DevicesArgument = None, *, timeout: float | None = None
) -> Plan:
    """The same graph compiled in another session, on the named devices (default: its own first).

    Weights that the session lacks are uploaded, and its variables get what the plan's hold after everything
    sent before, through this process, a piece at a time. So does ggml_backend_graph_copy.

    Raises InvalidArgumentError for a plan some of whose leaves are tensors of its session, and whatever
    `session.compile` raises; DeadlineExceededError when all this takes longer than `timeout` seconds.
    """
    deadline = Deadline(timeout, lambda: f"copying {plan!r}")
    procedure = recompiling(plan, session, devices)
    spec = session._shell.drive(procedure, timeout, lambda: f"copying {plan!r}")
    copy = Plan(session._shell, spec, session._progress)
    try:
        for reading, writing in Carrying(plan, copy).pieces():
            plan._shell.drive(reading, deadline.remaining(), lambda: f"copying {plan!r}")
            session._shell.drive(writing, deadline.remaining(), lambda: f"copying {plan!r}")
    except BaseException as error:
        copy.free()
        raise deadline.worded(error) from None
    return copy
