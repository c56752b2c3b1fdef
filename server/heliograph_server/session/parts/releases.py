"""Frees the objects of a session when its core says that nothing uses them any more. Lock held."""

from __future__ import annotations

from heliograph_backends.contract import Buffer
from heliograph_server.compile.plan_cache import KnownPlans
from heliograph_server.plans.reservation import MemoryReservation
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.session.protocol.instructions import (
    ForgetVariable,
    ReleasePlan,
    ReleaseReservation,
    ReleaseStorage,
    ReleaseTensor,
)


class Releases:
    """Carries out the releases that a core issues."""

    def __init__(self, holding: Holding, plans: KnownPlans) -> None:
        self._holding = holding
        self._plans = plans
        #: Storages with their buffers, which are kept and not freed; None: all are freed.
        self.kept: list[tuple[HandleStorage, Buffer]] | None = None

    def tensor(self, instruction: ReleaseTensor) -> None:
        """Free a tensor's state on its device."""
        tensor = instruction.tensor
        if tensor.storage is not None and tensor.storage.buffer is not None:
            placed = tensor.placed
            placed.buffer.free_tensor(placed)

    def storage(self, instruction: ReleaseStorage) -> None:
        """Free a storage's buffer, and what it was charged."""
        storage = instruction.storage
        buffer, storage.buffer = storage.buffer, None
        if buffer is not None and self.kept is not None and _is_whole(storage, buffer):
            self.kept.append((storage, buffer))
        elif buffer is not None:
            buffer.free()
        if storage.is_charged:
            storage.is_charged = False
            self._holding.give(QuotaKind.MEMORY, storage.size_bytes)

    def variable(self, instruction: ForgetVariable) -> None:
        """Forget the idle plans that use a variable."""
        self._plans.forget_variable(instruction.name)

    def plan(self, instruction: ReleasePlan) -> None:
        """Free a plan."""
        self._holding.give(QuotaKind.PLANS)
        self._plans.release(instruction.plan.plan)

    def reservation(self, instruction: ReleaseReservation) -> None:
        """Free reserved memory, with the plans in it."""
        reservation: MemoryReservation = instruction.reservation.reservation
        self._plans.end(reservation)
        reservation.free()


def _is_whole(storage: HandleStorage, buffer: Buffer) -> bool:
    """True if all bytes of a storage are known to be good."""
    is_good = storage.error is None and not storage.poisons and not storage.is_mapped
    return is_good and buffer.buffer_type.device.lost is None
