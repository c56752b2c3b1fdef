"""Values in the devices' memories between splits: their lifetimes and their places."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

from heliograph_backends.planning.memory import ArenaLayout, Lifetime, plan_arena
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import TensorType
from heliograph_server.scheduler.model import ALL_ROWS, Schedule
from heliograph_server.scheduler.splits import Clock, is_serial
from heliograph_server.scheduler.weight_homes import NOWHERE

#: First and last split.
Span: TypeAlias = tuple[int, int]
#: A value and the device in whose memory it lies; NOWHERE: it comes with the run.
Place: TypeAlias = tuple[int, int]
#: By device, by value.
Spans: TypeAlias = dict[int, dict[int, Span]]


class SplitMemory(Protocol):
    """The properties of a device's buffer type that placing needs."""

    alignment: int
    max_size: int

    def alloc_size(self, tensor: TensorType) -> int: ...


class SplitMove(NamedTuple):
    """A copy between two places."""

    source: Place
    target: Place
    #: The place of the row numbers to copy; None: all rows.
    rows: Place | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    """The work of one split: first copies, then reads and writes. Places are in the split's
    order."""

    copies: tuple[SplitMove, ...]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    #: Copies for the next split of its device, which may start as soon as this split begins.
    ahead: tuple[SplitMove, ...] = ()


def values_between(graph: Graph, schedule: Schedule, ended: Sequence[Clock]) -> Spans:
    """Return by device each result that another split or the caller reads, and each copy, with its
    span.

    A result lives on the device that computed it as long as any split on any device reads it, since
    copies are taken from there. A copy lives as long as a split of its own device reads it. A split
    that begins after the last split of a span begins when all users of the value have ended
    (`ended` is `clocks`), even where splits overlap.
    """
    users = _users(graph, schedule, ahead_of(graph, schedule, ended))
    returned = {port.value for port in graph.outputs}
    end = len(schedule.splits)
    lasting = _Ends(schedule, ended)
    found: Spans = {}
    for (value, device), splits in users.items():
        is_kept = value in returned and device == _maker(graph, schedule, value)
        found.setdefault(device, {})[value] = splits[0], end if is_kept else lasting.last(splits)
    return found


def ahead_of(graph: Graph, schedule: Schedule, ended: Sequence[Clock]) -> dict[int, dict[int, int]]:
    """Return by split and value the split during which a copy may already be made: the previous one
    on its device.

    The source must be ready when that split begins: it is a weight, or a result of a split that has
    ended by then.
    """
    if schedule.ahead_bytes is None:
        return {}
    split_of = schedule.split_of
    leaves, last = len(graph.leaves), dict[int, int]()
    found: dict[int, dict[int, int]] = {}
    for number, split in enumerate(schedule.splits):
        before = last.get(split.device, -1)
        last[split.device] = number
        for copy in split.copies if before >= 0 else ():
            if copy.size_bytes < schedule.ahead_bytes or copy.rows != ALL_ROWS:
                continue
            if copy.value < leaves:
                is_ready = graph.leaves[copy.value].kind is LeafKind.WEIGHT
            else:
                is_ready = ended[before][copy.source] >= split_of[copy.value - leaves]
            if is_ready:
                found.setdefault(number, {})[copy.value] = before
    return found


def _users(
    graph: Graph, schedule: Schedule, ahead: Mapping[int, Mapping[int, int]]
) -> dict[Place, list[int]]:
    """Return for each result that leaves its split, and each copy, the splits that touch it, in
    order."""
    leaves = len(graph.leaves)
    found: dict[Place, list[int]] = {}
    for number, split in enumerate(schedule.splits):
        for copy in split.copies:
            began = ahead.get(number, {}).get(copy.value, number)
            found.setdefault((copy.value, split.device), []).append(began)
        for value in split.inputs:
            if (value, split.device) in found:
                found[value, split.device].append(number)
            if value >= leaves and (maker := schedule.assignments[value - leaves].device) != split.device:
                found[value, maker].append(number)
        for value in split.outputs:
            found[value, split.device] = [number]
    return found


class _Ends:
    """Finds the ends of values' lifetimes."""

    def __init__(self, schedule: Schedule, ended: Sequence[Clock]) -> None:
        self._splits = schedule.splits
        self._is_serial = is_serial(schedule, ended)
        self._ended = ended
        self._chains: dict[int, list[int]] = {}
        for number, split in enumerate(schedule.splits):
            self._chains.setdefault(split.device, []).append(number)

    def last(self, users: Sequence[int]) -> int:
        """Return the last split that may begin before all users have ended."""
        if self._is_serial:
            return users[-1]
        last_of = {self._splits[user].device: user for user in users}

        def all_ended(number: int) -> bool:
            return all(self._ended[number][device] >= user for device, user in last_of.items())

        # Along the splits of one device the set of ended splits only grows.
        ends = (chain[bisect_left(chain, True, key=all_ended) - 1] for chain in self._chains.values())
        return max(users[-1], *(end for end in ends if not all_ended(end)), -1)


def plan_between(graph: Graph, spans: Mapping[int, Span], memory: SplitMemory) -> ArenaLayout:
    """Lay out the values of one device, in the order of `spans`. Raises OutOfMemoryError."""
    lifetimes = [Lifetime(memory.alloc_size(graph.type_of(value)), *span) for value, span in spans.items()]
    return plan_arena(lifetimes, memory.alignment, memory.max_size)


def moves(
    graph: Graph,
    schedule: Schedule,
    spans: Spans,
    inputs: Iterable[Sequence[int]],
    ahead: Mapping[int, Mapping[int, int]],
) -> list[Moves]:
    """Return the work of each split. `inputs` is the values that each split's device receives with
    each run; `ahead` is `ahead_of`."""
    early: dict[int, list[SplitMove]] = {}
    found = []
    for number, (split, given) in enumerate(zip(schedule.splits, inputs, strict=True)):
        device, copies = split.device, list[SplitMove]()
        for copy in split.copies:
            rows = None if copy.rows == ALL_ROWS else (copy.rows, _maker(graph, schedule, copy.rows))
            made = SplitMove((copy.value, copy.source), (copy.value, copy.destination), rows)
            began = ahead.get(number, {}).get(copy.value, number)
            (copies if began == number else early.setdefault(began, [])).append(made)
        reads = tuple(place_of(graph, schedule, spans, value, device) for value in given)
        found.append(Moves(tuple(copies), reads, tuple((value, device) for value in split.outputs)))
    return [replace(one, ahead=tuple(early.get(number, ()))) for number, one in enumerate(found)]


def place_of(graph: Graph, schedule: Schedule, spans: Spans, value: int, device: int) -> Place:
    """Return the place where a device reads a value: its own copy, or where the value was made."""
    if value in spans.get(device, ()):
        return value, device
    return value, _maker(graph, schedule, value)


def returned_places(graph: Graph, schedule: Schedule) -> list[Place]:
    """Return the places of the graph's outputs after all splits have run."""
    return [(port.value, _maker(graph, schedule, port.value)) for port in graph.outputs]


def _maker(graph: Graph, schedule: Schedule, value: int) -> int:
    leaves = len(graph.leaves)
    if value < leaves:
        return schedule.homes[value] if schedule.homes[value] >= 0 else NOWHERE
    return schedule.assignments[value - leaves].device
