"""A plan over several devices: the plans of a schedule's splits, and the values that travel between
them.

A plan that is a partition also has arrivals and departures: values of other daemons' partitions. No
run waits for one forever. Splits of a partition run in the whole graph's order on each device, a
waiting split holds no device, and a value is offered before later splits run. So the first
unfinished split of a run, over all daemons, always has its inputs. Of several runs of a plan, the
same holds for the oldest one, since all daemons see the runs in the same order. A partition has its
own queues, so no other plan waits behind it.

Runs on a device thread, and on threads of its own where splits overlap.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from heliograph_backends.contract import (
    Abort,
    Arena,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    MemoryMap,
    Plan,
    Tensor,
    Usage,
    access,
)
from heliograph_proto.devices import DeviceType
from heliograph_proto.errors import HeliographError, UnknownHandleError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind, Node
from heliograph_proto.plans import CopyReport, DeviceShare, NodePlacement, PlanReport, Route, SplitReport
from heliograph_server.exchange.edges import EdgePorts
from heliograph_server.plans.late_values import NOT_LATE, LateRun, LateValues
from heliograph_server.plans.memory_report import memory_of_splits
from heliograph_server.plans.partitions import Exchanging
from heliograph_server.plans.reservation import NOTHING, ReservationShare
from heliograph_server.plans.split_copies import RunCopies, SplitMemoryMap
from heliograph_server.plans.split_runner import Precedences, SplitRunner
from heliograph_server.plans.stepwise import Stepwise
from heliograph_server.plans.wiring import bindings_of
from heliograph_server.resources.device_queue import SHORT_US, DeviceLock, compute
from heliograph_server.resources.memories import host_memory
from heliograph_server.scheduler.model import ALL_ROWS, Schedule
from heliograph_server.scheduler.split_memory import Place, ahead_of, moves, returned_places, values_between
from heliograph_server.scheduler.splits import SplitGraph, clocks, cut, in_order
from heliograph_server.scheduler.weight_homes import NOWHERE, VIEWS

#: Called for each observed node of a run, with its value, when its split has run; may block the
#: run. The value is valid until it returns. Called from several threads where splits overlap.
Observe: TypeAlias = Callable[[int, Tensor, Abort], None]


class NodeTurn(NamedTuple):
    """The turn of a node in its split, as in `NodePlacement`."""

    concurrent: int = 0
    step: int = 0
    step_us: float = 0.0


class MultiDevicePlan(Plan):
    """A plan over several devices: those of the schedule's problem, in its order."""

    def __init__(self, graph: Graph, schedule: Schedule, devices: Sequence[Device]) -> None:
        self.graph = graph
        self.schedule = schedule
        self.devices = tuple(devices)
        self.device = devices[schedule.main]
        #: For a partition: its edges for values between two steps of a loop.
        self.loop_ports: EdgePorts | None = None
        self._freed = False

    @abstractmethod
    def compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        observe: Observe | None = None,
        exchange_run: int = 0,
    ) -> None:
        """Run once, as `Plan.compute`. `observe` gets the nodes of `schedule.taps`; `exchange_run`
        is the number of the whole graph's run, for a partition."""

    def stepwise(self) -> Stepwise | None:
        """Return the plan as steps, each run by the thread that brings its last input. Default:
        None."""
        return None

    def expect_runs(self, last: int) -> None:
        """Note that a partition's runs up to this number follow, as steps of a loop; 0: the loop
        has ended. Each such run ends with `end_run`, or before the next one. Default: nothing."""

    def end_run(self) -> None:
        """End a partition's last run, which succeeded. Default: nothing."""

    @property
    def computed_us(self) -> Sequence[float]:
        """The microseconds that each split of the last run computed; empty (the default) if only
        `report` has them."""
        return ()

    @property
    def split_times(self) -> Sequence[tuple[str, tuple[float, float, float]]]:
        """The times of the splits of the last run that are known here.

        For each split: its device, and in microseconds when it began, how long it waited for its
        inputs, and how long it computed. Default: none.
        """
        return ()

    @abstractmethod
    def report(self) -> PlanReport:
        """Report where its nodes run and why, and the times of the last run."""

    @abstractmethod
    def held_by_device(self) -> Mapping[str, int]:
        """Return the bytes that it holds of each device now, by name."""

    @abstractmethod
    def forget_times(self) -> None:
        """Reset the times of the last run."""

    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        raise UnsupportedError("a plan over several devices is compiled anew")

    @property
    def held_bytes(self) -> int:
        return sum(self.held_by_device().values())

    def _report(
        self,
        splits: Sequence[SplitReport],
        turns: Mapping[int, NodeTurn],
        between: Mapping[str, int],
    ) -> PlanReport:
        """Return the report of a plan, given the turns of nodes and the bytes between splits by
        device, which the reports of splits lack."""
        split_of = self.schedule.split_of
        leaves: Counter[tuple[int, LeafKind]] = Counter()
        for leaf, home in zip(self.graph.leaves, self.schedule.homes, strict=True):
            leaves[home, leaf.kind] += leaf.type.nbytes
        results: Counter[int] = Counter()
        for node, assigned in zip(self.graph.nodes, self.schedule.assignments, strict=True):
            results[assigned.device] += result_bytes(node)
        computing: Counter[int] = Counter()
        for split in splits:
            computing[split.device] += split.compute_bytes
        return PlanReport(
            nodes=tuple(
                NodePlacement(split_of[node], one.cause, max(0, one.operand), *turns.get(node, NodeTurn()))
                for node, one in enumerate(self.schedule.assignments)
            ),
            splits=tuple(splits),
            devices=tuple(
                DeviceShare(
                    device.name,
                    leaves[place, LeafKind.WEIGHT],
                    leaves[place, LeafKind.VARIABLE],
                    between.get(device.name, 0) + computing[place],
                    results[place],
                )
                for place, device in enumerate(self.devices)
            ),
        )


