"""Builds plans over several devices: in this process, over several hosts, or as a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from heliograph_backends.contract import LeafBindings, Plan
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanOptions
from heliograph_server.compile.placement import Placement, device_options
from heliograph_server.compile.plan_cache import KnownGraph
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import LocalMultiPlan, RunResources
from heliograph_server.plans.multi_host import Blueprint, DistributedPlan, Pooled, partitions_of
from heliograph_server.plans.partitions import Exchanging
from heliograph_server.plans.reservation import NOTHING, MemoryReservation
from heliograph_server.plans.split_runner import Precedences
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.measurements import Recorder
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.partitions import Partitions


@dataclass(frozen=True, slots=True)
class PlanParts:
    """The parts of a plan over several devices."""

    known: KnownGraph
    placement: Placement
    bindings: LeafBindings
    options: PlanOptions
    #: Reserved memory, used as far as it suffices; None: the plan allocates its own.
    memory: MemoryReservation | None = None
    #: Records the times of its runs.
    recorder: Recorder | None = None

    @property
    def schedule(self) -> Schedule:
        assert self.placement.schedule is not None
        return self.placement.schedule

    def precedences(self) -> Precedences | None:
        """The precedences of overlapping runs; None if runs do not overlap."""
        return Precedences(len(self.placement.devices)) if self.options.pipeline > 1 else None


class PlanFactory:
    """Builds plans. `exchange` is None if there is none with other daemons."""

    def __init__(self, device_locks: Mapping[str, DeviceLock], exchange: LiveExchange | None) -> None:
        self._device_locks = device_locks
        self._exchange = exchange

    def build(self, parts: PlanParts) -> LoadedPlan:
        """Build the plan of a placement with a schedule. Raises the errors of compiling."""
        partitions, why = self._partitions(parts)
        if partitions is not None:
            return _loaded(parts, self._pooled(parts, partitions))
        exchanging = self._exchanging(parts.options)
        try:
            plans = self._scheduled(parts, exchanging, why)
        except BaseException:
            if exchanging is not None:
                exchanging.close()
            raise
        loaded = _loaded(parts, plans)
        if exchanging is not None:
            loaded.when_freed(exchanging.close)
        return loaded

    def _partitions(self, parts: PlanParts) -> tuple[Partitions | None, str]:
        """The partitions of a plan over several hosts, or None.

        The text is the reason why a plan with devices of other hosts runs its splits from here.
        """
        devices = parts.placement.devices
        if parts.options.partition is not None or self._exchange is None:
            return None, ""
        if parts.memory is not None and any(one.site is not None for one in devices):
            return None, "it uses reserved memory"
        try:
            return partitions_of(parts.known.graph, parts.schedule, devices), ""
        except UnsupportedError as why:
            return None, why.message

    def _scheduled(self, parts: PlanParts, exchanging: Exchanging | None, why_whole: str) -> list[Plan]:
        """The copies of a plan whose splits this process runs."""
        share = parts.memory.share if parts.memory is not None else lambda _: NOTHING
        resources = RunResources(parts.precedences(), self._device_locks, parts.placement.memories, share)
        plans: list[Plan] = []
        try:
            for _ in range(parts.options.pipeline):
                made = LocalMultiPlan(
                    parts.known.graph,
                    parts.schedule,
                    parts.placement.devices,
                    parts.bindings,
                    device_options(parts.options),
                    resources,
                    exchanging,
                )
                made.why_whole = why_whole
                plans.append(made)
        except BaseException:
            for plan in plans:
                plan.free()
            raise
        return plans

    def _pooled(self, parts: PlanParts, partitions: Partitions) -> list[Plan]:
        """The copies of a plan over several hosts."""
        assert self._exchange is not None
        blueprint = Blueprint(
            parts.known.graph,
            parts.schedule,
            parts.placement.memories,
            {**parts.bindings.weights, **parts.bindings.variables},
            device_options(parts.options),
            parts.options.pipeline,
            self._exchange,
            partial(self._own, parts, parts.precedences()),
        )
        pooled = Pooled(blueprint, partitions)
        return [DistributedPlan(pooled, copy) for copy in range(parts.options.pipeline)]

    def _own(
        self,
        parts: PlanParts,
        precedences: Precedences | None,
        graph: Graph,
        schedule: Schedule,
        bindings: LeafBindings,
        exchanging: Exchanging,
    ) -> LocalMultiPlan:
        """The partition of this process."""
        resources = RunResources(precedences, self._device_locks, parts.placement.memories)
        devices, options = parts.placement.devices, device_options(parts.options)
        return LocalMultiPlan(graph, schedule, devices, bindings, options, resources, exchanging)

    def _exchanging(self, options: PlanOptions) -> Exchanging | None:
        """Open the edges of a partition. Raises HandleExistsError, UnsupportedError."""
        if (partition := options.partition) is None:
            return None
        if self._exchange is None:
            raise UnsupportedError("this server exchanges no values with other daemons")
        return Exchanging.open(self._exchange, partition, options.pipeline)


def _loaded(parts: PlanParts, plans: Sequence[Plan]) -> LoadedPlan:
    main = parts.placement.main
    return LoadedPlan(plans, main, divided=parts.known.divided, recorder=parts.recorder)
