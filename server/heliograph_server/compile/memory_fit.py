"""Spreads a graph over devices so that it fits: checks the scheduler's decisions against estimates.

The scheduler counts weights. Intermediate results, and what a device keeps beside weights, come
from the device's estimate of each split, unless it has ample memory. If the sum exceeds a device's
memory, its budget shrinks, and the scheduler decides again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from heliograph_backends.contract import BufferType, Device, DeviceCompileOptions
from heliograph_proto.errors import OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_server.compile.needs import SplitsNeed, lasting_needs, splits_needs
from heliograph_server.scheduler.model import Problem, Schedule
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.split_memory import ahead_of
from heliograph_server.scheduler.splits import clocks

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
    memories = memories or [one.buffer_type for one in devices]
    needs = _Needs(problem, memories, options, copies)
    found = schedule(problem)
    for _ in range(ROUNDS):
        over = needs.overshoot(found)
        if over and ahead_of(problem.graph, found, clocks(problem.graph, found)):
            # Copies between splits take less memory if they are not made ahead.
            found = replace(found, ahead_bytes=None)
            over = needs.overshoot(found)
        if not over:
            break
        budgets, found = _again(problem, budgets, over)
    return found


class _Excess(NamedTuple):
    """The bytes of the leaves on a device where a schedule does not fit, and those of them that are
    too many."""

    leaf_bytes: int
    size_bytes: int


def _again(
    problem: Problem, budgets: Sequence[int], over: Mapping[int, _Excess]
) -> tuple[Sequence[int], Schedule]:
    """Schedule again with budgets reduced by the excess, and by a margin if that fits.

    A budget is for leaves alone, so it shrinks from the bytes of the leaves that are there. The
    margin is for values that live longer across another cut.
    """
    less = list(budgets)
    for place, one in over.items():
        less[place] = max(0, min(less[place], one.leaf_bytes) - one.size_bytes)
    spare = list(less)
    for place, one in over.items():
        spare[place] -= min(one.size_bytes // 4, less[place] // MARGIN)
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
        #: By device: the nodes of its last estimate, and their needs beside leaves.
        self._known: dict[int, tuple[frozenset[int], SplitsNeed]] = {}

    def overshoot(self, found: Schedule) -> dict[int, _Excess]:
        """The excess of each device where a schedule does not fit; none has ample memory."""
        tight, over = _tight(self._problem, found, self._copies), dict[int, _Excess]()
        if not tight:
            return over
        for place, lasting in lasting_needs(self._graph, found, self._memories, tight).items():
            leaf_bytes = lasting.weights_bytes + lasting.variables_bytes
            free_bytes = self._problem.devices[place].free_bytes
            spare_bytes = free_bytes - leaf_bytes - self._copies * sum(lasting.blocks)
            if self._is_known_to_fit(found, place, spare_bytes):
                continue
            need = self._estimated(found, place)
            if (excess := self._size(need) - spare_bytes) > 0:
                # With a weight goes what the device keeps beside it.
                share = leaf_bytes / ((leaf_bytes + need.extra_bytes) or 1)
                over[place] = _Excess(leaf_bytes, ceil(excess * share))
        return over

    def _size(self, need: SplitsNeed) -> int:
        return self._copies * sum(need.blocks) + need.extra_bytes

    def _is_known_to_fit(self, found: Schedule, place: int, spare_bytes: int) -> bool:
        """True if an estimate of more nodes than these fits into the spare memory."""
        nodes, need = self._known.get(place, (frozenset(), SplitsNeed()))
        return self._size(need) <= spare_bytes and nodes.issuperset(_nodes_on(found, place))

    def _estimated(self, found: Schedule, place: int) -> SplitsNeed:
        """The need of a device's splits beside leaves; nothing if it cannot estimate."""
        try:
            need = splits_needs(self._graph, found, self._memories, self._options, [place])[place]
        except UnsupportedError:
            need = SplitsNeed()
        self._known[place] = _nodes_on(found, place), need
        return need


def _nodes_on(found: Schedule, place: int) -> frozenset[int]:
    return frozenset(node for split in found.splits if split.device == place for node in split.nodes)
