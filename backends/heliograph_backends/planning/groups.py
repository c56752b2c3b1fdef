"""Groups: nodes that run as one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from heliograph_backends.planning.layout import SOURCES
from heliograph_proto.graph import Graph

#: The role of a node in a group; "mixed": an elementwise node of several data types, in a chain with
#: others; "other": a node that is always a step by itself.
Role: TypeAlias = Literal["elementwise", "mixed", "matmul", "windows", "norm", "other"]


#: A group as a plain tuple, where many are made and few are kept.
PlainGroup: TypeAlias = tuple[Role, tuple[int, ...]]


class Group(NamedTuple):
    """The numbers of the nodes of one step, in order; the last node's value is the result."""

    role: Role
    nodes: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of the node whose value is the result."""
        return self.nodes[-1]


def times_of_nodes(graph: Graph, groups: Sequence[Group], times: Mapping[int, float]) -> tuple[float, ...]:
    """Return for each node the time of its group, the sum of those of its nodes."""
    found = [0.0] * len(graph.nodes)
    for group in groups:
        took = sum(times.get(node, 0.0) for node in group.nodes)
        for node in group.nodes:
            found[node] = took
    return tuple(found)


def steps_of_nodes(graph: Graph, groups: Sequence[Group]) -> tuple[int, ...]:
    """Return the number, from 1, of the group of each node; 0 for a constant, which is computed
    before."""
    found, number = [0] * len(graph.nodes), 0
    for group in groups:
        if graph.nodes[group.last].op in SOURCES:
            continue
        number += 1
        for node in group.nodes:
            found[node] = number
    return tuple(found)
