"""A plan over several hosts: each runs its partition by itself, and they exchange values while they do.

    compute ─┬─ start ─▸ partition on host a ─┐ values
             ├─ start ─▸ partition on host b ◂┘
             └─ own partition, on devices of this process

A run costs one message to each host and one back, whatever its splits are. The hosts see all runs of a plan
in one order, so that none waits for a run that another has behind its own. The first error cancels the
others.

Runs on a device thread; any thread tells it that a partition has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from heliograph_backends.contract import (
    Abort,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    Site,
    SitePlan,
    SiteRun,
    Tensor,
    access,
)
from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    MemberLostError,
    Origin,
    UnavailableError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import CopyReport, DeviceShare, NodePlacement, PlanReport, Route, SplitReport
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.plans.multi_device import LocalMultiPlan, MultiDevicePlan, Observe
from heliograph_server.plans.partitions import Exchanging, partitioned
from heliograph_server.plans.wiring import (
    PartitionWiring,
    RelayErrand,
    bindings_of,
    compile_on,
    explained,
    site_work,
    unreachable,
    wire,
)
from heliograph_server.scheduler.model import ALL_ROWS, Copy, Schedule
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions, cut_partitions


def pooled_report(
    graph: Graph,
    schedule: Schedule,
    devices: Sequence[Device],
    partitions: Partitions,
    wires: PartitionWiring,
    reports: Mapping[int, PlanReport],
) -> PlanReport:
    """`reports`: of each partition. What one splits further is one split here, begun after its partition."""
    split_of = {node: number for number, one in enumerate(schedule.splits) for node in one.nodes}
    concurrent, parts = _by_split(partitions, reports, split_of)
    routes = _routes(partitions, wires)
    places = {one.site: place for place, one in enumerate(partitions.pieces)}
    site_of = [places.get(number, -1) for number in _site_numbers(devices)]
    return PlanReport(
        nodes=tuple(
            NodePlacement(split_of[node], one.cause, max(0, one.operand), concurrent.get(node, 0))
            for node, one in enumerate(schedule.assignments)
        ),
        splits=tuple(
            _split(
                one.device,
                tuple(_copy(copy, site_of, routes) for copy in one.copies),
                parts.get(number, []),
            )
            for number, one in enumerate(schedule.splits)
        ),
        devices=tuple(_share(graph, schedule, devices, place, parts) for place in range(len(devices))),
    )


def _site_numbers(devices: Sequence[Device]) -> list[int]:
    sites: list[object] = []
    for one in devices:
        if one.site not in sites:
            sites.append(one.site)
    return [sites.index(one.site) for one in devices]


def _by_split(
    partitions: Partitions, reports: Mapping[int, PlanReport], split_of: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, list[SplitReport]]]:
    """Of each node the set that it runs in, and the reports of the splits that each split became."""
    concurrent: dict[int, int] = {}
    found: dict[int, dict[tuple[int, int], SplitReport]] = {}
    for place, report in reports.items():
        piece = partitions.pieces[place]
        for node, one in enumerate(report.nodes):
            if node not in piece.inserted:
                concurrent[piece.nodes[node]] = one.concurrent
                whole = found.setdefault(split_of[piece.nodes[node]], {})
                whole[place, one.split] = report.splits[one.split]
    return concurrent, {number: list(one.values()) for number, one in found.items()}


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


def _routes(partitions: Partitions, wires: PartitionWiring) -> dict[tuple[int, int], Route]:
    """By value and the partition that reads it."""
    pairs = zip(partitions.crossings, wires.routes, strict=True)
    return {(one.value, one.target): route for one, route in pairs}


def _copy(copy: Copy, site_of: Sequence[int], routes: Mapping[tuple[int, int], Route]) -> CopyReport:
    route = routes.get((copy.value, site_of[copy.destination]), Route.WITHIN)
    if site_of[copy.source] == site_of[copy.destination]:
        route = Route.WITHIN
    return CopyReport(copy.value, copy.source, copy.size_bytes, copy.rows != ALL_ROWS, False, route)


def _share(
    graph: Graph,
    schedule: Schedule,
    devices: Sequence[Device],
    place: int,
    parts: Mapping[int, Sequence[SplitReport]],
) -> DeviceShare:
    sizes = dict.fromkeys(LeafKind, 0)
    for leaf, home in zip(graph.leaves, schedule.homes, strict=True):
        sizes[leaf.kind] += leaf.type.nbytes if home == place else 0
    computing = sum(
        part.compute_bytes
        for number, one in enumerate(schedule.splits)
        if one.device == place
        for part in parts.get(number, ())
    )
    made = sum(
        node.type.nbytes
        for node, one in zip(graph.nodes, schedule.assignments, strict=True)
        if one.device == place
    )
    name = devices[place].name
    return DeviceShare(name, sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE], computing, made)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a plan over several hosts is made of. `memories`: of each device of the schedule."""

    graph: Graph
    schedule: Schedule
    memories: tuple[BufferType, ...]
    #: Weights and variables.
    leaves: Mapping[int, Tensor]
    options: DeviceCompileOptions
    pipeline: int
    exchange: LiveExchange
    #: Makes a plan of this process's own partition: its graph, its schedule, its leaves, its exchange.
    own: Callable[[Graph, Schedule, LeafBindings, Exchanging], LocalMultiPlan]

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(one.device for one in self.memories)


