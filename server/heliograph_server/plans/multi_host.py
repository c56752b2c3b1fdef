"""A plan over several hosts: each runs its partition, and they exchange values meanwhile.

    compute ─┬─ start ─▸ partition on host a ─┐ values
             ├─ start ─▸ partition on host b ◂┘
             └─ own partition, on devices of this process

A run costs one message to each host and one back, regardless of its splits. All hosts see the runs
of a plan in the same order, so that no two hosts wait for each other's runs. The first error
cancels the other partitions.

Runs on a device thread; any thread reports that a partition has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from heliograph_backends.contract import (
    Abort,
    BufferType,
    Device,
    DeviceCompileOptions,
    HostedLoop,
    LeafBindings,
    Site,
    SitePlan,
    SiteRun,
    SiteWork,
    Tensor,
    access,
)
from heliograph_proto.commands import Loop
from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    LimitExceededError,
    MemberLostError,
    Origin,
    UnavailableError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import CopyReport, PlanReport, Route, SplitReport
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.plans.hosted_loop import HostedLoops
from heliograph_server.plans.loop_parts import LoopParts, parts_of
from heliograph_server.plans.memory_report import memory_of_hosts
from heliograph_server.plans.multi_device import LocalMultiPlan, MultiDevicePlan, NodeTurn, Observe
from heliograph_server.plans.partitions import Exchanging, partitioned
from heliograph_server.plans.wiring import (
    PartitionWiring,
    RelayErrand,
    bindings_of,
    explained,
    look_again,
    relayed_pairs,
    unreachable,
    wire,
)
from heliograph_server.scheduler.model import ALL_ROWS, Copy, Schedule
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions, cut_partitions

logger = logging.getLogger(__name__)


def _by_split(
    partitions: Partitions, reports: Mapping[int, PlanReport], split_of: Mapping[int, int]
) -> tuple[dict[int, NodeTurn], dict[int, list[SplitReport]]]:
    """Return the turn of each node, and the reports of the splits that each split became."""
    turns: dict[int, NodeTurn] = {}
    found: dict[int, dict[tuple[int, int], SplitReport]] = {}
    for place, report in reports.items():
        piece = partitions.pieces[place]
        for node, one in enumerate(report.nodes):
            if node not in piece.inserted and node not in piece.repeated:
                turns[piece.nodes[node]] = NodeTurn(one.concurrent, one.step, one.step_us)
                whole = found.setdefault(split_of[piece.nodes[node]], {})
                whole[place, one.split] = report.splits[one.split]
    return turns, {number: list(one.values()) for number, one in found.items()}


def _split(device: int, copies: tuple[CopyReport, ...], parts: Sequence[SplitReport]) -> SplitReport:
    return SplitReport(
        device,
        copies,
        sum(one.steps for one in parts),
        sum(one.compute_bytes for one in parts),
        sum(one.copy_us for one in parts),
        sum(one.compute_us for one in parts),
        min((one.began_us for one in parts), default=0.0),
        next((one.note for one in parts if one.note), ""),
    )


def _copies(
    copies: Iterable[Copy], site_of: Sequence[int], routes: Mapping[tuple[int, int], Route]
) -> Iterator[CopyReport]:
    for one in copies:
        route = routes.get((one.value, site_of[one.destination]))
        if site_of[one.source] == site_of[one.destination]:
            route = Route.WITHIN
        # Other values are computed again where they are read.
        if route is not None:
            rows = one.rows != ALL_ROWS
            yield CopyReport(one.value, one.source, one.size_bytes, rows, False, route)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The parts of a plan over several hosts. `memories` is the buffer type of each device of the
    schedule."""

    graph: Graph
    schedule: Schedule
    memories: tuple[BufferType, ...]
    #: Weights and variables.
    leaves: Mapping[int, Tensor]
    options: DeviceCompileOptions
    pipeline: int
    exchange: LiveExchange
    #: Makes the plan of this process's own partition, given its graph, schedule, leaves and
    #: exchange.
    own: Callable[[Graph, Schedule, LeafBindings, Exchanging], LocalMultiPlan]

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(one.device for one in self.memories)


