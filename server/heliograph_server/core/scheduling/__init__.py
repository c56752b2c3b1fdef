"""The scheduler's decisions, pure: from a graph and what devices say of it to splits and copies.

    Problem ─▸ place_leaves ─▸ assign (pre-assign, sweep, upgrade, sources) ─▸ split ─▸ Schedule

After ggml's backend scheduler. Every node keeps the cause of its device, so that a person can ask why.
"""

from heliograph_server.core.scheduling.assignment import assign
from heliograph_server.core.scheduling.homes import leaf_roots, place_leaves
from heliograph_server.core.scheduling.model import (
    Assignment,
    Candidate,
    Copy,
    Problem,
    Schedule,
    Split,
)
from heliograph_server.core.scheduling.splitting import split

__all__ = [
    "Assignment",
    "Candidate",
    "Copy",
    "Problem",
    "Schedule",
    "Split",
    "assign",
    "leaf_roots",
    "place_leaves",
    "schedule",
    "split",
]


def schedule(problem: Problem) -> Schedule:
    """Where every node runs and what is copied. Raises UnsupportedError, OutOfMemoryError, and
    InvalidArgumentError for pins that cannot be kept."""
    roots = leaf_roots(problem.graph)
    homes = place_leaves(problem, roots)
    assignments = assign(problem, homes, roots)
    return split(problem, homes, assignments)