def sites_of(devices: Sequence[Device]) -> tuple[list[Site | None], list[int]]:
    """The hosts of devices, and of each device the place of its host."""
    sites: list[Site | None] = []
    for device in devices:
        if device.site not in sites:
            sites.append(device.site)
    return sites, [sites.index(device.site) for device in devices]


def partitions_of(graph: Graph, schedule: Schedule, devices: Sequence[Device]) -> Partitions | None:
    """The partitions of a schedule that devices of other hosts take part in; None: there are none of these.
    Raises UnsupportedError, saying why it must be run as a whole."""
    used = {devices[one.device] for one in schedule.splits}
    used.update(devices[home] for home in schedule.homes if home >= 0)
    if all(one.site is None for one in used):
        return None
    for one in used:
        if one.site is not None and one.site.why_not:
            raise UnsupportedError(one.site.why_not)
    _, places = sites_of(devices)
    found = cut_partitions(graph, schedule, places)
    for piece in found.pieces:
        _check_inserted(piece, devices)
    return found


def _check_inserted(piece: PartitionGraph, devices: Sequence[Device]) -> None:
    """Raises UnsupportedError where a device cannot copy a leaf for another host."""
    for node in piece.inserted:
        device, type = devices[piece.devices[node]], piece.graph.nodes[node].type
        if why := device.supports_op("cont", {}, [type], type):
            raise UnsupportedError(f"{device.name} cannot copy a leaf for another host: {why}")


class _Laid:
    """The partitions as they are laid out now. Freed with the last who uses it."""

    def __init__(self, blueprint: Blueprint, partitions: Partitions, sites: Sequence[Site | None]) -> None:
        self.partitions = partitions
        self.sites = sites
        self.wires: PartitionWiring = wire(partitions, sites)
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
            memories, leaves = blueprint.memories, blueprint.leaves
            work = site_work(piece, partition, memories, leaves, blueprint.options, blueprint.pipeline)
            self.plans[place] = compile_on(site, blueprint.graph, piece, work)
            return
        exchanging = Exchanging(partition, blueprint.exchange.open(partition, blueprint.pipeline))
        self._opened.append(exchanging)
        found = _schedule_of(blueprint, piece)
        schedule = partitioned(piece.graph, blueprint.memories, found, partition)
        bindings = bindings_of(piece, blueprint.leaves)
        made = self.own[place] = []
        for _ in range(blueprint.pipeline):
            made.append(blueprint.own(piece.graph, schedule, bindings, exchanging))

    def free(self) -> None:
        """Idempotent."""
        for plan in self.plans.values():
            plan.free()
        for plans in self.own.values():
            for one in plans:
                one.free()
        for exchanging in self._opened:
            exchanging.ports.close()


def _schedule_of(blueprint: Blueprint, piece: PartitionGraph) -> Schedule:
    """As far as `partitioned` needs it: where this process's partition runs and lies."""
    homes = [-1] * len(piece.graph.leaves)
    for leaf, value in piece.bound:
        homes[leaf] = blueprint.schedule.homes[value]
    placed = zip(piece.nodes, piece.devices, strict=True)
    by_number = blueprint.schedule.assignments
    assignments = tuple(replace(by_number[number], device=device) for number, device in placed)
    return Schedule((), assignments, tuple(homes), blueprint.schedule.ahead_bytes)