def sites_of(devices: Sequence[Device]) -> tuple[list[Site | None], list[int]]:
    """Return the hosts of devices, and for each device the place of its host."""
    sites: list[Site | None] = []
    for device in devices:
        if device.site not in sites:
            sites.append(device.site)
    return sites, [sites.index(device.site) for device in devices]


def partitions_of(graph: Graph, schedule: Schedule, devices: Sequence[Device]) -> Partitions | None:
    """Return the partitions of a schedule that uses devices of other hosts; None if it uses none.
    Raises UnsupportedError, with the reason, if it must run as a whole."""
    used = {devices[one.device] for one in schedule.splits}
    used.update(devices[home] for home in schedule.homes if home >= 0)
    if all(one.site is None for one in used):
        return None
    for one in used:
        if one.site is not None and one.site.why_not:
            raise UnsupportedError(one.site.why_not)
    _, places = sites_of(devices)
    found = cut_partitions(graph, schedule, places)
    if not all(_can_repeat(piece, devices) for piece in found.pieces):
        found = cut_partitions(graph, schedule, places, repeats=False)
    for piece in found.pieces:
        for node in piece.inserted:
            device, type = devices[piece.devices[node]], piece.graph.nodes[node].type
            if reason := device.supports_op("cont", {}, [type], type):
                raise UnsupportedError(f"{device.name} cannot copy a leaf for another host: {reason}")
    return found


def _can_repeat(piece: PartitionGraph, devices: Sequence[Device]) -> bool:
    """True if the devices of a partition support the nodes that it computes again."""
    for number in piece.repeated:
        node = piece.graph.nodes[number]
        operands = [piece.graph.type_of(one) for one in node.operands]
        if devices[piece.devices[number]].supports_op(node.op, node.attributes, operands, node.type):
            return False
    return True


class _Layout:
    """The partitions, compiled on their hosts and connected. Freed with the last user."""

    def __init__(self, blueprint: Blueprint, partitions: Partitions, sites: Sequence[Site | None]) -> None:
        self.partitions = partitions
        self.sites = sites
        self.wires: PartitionWiring = wire(partitions, sites)
        #: The reader and the source of each relayed value.
        self.relayed: Sequence[tuple[Site, Site]] = relayed_pairs(partitions, sites, self.wires)
        self.users = 1
        self.plans: dict[int, SitePlan] = {}
        self.own: dict[int, list[LocalMultiPlan]] = {}
        self._opened: list[Exchanging] = []
        try:
            for place, piece in enumerate(partitions.pieces):
                self._lay(blueprint, place, piece)
        except BaseException:
            self.free()
            raise

    def _lay(self, blueprint: Blueprint, place: int, piece: PartitionGraph) -> None:
        partition, site = self.wires.partitions[place], self.sites[place]
        if site is not None:
            devices = tuple(blueprint.memories[one].device for one in piece.devices)
            bindings = bindings_of(piece, blueprint.leaves)
            work = SiteWork(piece.graph, partition, devices, bindings, blueprint.options, blueprint.pipeline)
            try:
                self.plans[place] = site.compile(work)
            except HeliographError as error:
                raise explained(blueprint.graph, piece, error) from None
            return
        exchanging = Exchanging.open(blueprint.exchange, partition, blueprint.pipeline)
        self._opened.append(exchanging)
        found = _schedule_of(blueprint, piece)
        schedule = partitioned(piece.graph, blueprint.memories, found, partition)
        bindings = bindings_of(piece, blueprint.leaves)
        made = self.own[place] = []
        for _ in range(blueprint.pipeline):
            made.append(blueprint.own(piece.graph, schedule, bindings, exchanging))

    def loop_parts(self, loop: Loop, inputs: Sequence[int]) -> LoopParts | None:
        """Return the parts of a loop; None if its steps need this process, or a link is missing."""
        if self.own or self.wires.errands:
            return None
        parts = parts_of(loop, self.partitions, self.wires.loop_edges, inputs)
        for source, target in parts.pairs if parts is not None else ():
            reader, maker = self.sites[target], self.sites[source]
            if reader is None or maker is None or not reader.can_reach(maker):
                return None
        return parts

    def free(self) -> None:
        """Free the plans and close the edges. Idempotent."""
        for plan in self.plans.values():
            plan.free()
        for plans in self.own.values():
            for one in plans:
                one.free()
        for exchanging in self._opened:
            exchanging.close()


