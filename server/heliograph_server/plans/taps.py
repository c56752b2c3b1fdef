"""Plans whose runs are observed: which nodes may be, and how the splits end there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.contract import BufferType
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Cause
from heliograph_proto.sessions import Limits
from heliograph_server.resources.memories import readable
from heliograph_server.scheduler.model import Assignment, Candidate, Problem, Schedule
from heliograph_server.scheduler.splits import split
from heliograph_server.scheduler.weight_homes import NOWHERE


def check_taps(graph: Graph, taps: Sequence[int], limits: Limits) -> frozenset[int]:
    """The nodes that are observed. Raises InvalidArgumentError for one that is none or is named twice,
    LimitExceededError where no run could hold all their values."""
    found = frozenset(taps)
    if len(found) < len(taps):
        raise InvalidArgumentError("a node is tapped twice", advice="name each of them once")
    for node in taps:
        if not 0 <= node < len(graph.nodes):
            raise InvalidArgumentError(
                f"node {node} is tapped, of {len(graph.nodes)}", advice="inputs and weights cannot be tapped"
            )
    size_bytes = tapped_bytes(graph, found)
    if size_bytes > limits.in_flight_bytes:
        raise LimitExceededError(
            f"the tapped nodes have {size_bytes:,} bytes; this server holds {limits.in_flight_bytes:,} for a "
            "session",
            advice="tap fewer of them in one run",
        )
    return found


def tapped_bytes(graph: Graph, taps: frozenset[int]) -> int:
    """What one run tells of, all together."""
    return sum(graph.nodes[node].type.nbytes for node in taps)


def tapped(
    graph: Graph,
    memories: Sequence[BufferType],
    found: Schedule | None,
    taps: frozenset[int],
    begins: frozenset[int] = frozenset(),
) -> Schedule:
    """A schedule, or None for all on the first device, with a split that ends behind each tapped node.

    Everything lies and runs where it does without. `begins`: see `Problem`.
    """
    asked = [Candidate(one.device.name, (), readable(memories, one.device), 0) for one in memories]
    if found is not None:
        made = split(Problem(graph, asked, begins=begins), found.homes, found.assignments, taps)
        return replace(made, ahead_bytes=found.ahead_bytes, costs=found.costs)
    homes = [NOWHERE if leaf.kind is LeafKind.INPUT else 0 for leaf in graph.leaves]
    assignments = [Assignment(0, Cause.FIRST_THAT_CAN)] * len(graph.nodes)
    return split(Problem(graph, asked), homes, assignments, taps)