class Pooled:
    """What the copies of a plan share: the partitions, and the numbers of runs."""

    def __init__(self, blueprint: Blueprint, partitions: Partitions) -> None:
        self.blueprint = blueprint
        self.partitions = partitions
        everyone, _ = sites_of(blueprint.devices)
        self.sites = [everyone[piece.site] for piece in partitions.pieces]
        #: Held while the partitions of a run start, so that all hosts see the runs in one order. Starting
        #: may wait for room on a host, so this is the plan's own: partitions have their own queues, on which
        #: no other plan's run ever waits for one of these, and between plans there is no order to keep.
        self.beginning = threading.Lock()
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._is_stale = False
        self.holders = blueprint.pipeline
        self._laid = _Laid(blueprint, partitions, self.sites)

    def next_number(self) -> int:
        """Of a run that begins now."""
        return next(self._numbers)

    @contextmanager
    def laid(self) -> Iterator[_Laid]:
        """The partitions, for one run; laid out anew where two hosts turned out not to reach each other."""
        with self._lock:
            if self._is_stale:
                # The old partitions stay until this is known to have gone well.
                made = _Laid(self.blueprint, self.partitions, self.sites)
                self._is_stale, old, self._laid = False, self._laid, made
                self._leave(old)
            found = self._laid
            found.users += 1
        try:
            yield found
        finally:
            with self._lock:
                self._leave(found)

    @property
    def now(self) -> _Laid:
        """As they are, for whoever explains the plan."""
        return self._laid

    def _leave(self, laid: _Laid) -> None:
        laid.users -= 1
        if not laid.users:
            laid.free()

    def confirm(self, errors: Sequence[HeliographError]) -> None:
        """Hosts notice each other's end before this process may: until it knows who is there, so that nobody
        who was told of a loss finds the lost device in a list."""
        if any(isinstance(error, UnavailableError | MemberLostError) for error in errors):
            for site in self.sites:
                if site is not None:
                    site.confirm()

    def note(self, laid: _Laid, place: int, error: HeliographError) -> None:
        """A partition failed: if it lost a host that is alive, it is not to fetch from that any more."""
        pairs = list(unreachable(self.partitions, self.sites, laid.wires, place, error))
        for reader, source in pairs:
            reader.cannot_reach(source)
        with self._lock:
            self._is_stale = self._is_stale or (bool(pairs) and laid is self._laid)

    def leave(self) -> None:
        """A copy of the plan is freed."""
        with self._lock:
            self.holders -= 1
            if self.holders == 0:
                self._leave(self._laid)


