"""The release of a session's objects on its devices. Any thread, under the session's lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heliograph_server.compile.plan_cache import KnownPlans
from heliograph_server.plans.reservation import MemoryReservation
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.session.protocol.instructions import (
    ReleasePlan,
    ReleaseReservation,
    ReleaseStorage,
    ReleaseTensor,
)


class Releases:
    """Carries out the release instructions. `by_instruction` maps each to its method."""

    def __init__(self, plans: KnownPlans, holding: Holding) -> None:
        self._plans = plans
        self._holding = holding
        self.by_instruction: Mapping[type, Callable[[Any], None]] = {
            ReleaseTensor: self._release_tensor,
            ReleaseStorage: self._release_storage,
            ReleasePlan: self._release_plan,
            ReleaseReservation: self._release_reservation,
        }

    def _release_tensor(self, instruction: ReleaseTensor) -> None:
        tensor = instruction.tensor
        if tensor.storage is not None and tensor.storage.buffer is not None:
            placed = tensor.placed
            placed.buffer.free_tensor(placed)

    def _release_storage(self, instruction: ReleaseStorage) -> None:
        storage = instruction.storage
        buffer, storage.buffer = storage.buffer, None
        if buffer is not None:
            buffer.free()
        if storage.is_charged:
            storage.is_charged = False
            self._holding.give(QuotaKind.MEMORY, storage.size_bytes)

    def _release_plan(self, instruction: ReleasePlan) -> None:
        self._holding.give(QuotaKind.PLANS)
        self._plans.release(instruction.plan.plan)

    def _release_reservation(self, instruction: ReleaseReservation) -> None:
        reservation: MemoryReservation = instruction.reservation.reservation
        self._plans.end(reservation)
        reservation.free()
