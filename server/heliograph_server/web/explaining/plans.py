"""Plans as tables: those of the sessions, and one of them with its splits, devices and copies.

Called on a thread: a plan on other hosts is asked there for its times.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import PlanReport, SplitReport
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.session.parts.plan_status import plan_status
from heliograph_server.session.session import Session
from heliograph_server.web.facts import View

#: The most rows of a table, and the most ports, ops and copies of a row.
MOST_PLANS, MOST_SPLITS, MOST_NAMES = 300, 500, 12


def plans_of(sessions: Iterable[Session], view: View) -> dict[str, Any]:
    """The plans that have a handle, those of the newest sessions first, at most MOST_PLANS."""
    rows: list[dict[str, Any]] = []
    count = 0
    for session in reversed(list(sessions)):
        if not view.may_see(session.principal.tenant):
            continue
        for number, plan in session.plans_now().items():
            count += 1
            if len(rows) < MOST_PLANS:
                rows.append(_row(session, number, plan))
    return {"plans": rows, "count": count}


def _row(session: Session, number: int, plan: LoadedPlan) -> dict[str, Any]:
    # Numbers of handles have 64 bits, more than a number of JavaScript.
    graph = plan.client_graph
    splits = len(plan.plan.schedule.splits) if isinstance(plan.plan, MultiDevicePlan) else 1
    return {
        "session": session.number,
        "plan": str(number),
        "devices": list(plan.device_names),
        "nodes": len(graph.nodes),
        "splits": splits,
        "took": round(plan.took_us, 1),
        "predicted": round(plan.predicted_us, 1),
        "memory": 0 if plan.is_lost else sum(plan.kept_bytes().values()),
        "lost": plan.is_lost,
        "inputs": [one.name for one in graph.of_kind(LeafKind.INPUT)][:MOST_NAMES],
        "outputs": [one.name for one in graph.outputs][:MOST_NAMES],
    }


def plan_of(session: Session, number: int) -> dict[str, Any]:
    """One plan with its splits. Raises UnknownHandleError, and the errors of its devices."""
    report = session.explain(number)
    status = plan_status(session, number, explain=False)
    plan = session.plans_now().get(number)
    graph = plan.client_graph if plan is not None else None
    nodes = _nodes_by_split(report, graph)
    return {
        "session": session.number,
        "plan": str(number),
        "predicted": round(report.predicted_us, 1),
        "took": round(status.took_us, 1),
        # Totals, by which the page has those of the last looks.
        "at": time.monotonic(),
        "runs": status.runs,
        "times": [[round(one.took_us, 1), one.runs] for one in status.times],
        "waited": round(status.waited_us),
        "waiting": status.waiting,
        "running": status.running,
        "loop": [status.loop_step, status.loop_steps],
        "devices": [
            {
                "name": one.name,
                "weights": one.weights_bytes,
                "variables": one.variables_bytes,
                "compute": one.compute_bytes,
            }
            for one in report.devices
        ],
        "splits": [
            _split(report, place, one, nodes.get(place, Counter()))
            for place, one in enumerate(report.splits[:MOST_SPLITS])
        ],
        "split_count": len(report.splits),
        "nodes": len(report.nodes),
    }


def _nodes_by_split(report: PlanReport, graph: Graph | None) -> dict[int, Counter[str]]:
    """The ops of each split, counted; without the graph, nodes of an unknown op."""
    found: dict[int, Counter[str]] = {}
    for place, node in enumerate(report.nodes):
        known = graph is not None and place < len(graph.nodes)
        op = graph.nodes[place].op if known and graph is not None else "node"
        found.setdefault(node.split, Counter())[op] += 1
    return found


def _split(report: PlanReport, place: int, one: SplitReport, ops: Counter[str]) -> dict[str, Any]:
    return {
        "number": place,
        "device": report.devices[one.device].name,
        "nodes": ops.total(),
        "ops": ops.most_common(MOST_NAMES),
        "steps": one.steps,
        "memory": one.compute_bytes,
        "began": round(one.began_us, 1),
        "copy": round(one.copy_us, 1),
        "compute": round(one.compute_us, 1),
        "predicted_began": round(one.predicted_began_us, 1),
        "predicted_copy": round(one.predicted_copy_us, 1),
        "predicted_compute": round(one.predicted_compute_us, 1),
        "copied": sum(copy.size_bytes for copy in one.copies),
        "sources": sorted({report.devices[copy.source].name for copy in one.copies}),
        "note": one.note,
    }
