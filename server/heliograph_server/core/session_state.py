"""What a session holds, and how it is given back."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph_proto.errors import LimitExceededError
from heliograph_proto.limits import Limits
from heliograph_server.core.handles import (
    BufferHandle,
    Handle,
    HandleTable,
    Lane,
    PlanHandle,
    ReservationHandle,
    Storage,
    StreamHandle,
    TensorHandle,
    let_go_of,
)
from heliograph_server.core.tasks import (
    CloseLane,
    Instruction,
    OpenLane,
    ReleasePlan,
    ReleaseReservation,
    ReleaseStorage,
    ReleaseTensor,
)
from heliograph_server.core.turns import Turns

#: The most lanes of a session, over all its streams and pipelines; each may cost a thread.
MAX_LANES = 256


class SessionState:
    """Handles and what they stand for: storages, plans, reservations, variables, lanes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.handles = HandleTable(limits)
        #: Names of variables to their handles; they live as long as the session.
        self.variables: dict[str, tuple[int, TensorHandle]] = {}
        self._plans: dict[PlanHandle, None] = {}
        self._reservations: dict[ReservationHandle, None] = {}
        self._storages: dict[Storage, None] = {}
        self._lanes: dict[Lane, None] = {}
        self._instructions: list[Instruction] = []

    def _check_lanes(self, turns: Turns) -> None:
        """Raises LimitExceededError where the lanes of a plan would be too many."""
        wanted = len(turns.lanes) if turns.holders == 0 else 0
        if len(self._lanes) + wanted > MAX_LANES:
            raise LimitExceededError(
                f"the session's streams and pipelines would take {len(self._lanes) + wanted} threads; this "
                f"server gives it {MAX_LANES}",
                advice="free plans with a pipeline, or compile with a smaller one",
            )

    def _open_lane(self, lane: Lane) -> None:
        self._lanes[lane] = None
        self._instructions.append(OpenLane(lane))

    def _close_lanes(self, turns: Turns) -> None:
        """Of turns that no plan runs by any more."""
        turns.holders -= 1
        for lane in turns.lanes if turns.holders == 0 else ():
            if lane in self._lanes:
                del self._lanes[lane]
                self._instructions.append(CloseLane(lane))

    def _release_handles(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            match handle:
                case BufferHandle(parts=parts):
                    self._release_handles(parts)
                case TensorHandle(storage=Storage() as storage):
                    storage.tensors -= 1
                    if handle.is_placed and not self._leave_to_weight(handle, storage):
                        self._instructions.append(ReleaseTensor(handle))
                    if storage.tensors == 0:
                        self._storages.pop(storage, None)
                        self._instructions.append(ReleaseStorage(storage))
                case PlanHandle() if handle in self._plans:
                    del self._plans[handle]
                    self._instructions.append(ReleasePlan(handle))
                    self._close_lanes(handle.turns)
                    let_go_of(handle.bound)
                    self._release_handles(handle.bound.tensors.values())
                case ReservationHandle() if handle in self._reservations:
                    del self._reservations[handle]
                    self._instructions.append(ReleaseReservation(handle))
                case StreamHandle(lane=lane) if lane in self._lanes:
                    del self._lanes[lane]
                    self._instructions.append(CloseLane(lane))

    @staticmethod
    def _leave_to_weight(handle: TensorHandle, storage: Storage) -> bool:
        """Whether the device is to know of a tensor as long as a plan has it as a weight: then that is up to
        the plan."""
        heir = next(iter(storage.frozen_at.get(handle.span, ())), None)
        if heir is not None:
            heir.is_placed = True
        return heir is not None

    def _release_everything(self) -> None:
        """Nothing runs any more."""
        self._instructions.extend(ReleasePlan(plan) for plan in self._plans)
        self._instructions.extend(ReleaseReservation(one) for one in self._reservations)
        tensors = (one for one in self.handles.values() if isinstance(one, TensorHandle) and one.is_placed)
        self._instructions.extend(map(ReleaseTensor, tensors))
        self._instructions.extend(ReleaseStorage(storage) for storage in self._storages)
        self._instructions.extend(CloseLane(lane) for lane in self._lanes)
        for table in (
            self._plans,
            self._reservations,
            self._storages,
            self._lanes,
            self.variables,
        ):
            table.clear()
        self.handles.clear()
