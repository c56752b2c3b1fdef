"""Plans whose runs are observed: the checks of taps, and the splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.contract import BufferType
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.graph import Graph
from heliograph_proto.sessions import Limits
from heliograph_server.resources.memories import readable
from heliograph_server.scheduler.model import Candidate, Problem, Schedule
from heliograph_server.scheduler.splits import split


def check_taps(graph: Graph, taps: Sequence[int], limits: Limits) -> frozenset[int]:
    """Return the observed nodes. Raises InvalidArgumentError for a number that is no node or occurs
    twice, and LimitExceededError if a session cannot hold all their values."""
    found = frozenset(taps)
    if not found:
        return found
    if len(found) < len(taps):
        raise InvalidArgumentError("a node is tapped twice", advice="name each node once")
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
            advice="tap fewer nodes in one run",
        )
    return found


def tapped_bytes(graph: Graph, taps: frozenset[int]) -> int:
    """Return the bytes of all observed values of one run."""
    return sum(graph.nodes[node].type.nbytes for node in taps)


def tapped(
    graph: Graph,
    memories: Sequence[BufferType],
    found: Schedule | None,
    taps: frozenset[int],
    begins: frozenset[int] = frozenset(),
) -> Schedule:
    """Return a schedule in which a split ends after each tapped node.

    `found` is None for a graph on the first device alone. Homes and assignments stay the same, so a
    run behaves as it does without taps. `begins`: see `Problem`; it is ignored without a schedule.
    """
    asked = [Candidate(one.device.name, (), readable(memories, one.device), 0) for one in memories]
    if found is None:
        found, begins = Schedule.on_first(graph), frozenset()
    made = split(Problem(graph, asked, begins=begins), found.homes, found.assignments, taps)
    return replace(made, ahead_bytes=found.ahead_bytes, costs=found.costs)
