"""The scheduler's decisions: from a graph and the properties of devices to splits and copies. Pure.

    Problem ─▸ place_leaves ─▸ assign (pre-assign, sweep, upgrade, sources) ─▸ split ─▸ Schedule

After ggml's backend scheduler. Each node keeps the cause of its device, for reports.

With devices of several sites and measured links between them, stretches of the graph are also
placed by predicted time, and the faster of the two schedules is taken:

    Problem ─▸ costs_of ─▸ stretches ─▸ place_leaves ─▸ assign ─▸ split ─▸ predict
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_proto.errors import OutOfMemoryError
from heliograph_server.scheduler.assignment import assign
from heliograph_server.scheduler.costs import costs_of
from heliograph_server.scheduler.model import Problem, Schedule
from heliograph_server.scheduler.pipeline_stages import SAME, stretches
from heliograph_server.scheduler.prediction import predict
from heliograph_server.scheduler.splits import split
from heliograph_server.scheduler.weight_homes import leaf_roots, place_leaves


def schedule(problem: Problem) -> Schedule:
    """Decide where each node runs and what is copied.

    Raises UnsupportedError, OutOfMemoryError, and InvalidArgumentError for pins that cannot be
    kept.
    """
    roots = leaf_roots(problem.graph)
    return _by_time(problem, roots) if problem.links else _placed(problem, roots)


def _placed(problem: Problem, roots: Sequence[int], wishes: Sequence[int] = ()) -> Schedule:
    """Place weights where memory is available, in their order, or on the devices in `wishes`."""
    homes = place_leaves(problem, roots, wishes)
    return split(problem, homes, assign(problem, homes, roots, wishes))


def _by_time(problem: Problem, roots: Sequence[int]) -> Schedule:
    """Return the schedule with the shortest predicted time: by memory alone, or by time. Of equal
    ones the first."""
    costs = costs_of(problem)
    found: list[Schedule] = []
    refused: OutOfMemoryError | None = None
    for wishes in ((), *stretches(problem, roots, costs)):
        try:
            found.append(replace(_placed(problem, roots, wishes), costs=costs))
        except OutOfMemoryError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    if len(found) == 1:
        return found[0]
    times = [predict(problem.graph, one, costs).every_s(problem.pipeline) for one in found]
    return next(one for one, seconds in zip(found, times, strict=True) if seconds * SAME <= min(times))
