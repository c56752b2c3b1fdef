"""What graphs take of devices, before they are compiled: estimates, and memory that is taken for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from heliograph_backends.contract import CompileOptions, Device
from heliograph_proto.description import DeviceEstimate, PlanEstimate
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.graph import Graph, Leaf, LeafKind, validate
from heliograph_proto.limits import Limits
from heliograph_proto.types import MAX_BYTES
from heliograph_server.core.checks import check_pipeline
from heliograph_server.core.execution import typed
from heliograph_server.core.handles import NOTHING_BOUND, ReservationHandle
from heliograph_server.core.known_graphs import KnownGraph
from heliograph_server.core.ordered import ordered
from heliograph_server.core.protocol import SessionCore
from heliograph_server.core.reservation import Need, Reservation, needs_of
from heliograph_server.core.room import Room
from heliograph_server.core.scheduling import Schedule
from heliograph_server.core.scheduling.between import plan_between, values_between
from heliograph_server.core.scheduling.order import clocks
from heliograph_server.core.scheduling.parts import cut, in_order
from heliograph_server.core.targets import Target, Targets, Wish
from heliograph_server.core.tenants import Holding


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """A graph that nobody has checked yet, and where it would run."""

    graph: Graph
    devices: tuple[str, ...] = ()
    options: CompileOptions = field(default_factory=CompileOptions)
    pins: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    pipeline: int = 1


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """For what memory is taken: a graph that nobody has checked yet, or blocks of the first device."""

    reservation: int
    graph: Graph | None = None
    devices: tuple[str, ...] = ()
    options: CompileOptions = field(default_factory=CompileOptions)
    pins: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    block_bytes: tuple[int, ...] = ()


class Sizer:
    """Of one session. `busy` is held while something compiles."""

    def __init__(
        self,
        core: SessionCore,
        lock: threading.RLock,
        busy: threading.Lock,
        limits: Limits,
        device: Callable[[str], Device],
        targets: Targets,
        room: Room,
        holding: Holding,
    ) -> None:
        self._holding = holding
        self._core = core
        #: Guards the core.
        self._lock = lock
        self._busy = busy
        self._limits = limits
        self._device = device
        self._targets = targets
        self._room = room

    # Estimates

    def estimate(self, request: EstimateRequest) -> PlanEstimate:
        """What a plan would take, without taking it. Raises what PlanService.Estimate is refused with."""
        check_pipeline(request.pipeline)
        wish = Wish(request.devices, request.pins, request.memory, request.options, request.pipeline)
        graph, target = self._find(request.graph, wish)
        if target.schedule is None:
            return _alone(graph, target, request.options)
        found = _shares(graph, target, target.schedule, request.options, request.pipeline)
        return PlanEstimate(
            device=target.main.name,
            compute_bytes=tuple(size for one in found for size in one.compute_bytes),
            weights_bytes=_checked(sum(one.weights_bytes for one in found)),
            variables_bytes=_checked(sum(one.variables_bytes for one in found)),
            extra_bytes=sum(one.extra_bytes for one in found),
            devices=found,
        )

    def _find(self, graph: Graph, wish: Wish) -> tuple[Graph, Target]:
        """The graph, checked, and where it would run; its weights need not be here."""
        weights = frozenset(n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.WEIGHT)
        known = KnownGraph(validate(graph, self._limits, bound=weights))
        with self._lock:
            lies = self._core.devices_of(known.graph, NOTHING_BOUND)
        return known.graph, self._targets.find(known, wish, lies)

    # Reservations

    def reserve(self, request: ReserveRequest) -> dict[str, int]:
        """Takes memory for plans; bytes by device. Raises what PlanService.Reserve is refused with."""
        with self._busy:
            with self._lock:
                self._core.hold_number(request.reservation, ReservationHandle)
            try:
                made = self._room.for_work(lambda: self._take_memory(request))
                self._holding.charge(sum(made.sizes.values()), made)
                self._commit(request.reservation, made)
            finally:
                with self._lock:
                    self._core.handles.give_up(request.reservation)
        return made.sizes

    def _take_memory(self, request: ReserveRequest) -> Reservation:
        needs = self._needs(request)
        try:
            return Reservation(needs)
        except Exception as error:
            raise typed(error, "reserving memory") from error

    def _needs(self, request: ReserveRequest) -> dict[Device, Need]:
        if request.graph is None:
            device = self._device(request.devices[0] if request.devices else "")
            return {device: Need(request.block_bytes)}
        wish = Wish(request.devices, request.pins, request.memory, request.options)
        graph, target = self._find(request.graph, wish)
        return needs_of(graph, target.devices, target.schedule, request.options)

    def _commit(self, number: int, made: Reservation) -> None:
        try:
            with self._lock:
                self._core.add_reservation(number, made)
        except BaseException:
            made.free()
            raise


def _alone(graph: Graph, target: Target, options: CompileOptions) -> PlanEstimate:
    """Of a plan in one split on one device."""
    found = target.main.estimate(ordered(target.main, graph)[0], options)
    sizes = {kind: _size(target, graph.of_kind(kind)) for kind in LeafKind}
    weights, variables = sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE]
    share = DeviceEstimate(target.main.name, found.compute_bytes, weights, variables, found.extra_bytes)
    return PlanEstimate(
        device=target.main.name,
        compute_bytes=found.compute_bytes,
        weights_bytes=weights,
        variables_bytes=variables,
        extra_bytes=found.extra_bytes,
        arena_bytes=found.arena_bytes,
        devices=(share,),
    )


def _size(target: Target, leaves: tuple[Leaf, ...]) -> int:
    return _checked(sum(target.memories[0].alloc_size(leaf.type) for leaf in leaves))


def _checked(size_bytes: int) -> int:
    if size_bytes > MAX_BYTES:
        raise LimitExceededError(f"weights or variables of {size_bytes:,} bytes in all; 2**63 is too many")
    return size_bytes


def _shares(
    graph: Graph, target: Target, schedule: Schedule, options: CompileOptions, copies: int
) -> tuple[DeviceEstimate, ...]:
    """Of a plan over several devices: what each takes, by priority, if it takes anything."""
    count = len(target.devices)
    sizes = {kind: [0] * count for kind in LeafKind}
    for leaf, home in zip(graph.leaves, schedule.homes, strict=True):
        if home >= 0:
            sizes[leaf.kind][home] += target.memories[home].alloc_size(leaf.type)
    computing: list[list[int]] = [[] for _ in range(count)]
    for place, spans in values_between(graph, schedule, clocks(graph, schedule)).items():
        computing[place] += plan_between(graph, spans, target.memories[place]).chunk_bytes
    extra = [0] * count
    for part, split in zip(cut(graph, schedule), schedule.splits, strict=True):
        device = target.devices[split.device]
        found = device.estimate(in_order(part, device.optimize(part.graph)).graph, options)
        computing[split.device] += found.compute_bytes
        extra[split.device] += found.extra_bytes
    return tuple(
        DeviceEstimate(
            device.name,
            tuple(computing[place]) * copies,
            sizes[LeafKind.WEIGHT][place],
            sizes[LeafKind.VARIABLE][place],
            extra[place],
        )
        for place, device in enumerate(target.devices)
        if computing[place] or sizes[LeafKind.WEIGHT][place] or sizes[LeafKind.VARIABLE][place]
    )
