"""Which values lie in which device's memory between splits, how long, and where."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heliograph_backends.planning.memory import Arena, Lifetime, plan_arena
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.core.scheduling.homes import NOWHERE
from heliograph_server.core.scheduling.model import Schedule
from heliograph_server.core.scheduling.order import Clock, is_serial

#: First and last split.
Span: TypeAlias = tuple[int, int]
#: A value and the device in whose memory it lies; NOWHERE: it came with the run.
Place: TypeAlias = tuple[int, int]
#: By device, by value.
Spans: TypeAlias = dict[int, dict[int, Span]]


class Memory(Protocol):
    """What is asked of a device's buffer type."""

    alignment: int
    max_size: int

    def alloc_size(self, tensor: TensorType) -> int: ...


@dataclass(frozen=True, slots=True)
class Moves:
    """What one split does: copies, from and to; then it reads and writes. Places in the split's order."""

    copies: tuple[tuple[Place, Place], ...]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]


def values_between(graph: Graph, schedule: Schedule, ended: Sequence[Clock]) -> Spans:
    """By device: each result that another split or the caller reads, and each copy, with its span.

    A result lives on the device that computed it as long as any split reads it, wherever that is, since
    copies are taken from there; a copy as long as a split of its own device reads it. What begins behind the
    last split of a span begins when all that used the value have ended (`ended`: `clocks`), whatever runs at
    the same time.
    """
    users = _users(graph, schedule)
    returned = {port.value for port in graph.outputs}
    end = len(schedule.splits)
    lasting = _Ends(schedule, ended)
    found: Spans = {}
    for (value, device), splits in users.items():
        is_kept = value in returned and device == _maker(graph, schedule, value)
        found.setdefault(device, {})[value] = splits[0], end if is_kept else lasting.last(splits)
    return found


def _users(graph: Graph, schedule: Schedule) -> dict[Place, list[int]]:
    """Of each result that leaves its split, and each copy: the splits that touch it, in order."""
    leaves = len(graph.leaves)
    found: dict[Place, list[int]] = {}
    for number, split in enumerate(schedule.splits):
        for copy in split.copies:
            found.setdefault((copy.value, split.device), []).append(number)
        for value in split.inputs:
            if (value, split.device) in found:
                found[value, split.device].append(number)
            if value >= leaves and (maker := schedule.assignments[value - leaves].device) != split.device:
                found[value, maker].append(number)
        for value in split.outputs:
            found[value, split.device] = [number]
    return found


class _Ends:
    """Until when values must stay."""

    def __init__(self, schedule: Schedule, ended: Sequence[Clock]) -> None:
        self._splits = schedule.splits
        self._is_serial = is_serial(schedule, ended)
        self._ended = ended
        self._chains: dict[int, list[int]] = {}
        for number, split in enumerate(schedule.splits):
            self._chains.setdefault(split.device, []).append(number)

    def last(self, users: Sequence[int]) -> int:
        """The last split that may begin before all users have ended."""
        if self._is_serial:
            return users[-1]
        last_of = {self._splits[user].device: user for user in users}

        def all_ended(number: int) -> bool:
            return all(self._ended[number][device] >= user for device, user in last_of.items())

        # Along the splits of one device what has ended only grows.
        ends = (chain[bisect_left(chain, True, key=all_ended) - 1] for chain in self._chains.values())
        return max(users[-1], *(end for end in ends if not all_ended(end)), -1)


def plan_between(graph: Graph, spans: Mapping[int, Span], memory: Memory) -> Arena:
    """Where the values of one device lie, in the order of `spans`. Raises OutOfMemoryError."""
    lifetimes = [Lifetime(memory.alloc_size(graph.type_of(value)), *span) for value, span in spans.items()]
    return plan_arena(lifetimes, memory.alignment, memory.max_size)


def moves(graph: Graph, schedule: Schedule, spans: Spans, inputs: Iterable[Sequence[int]]) -> list[Moves]:
    """What each split does; `inputs`: of each split, the values that its device is given with each run."""
    found = []
    for split, given in zip(schedule.splits, inputs, strict=True):
        device = split.device
        found.append(
            Moves(
                tuple(((copy.value, copy.source), (copy.value, device)) for copy in split.copies),
                tuple(place_of(graph, schedule, spans, value, device) for value in given),
                tuple((value, device) for value in split.outputs),
            )
        )
    return found


def place_of(graph: Graph, schedule: Schedule, spans: Spans, value: int, device: int) -> Place:
    """Where a device reads a value: its own copy, or where it was made."""
    if value in spans.get(device, ()):
        return value, device
    return value, _maker(graph, schedule, value)


def returned_places(graph: Graph, schedule: Schedule) -> list[Place]:
    """Where the graph's outputs are read from when all splits have run."""
    return [(port.value, _maker(graph, schedule, port.value)) for port in graph.outputs]


def _maker(graph: Graph, schedule: Schedule, value: int) -> int:
    leaves = len(graph.leaves)
    if value < leaves:
        return schedule.homes[value] if schedule.homes[value] >= 0 else NOWHERE
    return schedule.assignments[value - leaves].device
