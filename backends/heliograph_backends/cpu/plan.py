"""A graph compiled for the CPU: memory planned and bound once, then runs of steps.

    validated graph -> places -> groups -> storage -> steps

Steps are native programs (runs of groups without any Python between them) and definition steps (one
NumPy call each, on arrays made once). Only values in a run's own inputs and outputs are bound again
in each run.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    MemoryMap,
    Plan,
    Tensor,
    Turn,
)
from heliograph_backends.contract.plan_blocks import are_separate
from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.binding import CpuPlanMemory, Lender, address_of
from heliograph_backends.cpu.lowering.lowering import CpuLowering
from heliograph_backends.cpu.lowering.packing import packed_forms
from heliograph_backends.planning.concurrency import concurrent_nodes, side_by_side
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.groups import Group, steps_of_nodes, times_of_nodes
from heliograph_backends.planning.layout import SOURCES, is_direct, place_values
from heliograph_backends.planning.memory_map import memory_map
from heliograph_backends.planning.storage import StorageLayout, plan_storage
from heliograph_backends.reference import define_node
from heliograph_backends.reference.base import index_error, indices_of
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HeliographError,
    OutOfMemoryError,
    OutOfRangeError,
    UnknownHandleError,
)
from heliograph_proto.graph import Graph
from heliograph_proto.pace import in_turns

if TYPE_CHECKING:
    from heliograph_backends.cpu.backend import CpuDevice

#: The most time of a native step that is not worth sharing, and of any step beside its tiles.
STEP_NS = 1_000.0


class CpuPlan(Plan):
    """A compiled graph; made by `CpuDevice.compile`."""

    device: CpuDevice
    begins_writes = True

    def __init__(
        self,
        device: CpuDevice,
        graph: Graph,
        bindings: LeafBindings,
        options: DeviceCompileOptions,
        lender: Lender | None = None,
    ) -> None:
        """Compile the graph; `lender`: an arena, or the memory of the plan that this one
        replaces."""
        self.graph = graph
        self.device = device
        self.threads = options.threads
        self._lock = threading.Lock()
        layout = plan_layout(device, graph, options, direct=are_separate(bindings, address_of))
        self.storage = layout.storage
        self.memory = CpuPlanMemory(device, graph, self.storage, bindings, layout.forms, lender)
        self.scratch = k.Scratch()
        self._freed = False
        #: True if others wait for the device.
        self._is_asked = False
        try:
            with np.errstate(all="ignore"):
                compiler = _Compiler(self, layout.lowering, layout.groups, native=device.native)
        except BaseException:
            self.memory.free()
            raise
        self.memory.take_over()
        self._steps, self._first_write = compiler.steps, compiler.first_write
        self._groups = layout.groups
        self._native = [step for step in self._steps if isinstance(step, _NativeStep)]
        self.arena_bytes = self.memory.borrowed_bytes
        self.compute_bytes = self.memory.own.size_bytes + self.arena_bytes
        self.steps = sum(step.count for step in self._steps)

    def __repr__(self) -> str:
        return f"<CpuPlan of {len(self.graph.nodes)} nodes in {self.steps} steps on {self.device.name}>"

    @property
    def held_bytes(self) -> int:
        return self.memory.own.size_bytes

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        self._compute(inputs, outputs, abort, None)

    def compute_in_turns(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort, turn: Turn
    ) -> None:
        self._compute(inputs, outputs, abort, turn)

    def _compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        turn: Turn | None,
    ) -> None:
        with self._lock:
            if self._freed:
                raise UnknownHandleError("the plan was freed")
            try:
                watch = nullcontext() if turn is None else turn.watch(self._request_pause)
                with np.errstate(all="ignore"), abort.watch(self._request_abort), watch:
                    self.memory.bind_run(inputs, outputs)
                    for number, step in enumerate(self._steps):
                        if number == self._first_write:
                            abort.begin_writes()
                        if abort.is_set:
                            raise CancelledError("the run was cancelled")
                        if self._is_asked:
                            self._give(turn, abort)
                        while not step.run():
                            self._give(turn, abort)
                    self.memory.own.finish_run()
            finally:
                # Only after the watch has ended: a late abort must not end the next run.
                self._is_asked = False
                for native in self._native:
                    native.bound.clear()
                self.memory.unbind_run()

    def short_run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Callable[[], None], float] | None:
        if len(self._native) != len(self._steps) or self.memory.copies_outputs:
            return None
        with self._lock:
            if self._freed or (bound := self.memory.lasting_run(inputs, outputs)) is None:
                return None
        slots, addresses = bound
        all_addresses, steps, lock = self.memory.addresses, tuple(self._native), self._lock

        def run() -> None:
            with lock:
                if self._freed:
                    raise UnknownHandleError("the plan was freed")
                # Other runs may have bound other tensors.
                all_addresses[slots] = addresses
                for step in steps:
                    step.run_here()

        return run, sum(step.cost_us for step in steps)

    def _give(self, turn: Turn | None, abort: Abort) -> None:
        """Give the device to others for a while, unless the run should end soon."""
        self._is_asked = False
        for step in self._native:
            step.bound.clear_pause()
        if turn is not None and not abort.is_requested:
            turn.give()

    def _request_pause(self) -> None:
        for step in self._native:
            step.bound.pause()
        self._is_asked = True

    def _request_abort(self) -> None:
        for step in self._native:
            step.bound.abort()

    def concurrency(self) -> Sequence[int]:
        return concurrent_nodes(len(self.graph.nodes), self._groups, self.storage.sets)

    def measure(self, *, on: bool) -> None:
        for step in self._steps:
            step.measure(on=on)

    def steps_and_times(self) -> tuple[Sequence[int], Sequence[float]]:
        times: defaultdict[int, float] = defaultdict(float)
        for number, took_us in chain.from_iterable(step.times_us() for step in self._steps):
            times[number] += took_us
        return steps_of_nodes(self.graph, self._groups), times_of_nodes(self.graph, self._groups, times)

    def memory_map(self) -> MemoryMap:
        return memory_map(self.graph, self._groups, self.storage)

    def free(self) -> None:
        with self._lock:
            self._free()

    def _free(self) -> None:
        self._freed = True
        self._steps = []
        self._native = []
        self.memory.free()

    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> CpuPlan:
        with self._lock:
            if self._freed:
                raise UnknownHandleError("the plan was freed")
            made = type(self)(self.device, graph, bindings, options, self.memory)
            self._free()
            return made


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """The result of planning a graph, before any memory is taken."""

    lowering: CpuLowering
    groups: tuple[Group, ...]
    storage: StorageLayout
    forms: Mapping[int, k.WeightForm]


def plan_layout(
    device: CpuDevice, graph: Graph, options: DeviceCompileOptions, *, direct: bool = True
) -> CpuLayout:
    """Plan a graph; `direct`: see `place_values`. Raises OutOfMemoryError for a value too large for
    a buffer."""
    lowering, groups, storage = _planned(device, graph, options, direct)
    places = storage.places
    forms = packed_forms(graph, places, groups, lowering.has_kernel) if device.native else {}
    return CpuLayout(lowering, groups, storage, forms)


def _planned(
    device: CpuDevice, graph: Graph, options: DeviceCompileOptions, direct: bool
) -> tuple[CpuLowering, tuple[Group, ...], StorageLayout]:
    places = place_values(graph, direct=direct)
    lowering = CpuLowering(graph, places)
    kernels = lowering if device.native else _DefinitionOnly()
    groups = group_nodes(graph, places, kernels, fusion=options.fusion)
    sets: Sequence[int] = ()
    # A single thread runs steps one after the other in any case.
    if device.native and device.concurrency > 1 and device.threads > 1:
        sets = side_by_side(graph, places, groups, lowering.may_join, device.concurrency)
    return lowering, groups, plan_storage(graph, places, groups, device.buffer_type.max_size, sets)


def estimate(device: CpuDevice, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
    """Return the memory that compiling takes: the plan's own blocks, since weights are packed in
    place.

    Variables are assumed not to overlap. Allocates nothing; raises the errors of `plan_layout`.
    """
    _, _, storage = _planned(device, graph, options, True)
    return MemoryEstimate(storage.own_bytes, arena_bytes=storage.arena)


class _DefinitionOnly:
    """Fusion without kernels: every node is a step on the definition."""

    def role(self, number: int) -> Any:
        return "other"

    def is_row_operand(self, value: int) -> bool:
        return False


class _Step(ABC):
    """A part of a plan that runs as a whole."""

    #: The number of the plan's steps that it contains.
    count = 1

    @abstractmethod
    def run(self) -> bool:
        """Run once, in the bound memory, or go on with a run that was paused. False: it is paused
        now."""

    def measure(self, *, on: bool) -> None:
        """Measure the times of runs from now on, or end that. Default: nothing is measured."""

    def times_us(self) -> Iterable[tuple[int, float]]:
        """Return nodes, of which some may come repeatedly, and mean times in measured runs.
        Default: none."""
        return ()


class _NativeStep(_Step):
    """A native program, run by the device's workers."""

    def __init__(self, plan: CpuPlan, program: k.Program, numbers: Sequence[int]) -> None:
        """Bind the program; `numbers`: the node of each step."""
        self.count = program.steps
        #: The estimated time, without the wait for helpers.
        self.cost_us = (program.long_cost_ns + STEP_NS * program.steps) / 1e3
        self._graph, self._numbers = plan.graph, tuple(numbers)
        self._memory = plan.memory
        self._device, self._threads = plan.device, plan.threads
        self.bound = k.BoundProgram(program, plan.memory.addresses, plan.scratch)

    def run(self) -> bool:
        status = self._device.run_program(self.bound, self._threads)
        if status is k.Status.PAUSED:
            return False
        self._check(status)
        return True

    def run_here(self) -> None:
        """Run without helpers."""
        status = self.bound.run()
        if status is not k.Status.OK:
            self._check(status)

    def measure(self, *, on: bool) -> None:
        self.bound.measure(on=on)

    def times_us(self) -> Iterable[tuple[int, float]]:
        return zip(self._numbers, (self.bound.mean_ns / 1e3).tolist(), strict=True)

    def _check(self, status: k.Status) -> None:
        if status == k.Status.ABORTED:
            raise CancelledError("the run was cancelled")
        if status == k.Status.OUTSIDE:
            raise self._index_error()
        if status != k.Status.OK:
            raise ComputeFailedError(f"native step {self.bound.failed_step} ended with {status.name}")

    def _index_error(self) -> OutOfRangeError:
        number = self._numbers[self.bound.failed_step]
        indices = self._memory.elements(indices_of(self._graph.nodes[number]))
        return index_error(self._graph, number, int(self.bound.outside), indices)


