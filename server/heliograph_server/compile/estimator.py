"""Estimates of graphs' memory on devices, and reservations of memory for plans."""

from __future__ import annotations

import threading
from dataclasses import replace

from heliograph_backends.contract import Device
from heliograph_proto.graph import Graph, LeafKind, validate
from heliograph_proto.plans import (
    EstimateRequest,
    PlanEstimate,
    PlanOptions,
    ReserveRequest,
    SplitEstimate,
)
from heliograph_server.compile.placement import Placement, Placer, device_options
from heliograph_server.compile.plan_cache import KnownGraph
from heliograph_server.compile.plan_memory import alone, checked, shares
from heliograph_server.compile.renaming import renamed
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.reservation import MemoryReservation, Need, needs_of
from heliograph_server.resources.checks import check_pipeline
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import NOTHING_BOUND, ReservationHandle
from heliograph_server.session.protocol.plan_state import PlanState


class Estimator:
    """The estimates and reservations of one session. `busy` is held while a graph is compiled."""

    def __init__(
        self,
        state: PlanState,
        lock: threading.RLock,
        busy: threading.Lock,
        services: SessionServices,
        placer: Placer,
    ) -> None:
        self._state = state
        #: Guards the state.
        self._lock = lock
        self._busy = busy
        self._limits = services.limits
        self._devices = services.devices
        self._room = services.room
        self._holding = services.holding
        self._keeps_requests = services.keeps_requests
        self._placer = placer

    # Estimates

    def estimate(self, request: EstimateRequest) -> PlanEstimate:
        """Estimate a plan's memory. Raises the errors of PlanService.Estimate."""
        options = request.options
        graph, placement = self._find(request.graph, options)
        if placement.schedule is None:
            return alone(graph, placement, device_options(options))
        found = shares(graph, placement, placement.schedule, device_options(options), options.pipeline)
        return PlanEstimate(
            device=placement.main.name,
            compute_bytes=tuple(size for one in found for size in one.compute_bytes),
            weights_bytes=checked(sum(one.weights_bytes for one in found)),
            variables_bytes=checked(sum(one.variables_bytes for one in found)),
            extra_bytes=sum(one.extra_bytes for one in found),
            devices=found,
            splits=tuple(
                SplitEstimate(
                    placement.devices[one.device].name,
                    one.nodes,
                    sum(copy.size_bytes for copy in one.copies),
                )
                for one in placement.schedule.splits
            ),
        )

    def _find(self, graph: Graph, options: PlanOptions) -> tuple[Graph, Placement]:
        """The validated graph and its placement.

        Its weights need not be uploaded, and it is placed as a whole, not as a partition.
        """
        check_pipeline(options.pipeline)
        options = renamed(options, self._devices.names.now)
        weights = frozenset(n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.WEIGHT)
        known = KnownGraph(validate(graph, self._limits, bound=weights))
        with self._lock:
            lies = self._state.devices_of(known.graph, NOTHING_BOUND)
        return known.graph, self._placer.find(known, replace(options, partition=None), lies)

    # Reservations

    def reserve(self, request: ReserveRequest) -> dict[str, int]:
        """Reserve memory, and return bytes by device. Raises the errors of PlanService.Reserve."""
        with self._busy:
            # Names change under it. The request is kept, and its names are those of now.
            request = replace(request, options=renamed(request.options, self._devices.names.now))
            with self._lock:
                self._state.hold_number(request.reservation, ReservationHandle)
            try:
                made = self._room.for_work(lambda: self._allocate(request))
                self._holding.charge(sum(made.sizes.values()), made)
                try:
                    with self._lock:
                        added = self._state.add_reservation(request.reservation, made)
                        added.request = request if self._keeps_requests else None
                except BaseException:
                    made.free()
                    raise
            finally:
                with self._lock:
                    self._state.handles.give_up(request.reservation)
        return made.sizes

    def again(self, reservation: ReservationHandle, options: PlanOptions) -> ReservationHandle:
        """Reserve memory once more, with other options, under no number.

        The caller holds `busy`. Raises the errors of PlanService.Reserve.
        """
        assert reservation.request is not None
        request = replace(reservation.request, options=options)
        made = self._room.for_work(lambda: self._allocate(request))
        self._holding.charge(sum(made.sizes.values()), made)
        with self._lock:
            return self._state.add_unnumbered_reservation(made, request)

    def _allocate(self, request: ReserveRequest) -> MemoryReservation:
        needs = self._needs(request)
        try:
            return MemoryReservation(needs)
        except Exception as error:
            raise typed(error, "reserving memory") from error

    def _needs(self, request: ReserveRequest) -> dict[Device, Need]:
        options = request.options
        if request.graph is None:
            device = self._devices.device(options.devices[0] if options.devices else "")
            return {device: Need(request.block_bytes)}
        graph, placement = self._find(request.graph, replace(options, pipeline=1))
        return needs_of(graph, placement.devices, placement.schedule, device_options(options))
