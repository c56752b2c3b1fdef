"""Spreading a graph over devices so that it fits: the scheduler's decisions against what devices estimate.

The scheduler counts weights; what a device keeps beside them, and intermediate results, it learns from the
device's estimate of each split, unless it has far more than enough. Where that passes what the device has,
its budget shrinks, and the scheduler decides again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from heliograph_backends.contract import BufferType, Device, DeviceCompileOptions
from heliograph_proto.errors import OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_server.scheduler.model import Problem, Schedule
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.split_memory import ahead_of, plan_between, values_between
from heliograph_server.scheduler.splits import SplitGraph, clocks, in_order, parts_on

#: How often budgets shrink before the devices themselves say what does not fit.
ROUNDS = 8
#: They shrink by up to this part of themselves more than what was too much: that mostly saves a round.
MARGIN = 1000
#: A device with this many times the bytes of all leaves, results and copies there has enough, whatever it
#: keeps beside them.
AMPLE = 2
#: And of this much padding for each of them.
AMPLE_PADDING_BYTES = 1024


def spread(
    problem: Problem,
    devices: Sequence[Device],
    options: DeviceCompileOptions,
    copies: int = 1,
    memories: Sequence[BufferType] = (),
) -> Schedule:
    """A schedule that fits, with so many copies of all that runs need for themselves; `memories` as in
    `candidates`. Raises what `schedule` does."""
    budgets: Sequence[int] = [one.free_bytes for one in problem.devices]
    needs = _Needs(problem, memories or [one.buffer_type for one in devices], options, copies)
    found = schedule(problem)
    for _ in range(ROUNDS):
        over = needs.overshoot(found)
        if any(over.values()) and ahead_of(problem.graph, found, clocks(problem.graph, found)):
            # Copies one after the other take less memory.
            found = replace(found, ahead_bytes=None)
            over = needs.overshoot(found)
        if not any(over.values()):
            break
        budgets, found = _again(problem, budgets, over)
    return found


def _again(
    problem: Problem, budgets: Sequence[int], over: Mapping[int, int]
) -> tuple[Sequence[int], Schedule]:
    """With budgets that are smaller by what is too much, and a little more, since values live longer across
    another cut; without that where it is what does not fit."""
    less = [max(0, size - over.get(place, 0)) for place, size in enumerate(budgets)]
    spare = [size - min(over.get(place, 0) // 4, size // MARGIN) for place, size in enumerate(less)]
    try:
        return spare, _within(problem, spare)
    except OutOfMemoryError:
        return less, _within(problem, less)


def _within(problem: Problem, budgets: Sequence[int]) -> Schedule:
    pairs = zip(problem.devices, budgets, strict=True)
    return schedule(replace(problem, devices=[replace(one, free_bytes=size) for one, size in pairs]))


def ample_bytes(graph: Graph, found: Schedule, copies: int = 1) -> int:
    """What holds all of the graph and all that is copied: where each device has it, memory decides nothing.
    `copies`: of what runs need for themselves."""
    types = [*(leaf.type for leaf in graph.leaves), *(node.type for node in graph.nodes)]
    count = len(types) + sum(len(one.copies) for one in found.splits)
    size_bytes = sum([type.nbytes for type in types]) + found.copied_bytes
    return copies * (AMPLE * size_bytes + AMPLE_PADDING_BYTES * count)


def _tight(problem: Problem, found: Schedule, copies: int) -> frozenset[int]:
    """The devices that must be asked whether a schedule fits: it fits the others by far."""
    graph, count = problem.graph, len(problem.devices)
    sizes, values = [0] * count, [0] * count
    types = [*(leaf.type for leaf in graph.leaves), *(node.type for node in graph.nodes)]
    devices = [*found.homes, *(one.device for one in found.assignments)]
    for type, device in zip(types, devices, strict=True):
        if device >= 0:
            sizes[device] += type.nbytes
            values[device] += 1
    for split in found.splits:
        sizes[split.device] += sum([copy.size_bytes for copy in split.copies])
        values[split.device] += len(split.copies)
    return frozenset(
        place
        for place, one in enumerate(problem.devices)
        if copies * (AMPLE * sizes[place] + AMPLE_PADDING_BYTES * values[place]) > one.free_bytes
    )


class _Needs:
    """What schedules take of devices, who are asked as seldom as can be."""

    def __init__(
        self, problem: Problem, memories: Sequence[BufferType], options: DeviceCompileOptions, copies: int
    ) -> None:
        self._copies = copies
        self._problem = problem
        self._graph = problem.graph
        self._memories = memories
        self._options = options
        #: By device: nodes that it was asked about, and the bytes that they take beside their leaves.
        self._known: dict[int, tuple[frozenset[int], int]] = {}

    def overshoot(self, found: Schedule) -> dict[int, int]:
        """By how many bytes a schedule passes what each device has that may not have enough."""
        tight = _tight(self._problem, found, self._copies)
        if not tight:
            return {}
        needs = self._in_memory(found, tight)
        spare = {place: self._problem.devices[place].free_bytes - need for place, need in needs.items()}
        asked = {place for place in tight if not self._is_known_to_fit(found, place, spare[place])}
        for place, size_bytes in self._estimates(found, asked).items():
            spare[place] -= size_bytes
        return {place: max(0, -spare[place]) for place in asked}

    def _in_memory(self, found: Schedule, places: Set[int]) -> dict[int, int]:
        """Bytes of leaves and of values between splits."""
        needs = dict.fromkeys(places, 0)
        for leaf, home in zip(self._graph.leaves, found.homes, strict=True):
            if home in needs:
                needs[home] += self._memories[home].alloc_size(leaf.type)
        for place, spans in values_between(self._graph, found, clocks(self._graph, found)).items():
            if place in needs:
                arena = plan_between(self._graph, spans, self._memories[place])
                needs[place] += self._copies * arena.size_bytes
        return needs

    def _is_known_to_fit(self, found: Schedule, place: int, spare_bytes: int) -> bool:
        """Whether more nodes than these were said to fit into what is left."""
        nodes, size_bytes = self._known.get(place, (frozenset(), 0))
        return size_bytes <= spare_bytes and nodes.issuperset(_nodes_on(found, place))

    def _estimates(self, found: Schedule, asked: Set[int]) -> dict[int, int]:
        sizes = dict.fromkeys(asked, 0)
        for place, part in parts_on(self._graph, found, asked):
            sizes[place] += _estimate(self._memories[place].device, part, self._options, self._copies)
        self._known.update((place, (_nodes_on(found, place), sizes[place])) for place in asked)
        return sizes


def _nodes_on(found: Schedule, place: int) -> frozenset[int]:
    return frozenset(node for split in found.splits if split.device == place for node in split.nodes)


def _estimate(device: Device, part: SplitGraph, options: DeviceCompileOptions, copies: int) -> int:
    """Bytes that a part takes beside its leaves; 0 where the device cannot tell."""
    try:
        estimate = device.estimate(in_order(part, device.optimize(part.graph)).graph, options)
    except UnsupportedError:
        return 0
    return copies * sum(estimate.compute_bytes) + estimate.extra_bytes
