"""A graph compiled for a GPU: memory is planned and bound once, kernels' parameters are filled,
then it runs.

    validated graph -> places -> groups -> storage -> launches -> captured steps

A run waits for the device at its end, so its errors and its time are its own. Streams keep the
device busy meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    MemoryMap,
    Plan,
    Tensor,
)
from heliograph_backends.contract.plan_blocks import are_separate
from heliograph_backends.cuda.binding import CudaPlanMemory, fixed_bytes
from heliograph_backends.cuda.driver.driver import Mark, Queue
from heliograph_backends.cuda.graph_replay import Replays
from heliograph_backends.cuda.index_report import REPORTING, IndexReport
from heliograph_backends.cuda.lowering import moves
from heliograph_backends.cuda.lowering.fusion import joined
from heliograph_backends.cuda.lowering.launch import Launch, Located
from heliograph_backends.cuda.lowering.lowering import CudaLowering, Work
from heliograph_backends.cuda.lowering.target import FAILURE_TYPE
from heliograph_backends.cuda.memory import address_of, can_reach
from heliograph_backends.cuda.plan_kernels import PlanKernels
from heliograph_backends.cuda.steps import ArrayCopy, DefinitionStep, KernelStep, Step
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.groups import Group, steps_of_nodes, times_of_nodes
from heliograph_backends.planning.layout import SOURCES, place_values
from heliograph_backends.planning.memory_map import memory_map
from heliograph_backends.planning.storage import StorageLayout, plan_storage
from heliograph_proto.errors import HeliographError, InvalidInputError, UnknownHandleError
from heliograph_proto.graph import Graph

if TYPE_CHECKING:
    from heliograph_backends.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """The decisions about a graph before any memory is allocated."""

    lowering: CudaLowering
    groups: tuple[Group, ...]
    storage: StorageLayout
    workspace_bytes: int


def plan_layout(
    device: CudaDevice, graph: Graph, options: DeviceCompileOptions, *, direct: bool = True
) -> CudaLayout:
    """Plan the layout of a graph. Raises OutOfMemoryError for a value that no buffer can hold.
    `direct`: see `place_values`."""
    places = place_values(graph, direct=direct)
    lowering = CudaLowering(graph, places, device.target)
    groups = group_nodes(graph, places, lowering, fusion=options.fusion)
    if options.fusion:
        groups = joined(graph, places, groups, lowering)
    storage = plan_storage(graph, places, groups, device.buffer_type.max_size, alignment=ALIGNMENT)
    return CudaLayout(lowering, groups, storage, lowering.workspace_bytes(groups))


def estimate(device: CudaDevice, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
    """Estimate the memory that compiling takes: the plan's own blocks, and the fixed places of
    inputs and outputs."""
    layout = plan_layout(device, graph, options)
    workspace = (layout.workspace_bytes,) if layout.workspace_bytes else ()
    return MemoryEstimate((*layout.storage.own_bytes, FAILURE_TYPE.nbytes, *workspace, *fixed_bytes(graph)))


class CudaPlan(Plan):
    """A plan made by `CudaDevice.compile`."""

    device: CudaDevice

    def __init__(
        self, device: CudaDevice, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> None:
        self.device = device
        self.graph = graph
        self._lock = threading.Lock()
        self._freed = False
        _check_reach(device, bindings)
        layout = plan_layout(device, graph, options, direct=are_separate(bindings, address_of))
        self.memory = CudaPlanMemory(device, graph, layout.storage, bindings, layout.workspace_bytes)
        self._kernels = PlanKernels(device.kernels)
        try:
            with device.here():
                self._numbers: list[int] = []
                # Kernels of large chains are compiled here, and no other thread must wait for them.
                self._steps = self._make_steps(layout)
                reports = any(node.op in REPORTING for node in graph.nodes)
                self._report = IndexReport(graph, self.memory) if reports else None
            self._issue_constants(layout)
        except BaseException:
            self.memory.free()
            raise
        self._groups, self._storage = layout.groups, layout.storage
        self._replays = Replays(self._steps, self.memory)
        #: The microseconds of each step in measured runs and the number of these; whether runs are
        #: measured.
        self._took_us, self._runs = [0.0] * len(self._steps), 0
        self._is_measured = False
        self.compute_bytes = self.memory.own.size_bytes
        self.steps = len(self._steps)

    def __repr__(self) -> str:
        return f"<CudaPlan of {len(self.graph.nodes)} nodes in {self.steps} steps on {self.device.name}>"

    @property
    def note(self) -> str:
        """The way in which runs are replayed, or the reason why not; and the kernels of large
        chains."""
        return "; ".join(filter(None, (self._replays.note, self._kernels.note)))

    # Made once

    def _make_steps(self, layout: CudaLayout) -> list[Step]:
        """Return the steps, and record the node that each helps to compute: -1 for none."""
        found: list[Step] = []
        for group in layout.groups:
            node = self.graph.nodes[group.last]
            if node.op in SOURCES:
                continue
            work = layout.lowering.work(group, layout.storage, self.memory.own_slots)
            if work is None:
                found += [DefinitionStep(self.graph, number, self.memory) for number in group.nodes]
            elif work:
                found.append(self._step(group.last, work))
            if node.op == "assign":
                found += self._kept(group.last, layout)
            self._numbers += [group.last] * (len(found) - len(self._numbers))
        slots = layout.storage.output_slots
        for place in layout.storage.copied_outputs:
            value = self.graph.outputs[place].value
            found += self._copied(layout, value, Located(self.graph.type_of(value), slots[place], 0, ()))
        self._numbers += [-1] * (len(found) - len(self._numbers))
        return found

    def _step(self, number: int, work: Sequence[Work]) -> KernelStep:
        built = [self._kernels.built(one) if isinstance(one, Launch) else one for one in work]
        return KernelStep(self.graph, number, built, self.memory, tf32=self.device.tf32)

    def _kept(self, number: int, layout: CudaLayout) -> list[Step]:
        """Return a copy of an assignment's result that is not kept in the variable, since a later
        assignment overwrites that."""
        value = len(self.graph.leaves) + number
        if layout.storage.places[value].root != value:
            return []
        slot, offset, _ = layout.storage.locate(value)
        target = Located(self.graph.type_of(value), slot, offset, ())
        return self._copied(layout, self.graph.nodes[number].operands[0], target)

    def _copied(self, layout: CudaLayout, source: int, target: Located) -> list[Step]:
        """Return a contiguous copy of a value."""
        type = target.type
        if not type.size:
            return []
        if not moves.can_copy(type):
            return [ArrayCopy(self.memory, source, target.slot, target.offset)]
        found = moves.copy(
            Located(type, *layout.storage.locate(source)), target._replace(strides=type.strides)
        )
        return [KernelStep(self.graph, 0, found, self.memory, tf32=False)]

    def _issue_constants(self, layout: CudaLayout) -> None:
        """Compute the nodes without operands, once."""
        nodes = [group.last for group in layout.groups]
        constants = [number for number in nodes if self.graph.nodes[number].op in SOURCES]
        if not constants:
            return  # using the default queue would wait for the work of all other threads
        with self.device.queue(), np.errstate(all="ignore"):
            for number in constants:
                DefinitionStep(self.graph, number, self.memory).issue(None)

    # Runs

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        with self._lock, self.device.queue() as queue:
            if self._freed:
                raise UnknownHandleError("the plan was freed")
            try:
                self._run(inputs, outputs, abort, queue)
            except BaseException:
                # Issued work still runs, in memory that is released next.
                self._settle_quietly(queue)
                raise
            finally:
                self.memory.unbind_run()

    def _run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort, queue: Queue
    ) -> None:
        self.memory.bind_run(inputs, outputs)
        with np.errstate(all="ignore"):
            if self._report is not None:
                self._report.begin(queue)
            marks = self._replays.run_marked(queue, abort) if self._is_measured else []
            if not marks:
                self._replays.run(queue, abort)
        self.memory.own.finish_run()
        if self._report is not None:
            self._report.fetch(queue)
        self.device.settle(queue)
        if self._report is not None:
            self._report.check(queue)
        if marks:
            self._note(marks)

    def _note(self, marks: Sequence[Mark]) -> None:
        """Add the times between marks that the device has reached."""
        driver, took_us = self.device.driver, self._took_us
        for step, pair in enumerate(pairwise(marks)):
            took_us[step] += driver.elapsed_us(*pair)
        self._runs += 1

    def measure(self, *, on: bool) -> None:
        if on:
            self._took_us, self._runs = [0.0] * len(self._numbers), 0
        self._is_measured = on

    def steps_and_times(self) -> tuple[Sequence[int], Sequence[float]]:
        times: defaultdict[int, float] = defaultdict(float)
        for number, took_us in zip(self._numbers, self._took_us, strict=True):
            times[number] += took_us / max(1, self._runs)
        return steps_of_nodes(self.graph, self._groups), times_of_nodes(self.graph, self._groups, times)

    def memory_map(self) -> MemoryMap:
        return memory_map(self.graph, self._groups, self._storage)

    def _settle_quietly(self, queue: Queue) -> None:
        try:
            # After an illegal address cuBLAS reports an unspecific status; this raises the cause.
            with self.device.guarded(alive=False):
                self.device.settle(queue)
        except HeliographError as error:
            logger.debug("waiting for a run that failed: %s", error)

    def free(self) -> None:
        with self._lock:
            self._freed = True
            self._steps = []
            self._report = None
            self._replays.free()
            self.memory.free()


def _check_reach(device: CudaDevice, bindings: LeafBindings) -> None:
    for value, tensor in {**bindings.weights, **bindings.variables}.items():
        if not can_reach(tensor, device):
            raise InvalidInputError(f"leaf {value} lies where device {device.name} cannot reach it")