#: The most bytes of inputs and outputs of a run in steps.
MOST_STEPWISE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunResources:
    """The resources that a plan over several devices shares with others."""

    #: Shared by copies of a plan, whose runs overlap.
    precedences: Precedences | None = None
    #: By device name: held while a plan computes there.
    device_locks: Mapping[str, DeviceLock] = field(default_factory=dict)
    #: The memory of each device for values between splits; empty: its default buffer type.
    memories: Sequence[BufferType] = ()
    #: Returns the reserved memory of a device, by name.
    reserved: Callable[[str], ReservationShare] = lambda _: NOTHING


class LocalMultiPlan(MultiDevicePlan):
    """Runs each split after those that it depends on, with its copies before it.

    `devices` are those of the schedule's problem, in its order. `exchanging` is set for a
    partition. Raises OutOfMemoryError, UnsupportedError.
    """

    begins_writes = True
    #: The start of the last run, by `time.perf_counter`.
    _run_begun = 0.0
    #: The last run that is known to follow.
    _last_run = 0
    #: A run that has computed, and not ended.
    _unended: LateRun = NOT_LATE

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        devices: Sequence[Device],
        bindings: LeafBindings,
        options: DeviceCompileOptions,
        resources: RunResources | None = None,
        exchanging: Exchanging | None = None,
    ) -> None:
        super().__init__(graph, schedule, devices)
        resources = resources or RunResources()
        ended = clocks(graph, schedule)
        spans = values_between(graph, schedule, ended)
        self._parts = tuple(
            in_order(part, devices[split.device].optimize(part.graph))
            for part, split in zip(cut(graph, schedule), schedule.splits, strict=True)
        )
        ahead = ahead_of(graph, schedule, ended)
        self._moves = moves(graph, schedule, spans, (part.inputs for part in self._parts), ahead)
        early = {schedule.splits[number].device for number in ahead}
        #: A thread for each device that copies the next split's values while one computes.
        self._copy_threads = ThreadPoolExecutor(len(early), "heliograph-copy") if early else None
        self._returned = returned_places(graph, schedule)
        self._leaves = {**bindings.weights, **bindings.variables}
        self._late = late = LateValues(graph, schedule, exchanging) if exchanging is not None else None
        self._input_places = _input_places(graph, late)
        self.loop_ports = exchanging.loop_ports if exchanging is not None else None
        assigned = dict.fromkeys(node.operands[0] for node in graph.nodes if node.op == "assign")
        #: The numbers of the buffers of variables that splits assign to.
        self._assigned = {id(bindings.variables[value].buffer) for value in assigned}
        self._plans: list[Plan] = []
        self._between = SplitMemoryMap(
            graph, resources.memories or [one.buffer_type for one in devices], resources.reserved
        )
        #: The reason why values between splits on other hosts go through this process, as text.
        self.why_whole = ""
        self._precedences = resources.precedences
        self._device_locks = [resources.device_locks.get(device.name) or DeviceLock() for device in devices]
        #: For each split of the last run the microseconds of its copies, of its nodes, and when it
        #: began.
        self._took_us: list[tuple[float, float, float]] = []
        self.forget_times()
        self._runner = SplitRunner(schedule, ended)
        try:
            lying = {(value, schedule.homes[value]): tensor for value, tensor in self._leaves.items()}
            self._tensors = lying | self._between.place(spans)
            self._tensors |= self._between.place_arrivals(late.places if late is not None else ())
            for part, split in zip(self._parts, schedule.splits, strict=True):
                device = devices[split.device]
                arena = resources.reserved(device.name).arena
                self._plans.append(compile_part(device, part, self._leaves, options, arena))
            self._commits = [commits(plan) for plan in self._plans]
        except BaseException:
            self.free()
            raise
        self.arena_bytes = self._between.lent_bytes + sum(plan.arena_bytes for plan in self._plans)
        self.compute_bytes = self._between.size_bytes + sum(plan.compute_bytes for plan in self._plans)
        self.steps = sum(plan.steps for plan in self._plans)

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(self.devices[one.device].name for one in self.schedule.splits))
        return f"<LocalMultiPlan of {self.graph} in {len(self._parts)} splits on {names}>"

    def held_by_device(self) -> dict[str, int]:
        found = dict.fromkeys((one.name for one in self.devices), 0)
        for name, size_bytes in self._between.own_bytes.items():
            found[name] += size_bytes
        for plan in self._plans:
            found[plan.device.name] += plan.held_bytes
        return found

    # Running

    def compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        observe: Observe | None = None,
        exchange_run: int = 0,
    ) -> None:
        if self._freed:
            raise UnknownHandleError("the plan was freed")
        self._run_begun = time.perf_counter()
        self.end_run()
        with ExitStack() as stack:
            given = [self._lasting(tensor, stack) for tensor in inputs]
            tensors = self._tensors | dict(zip(self._input_places, given, strict=True))
            rank = self._precedences.rank() if self._precedences else 0
            late = self._late.run(exchange_run, self._tensors) if self._late is not None else NOT_LATE
            try:
                with RunCopies(tensors, self._copy_threads) as copies:
                    self._runner.run(partial(self._run_split, tensors, copies, late, rank, observe), abort)
                for place, target in zip(self._returned, outputs, strict=True):
                    if target is not None:
                        access.copy(tensors[place], target)
            except BaseException as error:
                late.end(error)
                raise
        self._unended = late
        if exchange_run > self._last_run:
            self.end_run()

    def expect_runs(self, last: int) -> None:
        self.end_run()
        self._last_run = last
        if self._late is not None:
            self._late.ports.expect_runs(last)

    def end_run(self) -> None:
        # The caller sends first what others wait for.
        late, self._unended = self._unended, NOT_LATE
        late.end(None)

    def stepwise(self) -> Stepwise | None:
        """Return the plan in steps, for inputs from a command and fetched outputs.

        Only for a partition whose splits are all short and run on one CPU device of this host.
        """
        if self._late is None or self._precedences is not None or len(self.schedule.splits) < 1:
            return None
        device = self.devices[self.schedule.main]
        device_lock = self._device_locks[self.schedule.main]
        alone = all(one.device == self.schedule.main for one in self.schedule.splits)
        still = not any(move.copies or move.ahead for move in self._moves)
        on_host = device.type is DeviceType.CPU and device.buffer_type.is_host
        if not (alone and still and on_host):
            return None
        memory = host_memory(device)
        types = {place: self.graph.type_of(place[0]) for place in self._input_places}
        sizes = [one.nbytes for one in types.values()]
        sizes += [self.graph.type_of(value).nbytes for value, _ in self._returned]
        if not all(sizes) or sum(sizes) > MOST_STEPWISE_BYTES:
            return None
        made = {place: Tensor(type, memory.allocate(type.nbytes)) for place, type in types.items()}
        tensors = self._tensors | made
        tried = [self._step_of(number, tensors) for number in range(len(self._plans))]
        steps = [one for one in tried if one is not None]
        given, taken = ([bytes_in_place(tensors[one]) for one in some] for some in (made, self._returned))
        if len(steps) < len(tried):
            return None
        return Stepwise(self._late, device_lock, steps, tensors, given, taken, self._note_step)

    def _step_of(self, number: int, tensors: Mapping[Place, Tensor]) -> Callable[[], None] | None:
        """Return the call that runs a split; None if the split is not short."""
        found = self._moves[number]
        read, made = ([tensors[place] for place in places] for places in (found.reads, found.writes))
        short = self._plans[number].short_run(read, made)
        if short is None or short[1] >= SHORT_US:
            return None
        return partial(self._explained, number, short[0])

    def _explained(self, number: int, compute: Callable[[], None]) -> None:
        try:
            compute()
        except HeliographError as error:
            raise explain(error, self._parts[number]) from None

    def _note_step(self, number: int, begun: float, started: float, done: float) -> None:
        if not number:
            self._run_begun = begun
        times = started - begun, done - started, begun - self._run_begun
        self._took_us[number] = times[0] * 1e6, times[1] * 1e6, times[2] * 1e6

    def _lasting(self, tensor: Tensor, stack: ExitStack) -> Tensor:
        """Return an input, or a copy of it if a split assigns to a variable in the same memory."""
        if id(tensor.buffer) not in self._assigned:
            return tensor
        buffer = self.device.buffer_type.allocate(tensor.type.nbytes, Usage.COMPUTE)
        stack.callback(buffer.free)
        made = Tensor(tensor.type, buffer)
        access.copy(tensor, made)
        return made

    def _run_split(
        self,
        tensors: Mapping[Place, Tensor],
        copies: RunCopies,
        late: LateRun,
        rank: int,
        observe: Observe | None,
        number: int,
        abort: Abort,
    ) -> None:
        begun, found = time.perf_counter(), self._moves[number]
        split = self.schedule.splits[number]
        late.before(number, abort)
        copies.before(found)
        copied = time.perf_counter()
        read, made = ([tensors[place] for place in places] for places in (found.reads, found.writes))
        # The device is held while the split computes, not while it waits for its inputs.
        turn = self._precedences.of[split.device].turn(rank, abort) if self._precedences else nullcontext()
        with turn, self._device_locks[split.device].computing(abort, self.devices[split.device]) as held:
            started = time.perf_counter()
            try:
                if self._commits[number]:
                    abort.begin_writes()
                compute(self._plans[number], read, made, abort, held)
            except HeliographError as error:
                raise explain(error, self._parts[number]) from None
        paused = held.paused_seconds if held else 0.0
        times = copied - begun, time.perf_counter() - started - paused, begun - self._run_begun
        self._took_us[number] = times[0] * 1e6, times[1] * 1e6, times[2] * 1e6
        late.behind(number, tensors, abort)
        if observe is not None and (last := split.nodes[-1]) in self.schedule.taps:
            observe(last, tensors[len(self.graph.leaves) + last, split.device], abort)

    # Explaining

    def forget_times(self) -> None:
        self._took_us = [(0.0, 0.0, 0.0)] * len(self.schedule.splits)

    @property
    def computed_us(self) -> Sequence[float]:
        return [compute_us for _, compute_us, _ in self._took_us]

    @property
    def split_times(self) -> Sequence[tuple[str, tuple[float, float, float]]]:
        return [
            (self.devices[split.device].name, (begun, waited, computed))
            for split, (waited, computed, begun) in zip(self.schedule.splits, self._took_us, strict=True)
        ]

    def measure(self, *, on: bool) -> None:
        for plan in self._plans:
            plan.measure(on=on)

    def report(self) -> PlanReport:
        turns = {
            node: NodeTurn(concurrent, step, step_us)
            for part, plan in zip(self._parts, self._plans, strict=True)
            for node, concurrent, step, step_us in zip(
                part.nodes, plan.concurrency(), *plan.steps_and_times(), strict=True
            )
        }
        between = {name: own + self._between.lent[name] for name, own in self._between.own_bytes.items()}
        maps = [plan.memory_map() for plan in self._plans]
        found = self._report([self._report_split(n, one) for n, one in enumerate(maps)], turns, between)
        of_splits = [
            (split.device, part.nodes, one)
            for split, part, one in zip(self.schedule.splits, self._parts, maps, strict=True)
        ]
        blocks, stored = memory_of_splits(len(self.graph.leaves), of_splits, self._between.stored)
        return replace(found, blocks=blocks, stored=stored)

    def _report_split(self, number: int, told: MemoryMap) -> SplitReport:
        split, plan = self.schedule.splits[number], self._plans[number]
        late = {move.target[0] for move in self._moves[number].copies}
        copies = tuple(
            CopyReport(
                copy.value,
                copy.source,
                copy.size_bytes,
                copy.rows != ALL_ROWS,
                copy.value not in late,
                self._route(copy.source, copy.destination),
            )
            for copy in split.copies
        )
        copy_us, compute_us, began_us = self._took_us[number]
        note = plan.note or (f"through the head: {self.why_whole}" if self.why_whole and not number else "")
        took, steps = (copy_us, compute_us, began_us), max(1, told.steps)
        return SplitReport(
            split.device, copies, plan.steps, plan.compute_bytes, *took, note, memory_steps=steps
        )

    def _route(self, source: int, destination: int) -> Route:
        here, there = self.devices[source].site, self.devices[destination].site
        if here is there:
            return Route.WITHIN
        return Route.DIRECT if here is None or there is None else Route.THROUGH_HEAD

    # The end

    def free(self) -> None:
        self._freed = True
        self._runner.close()
        if self._copy_threads is not None:
            self._copy_threads.shutdown()
        for plan in self._plans:
            plan.free()
        self._between.free()


