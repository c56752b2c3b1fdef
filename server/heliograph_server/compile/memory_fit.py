"""Spreads a graph over devices so that it fits: checks the scheduler's decisions against estimates.

The scheduler counts weights. Intermediate results, and what a device keeps beside weights, come
from the device's estimate of each split, unless it has ample memory. If the sum exceeds a device's
memory, its budget shrinks, and the scheduler decides again.
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

#: The most rounds in which budgets shrink. After these, compiling itself reports what does not fit.
ROUNDS = 8
#: A budget shrinks by up to this fraction of itself beyond the excess, which often saves a round.
MARGIN = 1000
#: A device has ample memory with this many times the bytes of all its leaves, results and copies,
AMPLE = 2
#: plus this much padding for each of them.
AMPLE_PADDING_BYTES = 1024


def spread(
    problem: Problem,
    devices: Sequence[Device],
    options: DeviceCompileOptions,
    copies: int = 1,
    memories: Sequence[BufferType] = (),
) -> Schedule:
    """Find a schedule that fits into memory. Raises the errors of `schedule`.

    `copies` is the number of copies of a run's memory. `memories` are as in `candidates`.
    """
    budgets: Sequence[int] = [one.free_bytes for one in problem.devices]
    needs = _Needs(problem, memories or [one.buffer_type for one in devices], options, copies)
    found = schedule(problem)
    for _ in range(ROUNDS):
        over = needs.overshoot(found)
        if any(over.values()) and ahead_of(problem.graph, found, clocks(problem.graph, found)):
            # Copies between splits take less memory if they are not made ahead.
            found = replace(found, ahead_bytes=None)
            over = needs.overshoot(found)
        if not any(over.values()):
            break
        budgets, found = _again(problem, budgets, over)
    return found


def _again(
    problem: Problem, budgets: Sequence[int], over: Mapping[int, int]
) -> tuple[Sequence[int], Schedule]:
    """Schedule again with budgets reduced by the excess, and by a margin if that fits.

    The margin is for values that live longer across another cut.
    """
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
    """The memory for the whole graph and all copies. If each device has it, memory decides nothing.

    `copies` is as in `spread`.
    """
    types = [*(leaf.type for leaf in graph.leaves), *(node.type for node in graph.nodes)]
    count = len(types) + sum(len(one.copies) for one in found.splits)
    size_bytes = sum([type.nbytes for type in types]) + found.copied_bytes
    return copies * (AMPLE * size_bytes + AMPLE_PADDING_BYTES * count)


def _tight(problem: Problem, found: Schedule, copies: int) -> frozenset[int]:
    """The devices without ample memory, which must be asked whether a schedule fits."""
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
    """The memory that schedules need on devices. Estimates are kept, since they are slow."""

    def __init__(
        self, problem: Problem, memories: Sequence[BufferType], options: DeviceCompileOptions, copies: int
    ) -> None:
        self._copies = copies
        self._problem = problem
        self._graph = problem.graph
        self._memories = memories
        self._options = options
        #: By device: the nodes of its last estimate, and their bytes beside leaves.
        self._known: dict[int, tuple[frozenset[int], int]] = {}

    def overshoot(self, found: Schedule) -> dict[int, int]:
        """The bytes by which a schedule exceeds the memory of each device without ample memory."""
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
        """The bytes of leaves and of values between splits, by device."""
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
        """True if an estimate of more nodes than these fits into the spare memory."""
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
    """The bytes that a part needs beside its leaves; 0 if the device cannot estimate."""
    try:
        estimate = device.estimate(in_order(part, device.optimize(part.graph)).graph, options)
    except UnsupportedError:
        return 0
    return copies * sum(estimate.compute_bytes) + estimate.extra_bytes
