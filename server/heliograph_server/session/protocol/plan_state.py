"""Plans, reservations, variables, and the tensors that are leaves of plans: what compiling changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import check_leaf, check_weight, overlap, storage_of
from heliograph_server.resources.handles import (
    BoundLeaves,
    BufferHandle,
    Handle,
    HandleStorage,
    HandleTable,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
    hold_leaves,
    layout,
    let_go_of,
)
from heliograph_server.resources.run_slots import RunSlots
from heliograph_server.session.protocol.instructions import Instruction, ReleasePlan, ReleaseReservation
from heliograph_server.session.protocol.resource_state import ResourceState


class PlanState:
    """The plans, reservations and variables of one session, and how every kind of handle is given back."""

    def __init__(
        self, handles: HandleTable, resources: ResourceState, instructions: list[Instruction]
    ) -> None:
        self.handles = handles
        self._resources = resources
        self._instructions = instructions
        #: Why the session ended.
        self.closed: HeliographError | None = None
        #: Names of variables to their handles; they live as long as the session.
        self.variables: dict[str, tuple[int, TensorHandle]] = {}
        #: Those that have a handle, or are being run.
        self.plans: dict[PlanHandle, None] = {}
        self._reservations: dict[ReservationHandle, None] = {}
        #: Taken out of the table, to be freed when their runs are over.
        self._to_release: list[PlanHandle | ReservationHandle] = []
        #: Variables that were made so far.
        self._variables_made = 0

    def __repr__(self) -> str:
        return f"<PlanState {len(self.plans)} plans, {len(self.variables)} variables>"

    def _check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    @property
    def loaded(self) -> list[Any]:
        """The runtime's objects of the plans."""
        return [one.plan for one in self.plans]

    # Variables and leaves

    def add_variable(self, name: str, type: TensorType, device: str, buffer: object) -> int:
        """A variable and its server-made handle. Raises LimitExceededError, or why the session closed."""
        self._check_open()
        self.handles.check_room(TensorHandle)
        self._variables_made += 1
        number = c.SERVER_HANDLE | self._variables_made
        tensor = TensorHandle(layout(type), HandleStorage(type.nbytes, device, buffer, is_charged=True))
        self.handles.add(number, tensor)
        self.variables[name] = (number, tensor)
        self._resources.storages[storage_of(tensor)] = None
        return number

    def devices_of(self, graph: Graph, bound: BoundLeaves) -> dict[int, str]:
        """The names of the devices of leaves that lie somewhere already."""
        found: dict[int, str] = {}
        for number, leaf in enumerate(graph.leaves):
            known = self.variables.get(leaf.name) if leaf.kind is LeafKind.VARIABLE else None
            tensor = bound.tensors.get(number) or (known and known[1])
            if tensor is not None and tensor.storage is not None:
                found[number] = tensor.storage.device
        return found

    def bind_leaves(self, leaves: Mapping[int, tuple[int, TensorType]], weights: Set[int]) -> BoundLeaves:
        """Holds tensors as leaves of a plan to be: handle and type by leaf; those of weights are frozen.

        Raises UnknownHandleError, InvalidArgumentError, or the error of what was to write a weight.
        """
        self._check_open()
        found = {
            leaf: self._bindable(number, type, is_weight=leaf in weights)
            for leaf, (number, type) in leaves.items()
        }
        return hold_leaves(found, weights, {leaf: number for leaf, (number, _) in leaves.items()})

    def _bindable(self, number: int, type: TensorType, *, is_weight: bool) -> TensorHandle:
        tensor = self.handles.get(number, TensorHandle)
        check_leaf(tensor, type, number)
        if is_weight:
            check_weight(tensor, number)
            self._check_not_assigned(tensor, number)
        return tensor

    def _check_not_assigned(self, tensor: TensorHandle, number: int) -> None:
        if any(overlap(tensor, variable) for plan in self.plans for variable in plan.assigned):
            raise InvalidArgumentError(
                f"tensor {number} is the variable of a plan that assigns it; a weight does not change",
                advice="copy it, or bind it as a variable",
            )

    def release_leaves(self, bound: BoundLeaves) -> None:
        """Lets go of tensors that a plan held."""
        let_go_of(bound)
        self.release(bound.tensors.values())

    # Plans and reservations

    def hold_number(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Holds the number of a plan, or of a reservation, to be. Raises what it would be refused with."""
        self._check_open()
        self.handles.check_new(number, kind)
        self.handles.reserve(number)

    def add_reservation(self, number: int, reservation: object) -> ReservationHandle:
        """Memory for plans, under a number that was held. Raises why the session closed."""
        self._check_open()
        self.handles.give_up(number)
        self.handles.check_new(number, ReservationHandle)
        made = ReservationHandle(reservation)
        self.handles.add(number, made)
        self._reservations[made] = None
        return made

    def add_plan(self, number: int, plan: PlanHandle) -> None:
        """A compiled plan, under a number that was held. Its leaves are held as long as it is. Raises
        LimitExceededError, or why the session closed."""
        self._check_open()
        self.handles.give_up(number)
        self.handles.check_new(number, PlanHandle)
        slots = plan.slots
        self._resources.check_queues(len(slots.queues) if slots.holders == 0 else 0)
        plan.check_there()
        self.handles.add(number, plan)
        self.plans[plan] = None
        if slots.holders == 0:
            for queue in slots.queues:
                # Of a plan that was kept it may have failed in another life.
                queue.error = None
                self._resources.open_queue(queue)
        slots.holders += 1

    def take_plan(self, number: int) -> PlanHandle:
        """Takes a plan out of the table, so that no command can name it. Raises UnknownHandleError."""
        plan = self.handles.get(number, PlanHandle)
        plan.check_there()
        self.handles.remove(number)
        self.handles.reserve(number)
        return plan

    def put_plan_back(self, number: int, plan: PlanHandle) -> None:
        """Undoes `take_plan`."""
        self.handles.give_up(number)
        if self.closed is None:
            self.handles.add(number, plan)

    def discard(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Frees what was made for a client that left meanwhile, before any command could name it."""
        found = self.handles.peek(number, PlanHandle) or self.handles.peek(number, ReservationHandle)
        if isinstance(found, kind):
            self.handles.remove(number)
            found.end()
            self.release_plan(found)

    # How things are given back

    def release_plan(self, plan: PlanHandle | ReservationHandle) -> None:
        """Frees a plan, or the memory of several, that is in the table no more, once its runs are over."""
        if plan.slots.is_idle:
            self.release((plan,))
        else:
            self._to_release.append(plan)

    def runs_ended(self, slots: RunSlots) -> None:
        """The last run in these slots is over."""
        ended = [plan for plan in self._to_release if plan.slots is slots]
        self._to_release = [plan for plan in self._to_release if plan.slots is not slots]
        self.release(ended)

    def release(self, handles: Iterable[Handle]) -> None:
        """Gives back what handles stood for. They are in the table no more, and nothing uses them."""
        for handle in handles:
            match handle:
                case BufferHandle(parts=parts):
                    self.release(parts)
                case TensorHandle():
                    self._resources.release_tensor(handle)
                case PlanHandle() if handle in self.plans:
                    self._release_plan(handle)
                case ReservationHandle() if handle in self._reservations:
                    del self._reservations[handle]
                    self._instructions.append(ReleaseReservation(handle))
                case StreamHandle(queue=queue):
                    self._resources.close_queue(queue)

    def _release_plan(self, plan: PlanHandle) -> None:
        del self.plans[plan]
        self._instructions.append(ReleasePlan(plan))
        plan.slots.holders -= 1
        if plan.slots.holders == 0:
            for queue in plan.slots.queues:
                self._resources.close_queue(queue)
        self.release_leaves(plan.bound)

    def release_all(self) -> None:
        """Gives back everything. Nothing runs any more."""
        self._instructions.extend(map(ReleasePlan, self.plans))
        self._instructions.extend(map(ReleaseReservation, self._reservations))
        self._resources.release_all(self.handles.values())
        self.plans.clear()
        self._reservations.clear()
        self.variables.clear()
        self.handles.clear()