class _DefinitionStep(_Step):
    """One node on the definition, on arrays that the plan's memory keeps."""

    def __init__(self, plan: CpuPlan, number: int) -> None:
        node = plan.graph.nodes[number]
        # An assignment writes its variable.
        target = node.operands[0] if node.op == "assign" else len(plan.graph.leaves) + number
        values = (*node.operands, target)
        plan.memory.use(values)
        self._graph = plan.graph
        self._number = number
        self._kernel = define_node(plan.graph, number)
        self._arrays = plan.memory.arrays
        self._operands_and_out = itemgetter(*values)
        #: The time of all measured runs and their number, and whether runs are measured.
        self._took_us, self._runs = 0.0, 0
        self._is_measured = False

    def measure(self, *, on: bool) -> None:
        self._is_measured = on
        if on:
            self._took_us, self._runs = 0.0, 0

    def times_us(self) -> Iterable[tuple[int, float]]:
        return [(self._number, self._took_us / max(1, self._runs))]

    def run(self) -> bool:
        if not self._is_measured:
            return self._run()
        began = perf_counter()
        self._run()
        self._took_us += (perf_counter() - began) * 1e6
        self._runs += 1
        return True

    def _run(self) -> bool:
        try:
            self._kernel(*self._operands_and_out(self._arrays))
        except HeliographError as error:
            raise error.at(self._graph.origin(self._number)) from None
        except MemoryError:
            message = "the host has not enough memory for a temporary result"
            raise OutOfMemoryError(message, origin=self._graph.origin(self._number)) from None
        except Exception as error:
            origin = self._graph.origin(self._number)
            raise ComputeFailedError(f"{type(error).__name__}: {error}", origin=origin) from error
        return True