def _schedule_of(blueprint: Blueprint, piece: PartitionGraph) -> Schedule:
    """Return the schedule of this process's partition, as far as `partitioned` needs it."""
    homes = [-1] * len(piece.graph.leaves)
    for leaf, value in piece.bound:
        homes[leaf] = blueprint.schedule.homes[value]
    placed = zip(piece.nodes, piece.devices, strict=True)
    by_number = blueprint.schedule.assignments
    assignments = tuple(replace(by_number[number], device=device) for number, device in placed)
    return Schedule((), assignments, tuple(homes), blueprint.schedule.ahead_bytes)


class Pooled:
    """The state that the copies of a plan share: the partitions, and the numbers of runs."""

    def __init__(self, blueprint: Blueprint, partitions: Partitions) -> None:
        self.blueprint = blueprint
        self.partitions = partitions
        everyone, _ = sites_of(blueprint.devices)
        self.sites = [everyone[piece.site] for piece in partitions.pieces]
        #: Held while the partitions of a run start, so that all hosts see the runs in the same
        #: order. Starting may wait for room on a host, so each plan has its own lock. Partitions
        #: have their own queues, in which no other plan's run waits for these, so plans need no
        #: order between them.
        self.beginning = threading.Lock()
        #: The number of the next run, and of the last one of any loop so far; under `beginning`.
        self._next_run = 1
        self._last_of_loops = 0
        #: The parts of the last loop.
        self._looped: LoopParts | None = None
        self._lock = threading.Lock()
        self._is_stale = False
        self.holders = blueprint.pipeline
        look_again(partitions, self.sites)
        self._layout = _Layout(blueprint, partitions, self.sites)

    @contextmanager
    def layout(self) -> Iterator[_Layout]:
        """Hold the partitions for one run; lay them out anew if two hosts turned out not to reach
        each other, or do so again."""
        with self._lock:
            if self._is_stale:
                self._lay_out_anew()
            elif any(reader.can_reach(source) for reader, source in self._layout.relayed):
                try:
                    self._lay_out_anew()
                except HeliographError as error:
                    # There may be no memory for both.
                    self._layout.relayed = ()
                    logger.warning("a plan stays relayed: %s", error.message)
            found = self._layout
            found.users += 1
        try:
            yield found
        finally:
            with self._lock:
                self._leave(found)

    def _lay_out_anew(self) -> None:
        # The old partitions stay until the new layout has succeeded.
        made = _Layout(self.blueprint, self.partitions, self.sites)
        self._is_stale, old, self._layout = False, self._layout, made
        self._leave(old)

    @property
    def now(self) -> _Layout:
        """The present layout, for reports."""
        return self._layout

    def _leave(self, layout: _Layout) -> None:
        layout.users -= 1
        if not layout.users:
            layout.free()

    def take_run(self) -> int:
        """Return the number of the next run. Called under `beginning`."""
        self._next_run += 1
        return self._next_run - 1

    def take_steps(self, steps: int, parts: LoopParts) -> int:
        """Return the number of the first step of a loop; the others follow. Called under
        `beginning`."""
        if self._looped is None or not self._looped.is_alike(parts):
            # Its edges carry other values than those that were requested ahead.
            self._next_run = max(self._next_run, self._last_of_loops + 1)
        self._looped, first = parts, self._next_run
        self._next_run += steps
        self._last_of_loops = max(self._last_of_loops, self._next_run - 1)
        return first

    def give_back(self, first: int, steps: int, done: int) -> None:
        """Note that a loop ended everywhere after so many of its steps. The next run follows them,
        so that values requested ahead are its own."""
        with self.beginning:
            if self._next_run == first + steps:
                self._next_run = first + done

    def cause(self, layout: _Layout, errors: Sequence[tuple[int, HeliographError]]) -> HeliographError:
        """Return the first of the most specific errors of partitions, by place, in the numbers of
        the whole graph. Notes which hosts lost each other."""
        self.confirm([error for _, error in errors])
        for place, error in errors:
            if place >= 0:
                self.note(layout, place, error)
        # A host that is lost has a name here, and an address where another one missed it.
        place, error = min(errors, key=lambda one: (_rank(one[1]), not self._is_lost(one[0])))
        if place >= 0:
            error = explained(self.blueprint.graph, self.partitions.pieces[place], error)
        return error

    def _is_lost(self, place: int) -> bool:
        site = self.sites[place] if place >= 0 else None
        try:
            if site is not None:
                site.check()
        except HeliographError:
            return True
        return False

    def confirm(self, errors: Sequence[HeliographError]) -> None:
        """Confirm which hosts are alive, after an error that reports a loss.

        Hosts may notice each other's end before this process does. Confirming before the error is
        raised keeps the lost device out of later device lists.
        """
        if any(isinstance(error, UnavailableError | MemberLostError) for error in errors):
            for site in self.sites:
                if site is not None:
                    site.confirm()

    def note(self, layout: _Layout, place: int, error: HeliographError) -> None:
        """Note that a partition failed. If it lost a host that is alive, it will not fetch from
        that host again."""
        pairs = list(unreachable(self.partitions, self.sites, layout.wires, place, error))
        for reader, source in pairs:
            reader.cannot_reach(source)
        with self._lock:
            self._is_stale = self._is_stale or (bool(pairs) and layout is self._layout)

    def leave(self) -> None:
        """Note that a copy of the plan is freed."""
        with self._lock:
            self.holders -= 1
            if self.holders == 0:
                self._leave(self._layout)


