"""Which splits must have ended before one begins; the others may run at the same time.

Splits of one device run one after the other, so what has ended is told by one number a device: a vector
clock, after Fidge and Mattern (1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling.model import Schedule

#: For each device the last of its splits that has ended; -1: none need have.
Clock: TypeAlias = tuple[int, ...]


def clocks(graph: Graph, schedule: Schedule) -> tuple[Clock, ...]:
    """What has ended when each split begins.

    A split comes after the last one of its device, after those that make what it reads or copies, and, where
    it touches a variable, after those that assigned to any before; one that assigns comes after those that
    read any. Two variables may be the same memory, so all of them are one here.
    """
    count = 1 + max((one.device for one in schedule.splits), default=0)
    split_of = {node: number for number, one in enumerate(schedule.splits) for node in one.nodes}
    leaves = len(graph.leaves)
    last = [-1] * count
    variables = _Variables(graph)
    found: list[Clock] = []
    for number, split in enumerate(schedule.splits):
        before = {split_of[value - leaves] for value in split.inputs if value >= leaves}
        before.update(variables.before(number, split.inputs, split.nodes))
        before.add(last[split.device])
        before.discard(-1)
        clock = [-1] * count
        for other in before:
            clock = list(map(max, clock, found[other]))
            device = schedule.splits[other].device
            clock[device] = max(clock[device], other)
        found.append(tuple(clock))
        last[split.device] = number
    return tuple(found)


def is_serial(schedule: Schedule, ended: Sequence[Clock]) -> bool:
    """Whether each split must wait for the one before it."""
    pairs = zip(range(len(ended) - 1), ended[1:], strict=True)
    return all(clock[schedule.splits[number].device] == number for number, clock in pairs)


class _Variables:
    """Who read and who assigned so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._lasting = {n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.VARIABLE}
        self._writer = -1
        self._readers: list[int] = []

    def before(self, number: int, inputs: Sequence[int], nodes: Sequence[int]) -> Sequence[int]:
        """The splits that this one comes after."""
        if self._lasting.isdisjoint(inputs):
            return ()
        found = [self._writer]
        if any(self._graph.nodes[node].op == "assign" for node in nodes):
            found += self._readers
            self._readers = []
            self._writer = number
        else:
            self._readers.append(number)
        return found