class _ValueCopy(_Step):
    """A copy of an assignment's result, since a later assignment overwrites the variable."""

    def __init__(self, plan: CpuPlan, source: int, target: int) -> None:
        plan.memory.use((source, target))
        self._arrays = plan.memory.arrays
        self._source, self._target = source, target

    def run(self) -> bool:
        np.copyto(self._arrays[self._target], self._arrays[self._source])
        return True


class _OutputCopy(_Step):
    """A copy, at the end of a run, to an output that is a view, a leaf or a repeated value."""

    def __init__(self, plan: CpuPlan, place: int) -> None:
        self._memory = plan.memory
        self._place = place
        self._value = plan.graph.outputs[place].value

    def run(self) -> bool:
        target = self._memory.output_array(self._place)
        if target is not None:
            np.copyto(target, self._memory.array(self._value))
        return True


class _Compiler:
    """Turns groups into steps; consecutive groups with kernels share a native program."""

    def __init__(
        self, plan: CpuPlan, lowering: CpuLowering, groups: Sequence[Group], *, native: bool
    ) -> None:
        self.plan = plan
        self.lowering = lowering
        self.steps: list[_Step] = []
        self._builder: k.ProgramBuilder | None = None
        #: For each step of the builder, the node that it helps to compute.
        self._numbers: list[int] = []
        #: The first step that may write a variable; -1: none does.
        self.first_write = -1
        first = self._first_writing(groups)
        for place, (group, number) in enumerate(in_turns(zip(groups, plan.storage.sets, strict=True))):
            if place == first:
                # An abort ends the steps before it, and none from here on.
                self._close_program()
                self.first_write = len(self.steps)
            self._add(group, native, number)
        self._close_program()
        self.steps += [_OutputCopy(plan, place) for place in plan.storage.copied_outputs]

    def _first_writing(self, groups: Sequence[Group]) -> int:
        """Return the first group whose set may write a variable; -1: none."""
        graph, storage = self.plan.graph, self.plan.storage
        if not storage.written and all(node.op != "assign" for node in graph.nodes):
            return -1
        for place, group in enumerate(groups):
            is_assignment = graph.nodes[group.last].op == "assign"
            if is_assignment or is_direct(graph, storage.places, len(graph.leaves) + group.last):
                return storage.sets.index(storage.sets[place])
        return -1

    def _add(self, group: Group, native: bool, number: int) -> None:
        plan, last = self.plan, group.nodes[-1]
        node = plan.graph.nodes[last]
        if node.op in SOURCES:
            define_node(plan.graph, last)(plan.memory.array(len(plan.graph.leaves) + last))
        elif native and self.lowering.is_native(group):
            builder = self._builder = self._builder or self.lowering.builder()
            self.lowering.append(builder, group, plan.storage, plan.memory.packed, number)
            self._numbers += [last] * (builder.steps - len(self._numbers))
        else:
            self._append(_DefinitionStep(self.plan, last))
        if node.op == "assign":
            self._keep_assigned(last)

    def _append(self, step: _Step) -> None:
        self._close_program()
        self.steps.append(step)

    def _keep_assigned(self, number: int) -> None:
        """Copy an assignment's result that does not lie in the variable."""
        graph, value = self.plan.graph, len(self.plan.graph.leaves) + number
        if self.plan.storage.places[value].root == value:
            self._append(_ValueCopy(self.plan, graph.nodes[number].operands[0], value))

    def _close_program(self) -> None:
        builder, self._builder = self._builder, None
        numbers, self._numbers = self._numbers, []
        if builder is None:
            return
        program = builder.build()
        if program.steps:
            self.steps.append(_NativeStep(self.plan, program, numbers))