class DistributedPlan(MultiDevicePlan):
    """One copy of it: its own partition of this process, if there is one, and runs of the others'."""

    takes_anything = True

    def __init__(self, pooled: Pooled, copy: int) -> None:
        blueprint = pooled.blueprint
        self._pooled = pooled
        self._copy = copy
        self.graph = blueprint.graph
        self.schedule = blueprint.schedule
        self.devices = blueprint.devices
        self.device = self.devices[self.schedule.main]
        self._freed = False
        self._input_values = [n for n, one in enumerate(self.graph.leaves) if one.kind is LeafKind.INPUT]
        laid = pooled.now
        own = [plans[copy] for plans in laid.own.values()]
        # What hosts take for all copies is counted with the first one.
        there = list(laid.plans.values()) if copy == 0 else []
        self.compute_bytes = sum(one.compute_bytes for one in own) + sum(one.compute_bytes for one in there)
        self.steps = sum(one.steps for one in own) + sum(one.steps for one in laid.plans.values())
        self._run_us = 0.0

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
        began = time.perf_counter()
        values = dict(zip(self._input_values, inputs, strict=True))
        with self._pooled.laid() as laid:
            _Run(self._pooled, laid, self._copy, values, outputs).do(abort)
        self._return_leaves(values, outputs)
        self._run_us = (time.perf_counter() - began) * 1e6

    def _return_leaves(self, inputs: Mapping[int, Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Outputs that are inputs, weights, or variables as the run left them."""
        leaves = {**self._pooled.blueprint.leaves, **inputs}
        for port, target in zip(self.graph.outputs, outputs, strict=True):
            if target is not None and port.value in leaves:
                access.copy(leaves[port.value], target)

    # Explaining

    def report(self) -> PlanReport:
        laid = self._pooled.now
        reports = {place: plan.report() for place, plan in laid.plans.items()}
        reports |= {place: plans[self._copy].report() for place, plans in laid.own.items()}
        return pooled_report(self.graph, self.schedule, self.devices, laid.partitions, laid.wires, reports)

    def forget_times(self) -> None:
        for plans in self._pooled.now.own.values():
            plans[self._copy].forget_times()

    @property
    def held_bytes(self) -> int:
        return sum(self.held_by_device().values())

    def held_by_device(self) -> dict[str, int]:
        found = dict.fromkeys((one.name for one in self.devices), 0)
        laid = self._pooled.now
        for plans in laid.own.values():
            for name, size_bytes in plans[self._copy].held_by_device().items():
                found[name] += size_bytes
        for place, plan in laid.plans.items() if self._copy == 0 else ():
            devices = laid.partitions.pieces[place].devices
            found[self.devices[devices[-1]].name] += plan.compute_bytes
        return found

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._pooled.leave()


class _Run:
    """One run: who has ended, and how."""

    def __init__(
        self,
        pooled: Pooled,
        laid: _Laid,
        copy: int,
        inputs: Mapping[int, Tensor],
        outputs: Sequence[Tensor | None],
    ) -> None:
        self._pooled, self._laid = pooled, laid
        self._inputs, self._outputs = inputs, outputs
        self._own = {place: plans[copy] for place, plans in laid.own.items()}
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
        """Raises the first error that says most."""
        with ExitStack() as stack:
            for place, plan in self._laid.plans.items():
                inputs, outputs = self._bound(place)
                self._runs[place] = plan.prepare(inputs, outputs)
                stack.callback(self._runs[place].close)
            stack.enter_context(abort.watch(self._stop.set))
            number = self._begin()
            # What is started is cancelled, however this ends.
            stack.enter_context(self._stop.watch(self._cancel))
            for place, mine in self._own.items():
                self._compute(place, mine, number)
            self._wait()
            self._raise(abort)
            for run in self._runs.values():
                run.finish()

    def _bound(self, place: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The inputs and outputs of a partition."""
        piece = self._laid.partitions.pieces[place]
        wanted = [self._outputs[one] for one in piece.outputs]
        wanted += [None] * (len(piece.graph.outputs) - len(wanted))
        return [self._inputs[value] for value in piece.inputs], wanted

    def _begin(self) -> int:
        """Starts the partitions of other hosts."""
        self._pending = len(self._runs)
        if self._pending:
            self._all_ended.acquire()
        with self._pooled.beginning:
            number = self._pooled.next_number()
            for place, run in self._runs.items():
                try:
                    run.start(number, partial(self._ended, place))
                except HeliographError as error:
                    self._ended(place, error)
        self._errands = [self._go(errand, number) for errand in self._laid.wires.errands]
        return number

    def _go(self, errand: RelayErrand, number: int) -> Callable[[], None]:
        """Takes a value to where it is wanted, as soon as it is there; gives what ends that."""
        exchange, edge = self._pooled.blueprint.exchange, errand.edge
        if errand.source is None:
            return exchange.forward(edge, number, errand.destination, self._gone)
        return exchange.relay(edge, number, errand.size_bytes, errand.source, errand.destination, self._gone)

    def _ended(self, place: int, error: HeliographError | None = None) -> None:
        """A partition has ended, in whatever thread."""
        failed = error or self._runs[place].error
        if failed is not None:
            self._fail(place, failed)
        with self._lock:
            self._pending -= 1
            is_last = not self._pending
        if is_last:
            self._all_ended.release()

    def _gone(self, error: HeliographError | None) -> None:
        """An errand has ended."""
        if error is not None and not isinstance(error, CancelledError):
            # A node of the partition that was to make it: that one's own run tells which it is.
            self._fail(-1, error.at(Origin()))

    def _fail(self, place: int, error: HeliographError) -> None:
        with self._lock:
            self._errors.append((place, error))
        # Not twice: cancelling may end a partition in this thread.
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

    def _wait(self) -> None:
        """Until all partitions have ended: each does, or its host is lost."""
        if self._runs:
            self._all_ended.acquire()

    def _raise(self, abort: Abort) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            errors = list(self._errors)
        if not errors:
            if self._stop.is_set:
                raise CancelledError("the run was cancelled")
            return
        self._pooled.confirm([error for _, error in errors])
        for place, error in errors:
            if place >= 0:
                self._pooled.note(self._laid, place, error)
        if abort.is_set:
            raise CancelledError("the run was cancelled")
        place, error = min(errors, key=lambda one: _rank(one[1]))
        if place >= 0:
            error = explained(self._pooled.blueprint.graph, self._laid.partitions.pieces[place], error)
        raise error.at(error.origin)


def _rank(error: HeliographError) -> int:
    """An error of a node says most; that somebody was cancelled is only what followed."""
    if error.origin.op:
        return 0
    if isinstance(error, CancelledError):
        return 3
    return 1 if isinstance(error, MemberLostError) else 2