def result_bytes(node: Node) -> int:
    """Return the bytes of a node's result; 0 if it lies where an operand lies."""
    return 0 if node.op in VIEWS or node.op == "assign" else node.type.nbytes


def commits(plan: Plan) -> bool:
    """True if a caller of `compute` calls `Abort.begin_writes` before it."""
    return not plan.begins_writes and any(node.op == "assign" for node in plan.graph.nodes)


def bytes_in_place(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in the host's memory."""
    return memoryview(tensor.array.reshape(-1).view("u1"))


def _input_places(graph: Graph, late: LateValues | None) -> list[Place]:
    """Return the places of the inputs that a run receives."""
    arriving = late.leaves if late is not None else ()
    inputs = (n for n, one in enumerate(graph.leaves) if one.kind is LeafKind.INPUT)
    return [(n, NOWHERE) for n in inputs if n not in arriving]


def compile_part(
    device: Device,
    part: SplitGraph,
    leaves: Mapping[int, Tensor],
    options: DeviceCompileOptions,
    arena: Arena | None = None,
) -> Plan:
    """Compile the plan of one split, in a shared arena if one is given. Errors have the whole
    graph's node numbers."""
    bindings = bindings_of(part, leaves)
    try:
        if arena is not None:
            return device.compile_in(arena, part.graph, bindings, options)
        return device.compile(part.graph, bindings, options)
    except HeliographError as error:
        raise explain(error, part) from None


def explain(error: HeliographError, part: SplitGraph) -> HeliographError:
    """Return an error with the whole graph's number of the node."""
    if not error.origin.op:
        return error
    return error.at(replace(error.origin, node=part.nodes[error.origin.node]))