class DistributedPlan(MultiDevicePlan):
    """One copy of a plan over several hosts: this process's partition, if there is one, and runs of
    the others."""

    takes_anything = True

    def __init__(self, pooled: Pooled, copy: int) -> None:
        blueprint = pooled.blueprint
        super().__init__(blueprint.graph, blueprint.schedule, blueprint.devices)
        self._pooled = pooled
        self._copy = copy
        self._input_values = [n for n, one in enumerate(self.graph.leaves) if one.kind is LeafKind.INPUT]
        layout = pooled.now
        own = [plans[copy] for plans in layout.own.values()]
        # The memory of other hosts for all copies is counted with the first copy.
        remote = list(layout.plans.values()) if copy == 0 else []
        self.compute_bytes = sum(one.compute_bytes for one in own) + sum(one.compute_bytes for one in remote)
        self.steps = sum(one.steps for one in own) + sum(one.steps for one in layout.plans.values())

    def __repr__(self) -> str:
        return f"<DistributedPlan of {self.graph} in {len(self._pooled.partitions.pieces)} partitions>"

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
        values = dict(zip(self._input_values, inputs, strict=True))
        with self._pooled.layout() as layout:
            _Run(self._pooled, layout, self._copy, values, outputs).do(abort)
        # Outputs that are inputs, weights, or variables as the run left them.
        leaves = {**self._pooled.blueprint.leaves, **values}
        for port, target in zip(self.graph.outputs, outputs, strict=True):
            if target is not None and port.value in leaves:
                access.copy(leaves[port.value], target)

    def hosted_loop(
        self, loop: Loop, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> HostedLoop | None:
        if self._freed:
            raise UnknownHandleError("the plan was freed")
        leaves = len(self.graph.leaves)
        wanted = zip(self.graph.outputs, outputs, strict=True)
        is_made = all(target is None or port.value >= leaves for port, target in wanted)
        if self._pooled.blueprint.pipeline > 1 or not is_made:
            return None
        with ExitStack() as stack:
            layout = stack.enter_context(self._pooled.layout())
            parts = layout.loop_parts(loop, self._input_values)
            if parts is None:
                return None
            values = dict(zip(self._input_values, inputs, strict=True))
            starts: dict[int, Callable[[Loop, int], HostedLoop]] = {}
            for place, plan in layout.plans.items():
                given, targets = _bound(layout.partitions.pieces[place], values, outputs)
                starts[place] = plan.prepare_loop(given, targets, stack)
            return self._start_loop(layout, loop, parts, starts, stack)

    def _start_loop(
        self,
        layout: _Layout,
        loop: Loop,
        parts: LoopParts,
        starts: Mapping[int, Callable[[Loop, int], HostedLoop]],
        stack: ExitStack,
    ) -> HostedLoop | None:
        """Start the parts of a loop, which takes over `stack`. None if it must go step by step."""
        pooled, started = self._pooled, dict[int, HostedLoop]()
        with pooled.beginning:
            first = pooled.take_steps(loop.steps, parts)
            try:
                # First those that may find no room for what they stream.
                for place in sorted(starts, key=lambda one: one not in parts.tapped):
                    started[place] = starts[place](parts.loops[place], first)
            except HeliographError as error:
                for one in started.values():
                    one.close()
                if isinstance(error, LimitExceededError) and not started:
                    return None
                raise
        assigns = any(node.op == "assign" for node in self.graph.nodes)
        choose = partial(pooled.cause, layout)
        loops = [started[place] for place in range(len(started))]
        whole = HostedLoops(parts, loops, loop.taps, choose, stack.pop_all(), assigns=assigns)
        whole.at_end(partial(pooled.give_back, first, loop.steps))
        return whole

    # Explaining

    def report(self) -> PlanReport:
        layout = self._pooled.now
        reports = {place: plan.report() for place, plan in layout.plans.items()}
        reports |= {place: plans[self._copy].report() for place, plans in layout.own.items()}
        # Splits that a partition made of one split are reported as one; its times count from the
        # partition's start.
        turns, parts = _by_split(layout.partitions, reports, self.schedule.split_of)
        crossings = zip(layout.partitions.crossings, layout.wires.routes, strict=True)
        routes = {(one.value, one.target): route for one, route in crossings}
        places = {one.site: place for place, one in enumerate(layout.partitions.pieces)}
        site_of = [places.get(number, -1) for number in sites_of(self.devices)[1]]
        memory = memory_of_hosts(len(self.graph.leaves), layout.partitions, reports, self.schedule.split_of)
        splits = [
            replace(
                _split(one.device, tuple(_copies(one.copies, site_of, routes)), parts.get(n, [])),
                memory_steps=memory.steps.get(n, 0),
            )
            for n, one in enumerate(self.schedule.splits)
        ]
        found = self._report(splits, turns, memory.between([one.name for one in self.devices]))
        return replace(found, blocks=memory.blocks, stored=memory.stored)

    def measure(self, *, on: bool) -> None:
        layout = self._pooled.now
        for plan in layout.plans.values():
            plan.measure(on=on)
        for plans in layout.own.values():
            plans[self._copy].measure(on=on)

    def forget_times(self) -> None:
        for plans in self._pooled.now.own.values():
            plans[self._copy].forget_times()

    def held_by_device(self) -> dict[str, int]:
        found = dict.fromkeys((one.name for one in self.devices), 0)
        layout = self._pooled.now
        for plans in layout.own.values():
            for name, size_bytes in plans[self._copy].held_by_device().items():
                found[name] += size_bytes
        for place, plan in layout.plans.items() if self._copy == 0 else ():
            devices = layout.partitions.pieces[place].devices
            found[self.devices[devices[-1]].name] += plan.compute_bytes
        return found

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._pooled.leave()


class _Run:
    """One run: the partitions that have ended, and their errors."""

    def __init__(
        self,
        pooled: Pooled,
        layout: _Layout,
        copy: int,
        inputs: Mapping[int, Tensor],
        outputs: Sequence[Tensor | None],
    ) -> None:
        self._pooled, self._layout = pooled, layout
        self._inputs, self._outputs = inputs, outputs
        self._own = {place: plans[copy] for place, plans in layout.own.items()}
        self._runs: dict[int, SiteRun] = {}
        self._errands: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._pending = 0
        #: Held until all have ended.
        self._all_ended = threading.Lock()
        self._stop = Abort()
        self._errors: list[tuple[int, HeliographError]] = []
        self._failure: BaseException | None = None

    def do(self, abort: Abort) -> None:
        """Run all partitions. Raises the first of the most specific errors."""
        with ExitStack() as stack:
            for place, plan in self._layout.plans.items():
                inputs, outputs = self._bound(place)
                self._runs[place] = plan.prepare(inputs, outputs)
                stack.callback(self._runs[place].close)
            stack.enter_context(abort.watch(self._stop.set))
            number = self._begin()
            # Started partitions are cancelled, however this ends.
            stack.enter_context(self._stop.watch(self._cancel))
            for place, mine in self._own.items():
                self._compute(place, mine, number)
            if self._runs:
                # Each partition ends, or its host is lost.
                self._all_ended.acquire()
            self._raise(abort)
            for run in self._runs.values():
                run.finish()

    def _bound(self, place: int) -> tuple[list[Tensor], list[Tensor | None]]:
        return _bound(self._layout.partitions.pieces[place], self._inputs, self._outputs)

    def _begin(self) -> int:
        """Start the partitions of other hosts."""
        self._pending = len(self._runs)
        if self._pending:
            self._all_ended.acquire()
        with self._pooled.beginning:
            number = self._pooled.take_run()
            for place, run in self._runs.items():
                try:
                    run.start(number, partial(self._ended, place))
                except HeliographError as error:
                    self._ended(place, error)
        self._errands = [self._go(errand, number) for errand in self._layout.wires.errands]
        return number

    def _go(self, errand: RelayErrand, number: int) -> Callable[[], None]:
        """Carry a value to its destination as soon as it exists. Returns a call that cancels
        this."""
        exchange, edge = self._pooled.blueprint.exchange, errand.edge
        if errand.source is None:
            return exchange.forward(edge, number, errand.destination, self._gone)
        return exchange.relay(edge, number, errand.size_bytes, errand.source, errand.destination, self._gone)

    def _ended(self, place: int, error: HeliographError | None = None) -> None:
        """Note that a partition has ended. Any thread."""
        failed = error or self._runs[place].error
        if failed is not None:
            self._fail(place, failed)
        with self._lock:
            self._pending -= 1
            is_last = not self._pending
        if is_last:
            self._all_ended.release()

    def _gone(self, error: HeliographError | None) -> None:
        """Note that an errand has ended."""
        if error is not None and not isinstance(error, CancelledError):
            # The node belongs to the partition that was to make the value, whose own run reports
            # it.
            self._fail(-1, error.at(Origin()))

    def _fail(self, place: int, error: HeliographError) -> None:
        with self._lock:
            self._errors.append((place, error))
        # Not twice: cancelling may end a partition on this thread.
        if not self._stop.is_set:
            self._stop.set()

    def _cancel(self) -> None:
        for run in self._runs.values():
            run.cancel()
        for cancel in self._errands:
            cancel()

    def _compute(self, place: int, plan: LocalMultiPlan, number: int) -> None:
        inputs, outputs = self._bound(place)
        try:
            plan.compute(inputs, outputs, self._stop, None, number)
        except HeliographError as error:
            self._fail(place, error)
        except BaseException as error:
            self._failure = error
            self._stop.set()

    def _raise(self, abort: Abort) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            errors = list(self._errors)
        if not errors:
            if self._stop.is_set:
                raise CancelledError("the run was cancelled")
            return
        error = self._pooled.cause(self._layout, errors)
        if abort.is_set:
            raise CancelledError("the run was cancelled")
        raise error.at(error.origin)


def _bound(
    piece: PartitionGraph, inputs: Mapping[int, Tensor], outputs: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the inputs and outputs of a partition, of those of the whole graph."""
    wanted = [outputs[one] for one in piece.outputs]
    wanted += [None] * (len(piece.graph.outputs) - len(wanted))
    return [inputs[value] for value in piece.inputs], wanted


def _rank(error: HeliographError) -> int:
    """Return how specific an error is, 0 for the most: an error of a node is; a cancellation only
    follows from another error."""
    if error.origin.op:
        return 0
    if isinstance(error, CancelledError):
        return 3
    return 1 if isinstance(error, MemberLostError) else 2
