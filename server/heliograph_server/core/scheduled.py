"""A plan over several devices: the plans of a schedule's splits, and the values that travel between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from heliograph_backends import access
from heliograph_backends.contract import (
    Abort,
    Buffer,
    BufferType,
    CompileOptions,
    Device,
    LeafBindings,
    Plan,
    Tensor,
    Usage,
)
from heliograph_backends.planning.memory import Lifetime, plan_arena
from heliograph_proto.description import CopyReport, DeviceShare, NodePlacement, PlanReport, SplitReport
from heliograph_proto.errors import CancelledError, HeliographError, UnknownHandleError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling import Schedule
from heliograph_server.core.scheduling.between import Span, values_between
from heliograph_server.core.scheduling.parts import Part, cut

#: A value in a device's memory.
Place = tuple[int, int]


class ScheduledPlan(Plan):
    """Runs the splits one after the other, with the copies that each needs before it.

    `devices` are those of the schedule's problem, in its order. Raises OutOfMemoryError, UnsupportedError.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        devices: Sequence[Device],
        bindings: LeafBindings,
        options: CompileOptions,
    ) -> None:
        self.graph = graph
        self.schedule = schedule
        self.devices = tuple(devices)
        self.device = devices[schedule.splits[-1].device]
        self._parts = cut(graph, schedule)
        self._leaves = {**bindings.weights, **bindings.variables}
        self._input_values = [n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT]
        self._plans: list[Plan] = []
        self._buffers: list[Buffer] = []
        self._freed = False
        #: Of each split in the last run: its copies, its nodes.
        self._took_us: list[tuple[float, float]] = [(0.0, 0.0)] * len(schedule.splits)
        try:
            self._between = self._place_between()
            for part, split in zip(self._parts, schedule.splits, strict=True):
                self._plans.append(compile_part(devices[split.device], part, self._leaves, options))
        except BaseException:
            self.free()
            raise
        self.compute_bytes = sum(one.size_bytes for one in self._buffers) + sum(
            plan.compute_bytes for plan in self._plans
        )
        self.steps = sum(plan.steps for plan in self._plans)

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(self.devices[one.device].name for one in self.schedule.splits))
        return f"<ScheduledPlan of {self.graph} in {len(self._parts)} splits on {names}>"

    # Memory between splits

    def _place_between(self) -> dict[Place, Tensor]:
        """Where results lie that later splits read, and copies for devices that cannot reach them."""
        found: dict[Place, Tensor] = {}
        for number, spans in values_between(self.graph, self.schedule).items():
            for value, tensor in self._place(self.devices[number].buffer_type, spans).items():
                found[value, number] = tensor
        return found

    def _place(self, memory: BufferType, spans: Mapping[int, Span]) -> dict[int, Tensor]:
        """Tensors for values in one device's memory, which share bytes where their spans do not meet."""
        types = [self.graph.type_of(value) for value in spans]
        lifetimes = [
            Lifetime(memory.alloc_size(type), first, last)
            for type, (first, last) in zip(types, spans.values(), strict=True)
        ]
        arena = plan_arena(lifetimes, memory.alignment, memory.max_size)
        chunks: list[Buffer] = []
        for size_bytes in arena.chunk_bytes:
            chunks.append(memory.allocate(size_bytes, Usage.COMPUTE))
            self._buffers.append(chunks[-1])
        placed = zip(spans, types, arena.chunks, arena.offsets, strict=True)
        return {value: Tensor(type, chunks[chunk], offset) for value, type, chunk, offset in placed}

    # Running

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        if self._freed:
            raise UnknownHandleError("the plan was freed")
        given = dict(zip(self._input_values, inputs, strict=True))
        for number in range(len(self._parts)):
            if abort.is_set:
                raise CancelledError("the run was cancelled")
            began = time.perf_counter()
            self._copy(number)
            copied = time.perf_counter()
            self._compute(number, given, abort)
            self._took_us[number] = (copied - began) * 1e6, (time.perf_counter() - copied) * 1e6
        self._write_outputs(given, outputs)

    def _copy(self, number: int) -> None:
        for copy in self.schedule.splits[number].copies:
            source = self._leaves.get(copy.value) or self._between[copy.value, copy.source]
            access.copy(source, self._between[copy.value, copy.destination])

    def _compute(self, number: int, given: Mapping[int, Tensor], abort: Abort) -> None:
        part, device = self._parts[number], self.schedule.splits[number].device
        read = [given.get(value) or self._readable(value, device) for value in part.inputs]
        made = [self._between[value, device] for value in part.outputs]
        try:
            self._plans[number].compute(read, made, abort)
        except HeliographError as error:
            raise explain(error, part) from None

    def _readable(self, value: int, device: int) -> Tensor:
        """A value where the device can read it: its own copy, or where it was computed."""
        found = self._between.get((value, device))
        if found is not None:
            return found
        return self._between[value, self._maker(value)]

    def _maker(self, value: int) -> int:
        return self.schedule.assignments[value - len(self.graph.leaves)].device

    def _write_outputs(self, given: Mapping[int, Tensor], outputs: Sequence[Tensor | None]) -> None:
        for port, target in zip(self.graph.outputs, outputs, strict=True):
            if target is None:
                continue
            value = port.value
            source = given.get(value) or self._leaves.get(value)
            access.copy(source or self._between[value, self._maker(value)], target)

    # Explaining

    def report(self) -> PlanReport:
        """Where its nodes run and why, and how long the last run took."""
        split_of = {node: number for number, one in enumerate(self.schedule.splits) for node in one.nodes}
        return PlanReport(
            nodes=tuple(
                NodePlacement(split_of[node], one.cause, max(0, one.operand))
                for node, one in enumerate(self.schedule.assignments)
            ),
            splits=tuple(map(self._report_split, range(len(self._parts)))),
            devices=tuple(map(self._share, range(len(self.devices)))),
        )

    def _report_split(self, number: int) -> SplitReport:
        split, plan = self.schedule.splits[number], self._plans[number]
        copies = tuple(CopyReport(copy.value, copy.source, copy.size_bytes) for copy in split.copies)
        return SplitReport(split.device, copies, plan.steps, plan.compute_bytes, *self._took_us[number])

    def _share(self, place: int) -> DeviceShare:
        device = self.devices[place]
        sizes = dict.fromkeys(LeafKind, 0)
        for leaf, home in zip(self.graph.leaves, self.schedule.homes, strict=True):
            sizes[leaf.kind] += leaf.type.nbytes if home == place else 0
        between = sum(one.size_bytes for one in self._buffers if one.buffer_type.device is device)
        plans = zip(self.schedule.splits, self._plans, strict=True)
        computing = sum(plan.compute_bytes for split, plan in plans if split.device == place)
        weights, variables = sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE]
        return DeviceShare(device.name, weights, variables, between + computing)

    # The end

    def update(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> Plan:
        raise UnsupportedError("a plan over several devices is compiled anew")

    def free(self) -> None:
        self._freed = True
        for plan in self._plans:
            plan.free()
        for buffer in self._buffers:
            buffer.free()
        self._plans.clear()
        self._buffers.clear()


def compile_part(device: Device, part: Part, leaves: Mapping[int, Tensor], options: CompileOptions) -> Plan:
    """The plan of one split. Errors have the whole graph's numbers."""
    weights: dict[int, Tensor] = {}
    variables: dict[int, Tensor] = {}
    for leaf, value in part.bound:
        into = weights if part.graph.leaves[leaf].kind is LeafKind.WEIGHT else variables
        into[leaf] = leaves[value]
    try:
        return device.compile(part.graph, LeafBindings(weights, variables), options)
    except HeliographError as error:
        raise explain(error, part) from None


def explain(error: HeliographError, part: Part) -> HeliographError:
    """An error with the whole graph's number of the node."""
    if not error.origin.op:
        return error
    return error.at(replace(error.origin, node=part.nodes[error.origin.node]))
