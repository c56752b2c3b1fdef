"""Plans, reservations, variables and tensors bound to leaves: the state of compiling. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from difflib import get_close_matches
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, UnknownHandleError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import ReserveRequest
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
from heliograph_server.session.protocol.instructions import (
    ForgetVariable,
    Instruction,
    ReleasePlan,
    ReleaseReservation,
)
from heliograph_server.session.protocol.resource_state import ResourceState


class PlanState:
    """Plans, reservations and variables of a session, and the release of every handle."""

    def __init__(
        self, handles: HandleTable, resources: ResourceState, instructions: list[Instruction]
    ) -> None:
        self.handles = handles
        self._resources = resources
        self._instructions = instructions
        #: The error that closed the session.
        self.closed: HeliographError | None = None
        #: Variables by name: handle number and handle. They live until they are freed by name, or as
        #: long as the session.
        self.variables: dict[str, tuple[int, TensorHandle]] = {}
        #: Plans that have a handle, or are running.
        self.plans: dict[PlanHandle, None] = {}
        self._reservations: dict[ReservationHandle, None] = {}
        #: Removed from the handle table, to be freed when their runs have ended.
        self._to_release: list[PlanHandle | ReservationHandle] = []
        #: Plans out of the handle table that an update replaces or puts back.
        self._taken: dict[PlanHandle, None] = {}
        #: Variables that a plan is being compiled for, and the new ones of them, with those of lost
        #: devices that they replace.
        self._compiling: set[str] = set()
        self._new_variables: dict[str, tuple[int, TensorHandle] | None] = {}
        #: Variables created so far.
        self._variables_made = 0

    def __repr__(self) -> str:
        return f"<PlanState {len(self.plans)} plans, {len(self.variables)} variables>"

    def _check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    @property
    def loaded(self) -> list[Any]:
        """The loaded plans of the runtime."""
        return [one.plan for one in self.plans]

    # Variables and leaves

    def add_variable(self, name: str, type: TensorType, device: str, buffer: object) -> int:
        """Add a variable, and return its handle's number, which the server chooses.

        Raises LimitExceededError, or the error that closed the session.
        """
        self._check_open()
        self.handles.check_room(TensorHandle)
        self._variables_made += 1
        number = c.SERVER_HANDLE | self._variables_made
        tensor = TensorHandle(layout(type), HandleStorage(type.nbytes, device, buffer, is_charged=True))
        self.handles.add(number, tensor)
        self._new_variables[name] = self.variables.get(name)
        self.variables[name] = (number, tensor)
        self._resources.storages[storage_of(tensor)] = None
        return number

    @property
    def variables_made(self) -> int:
        """The variables created so far, from which the handle of the next one follows."""
        return self._variables_made

    def restore_variables(self, made: int, variables: Mapping[str, tuple[int, TensorHandle]]) -> None:
        """Name tensors of a restored session, which are in the handle table already."""
        self._variables_made = made
        self.variables.update(variables)

    def bind_variable(self, name: str) -> TensorHandle | None:
        """Return a variable for a plan that is being compiled, until `compiled`; None if there is
        none of this name."""
        number_and_handle = self.variables.get(name)
        if number_and_handle is None:
            return None
        self._compiling.add(name)
        return number_and_handle[1]

    def is_new(self, name: str) -> bool:
        """Return whether the compile that is going on created a variable."""
        return name in self._new_variables

    def compiled(self, *, has_failed: bool) -> None:
        """End a compile. The variables that a failed one made are freed."""
        made, self._new_variables = self._new_variables, {}
        self._compiling.clear()
        for name, replaced in made.items() if has_failed and self.closed is None else ():
            variable = self._remove_variable(name)
            if replaced is not None:
                self.variables[name] = replaced
            self.release((variable,))

    def take_variable(self, name: str) -> TensorHandle:
        """Remove a variable, before it is freed. Raises UnknownHandleError, InvalidArgumentError."""
        if name not in self.variables:
            near = get_close_matches(name[:64], self.variables, 1)
            raise UnknownHandleError(
                f"the session has no variable {name[:64]!r}",
                advice=f"did you mean {near[0]!r}?" if near else "plan.variables has the names",
            )
        _, variable = self.variables[name]
        plans = [one for one in self.handles.values() if isinstance(one, PlanHandle)]
        users = sum(variable in (*plan.read, *plan.assigned) for plan in (*plans, *self._taken))
        if users or name in self._compiling:
            whose = f"{users} plan{'s' if users > 1 else ''}" if users else "a plan that is being compiled"
            raise InvalidArgumentError(
                f"variable {name[:64]!r} is used by {whose}", advice="free its plans first: plan.free()"
            )
        return self._remove_variable(name)

    def _remove_variable(self, name: str) -> TensorHandle:
        number, variable = self.variables.pop(name)
        self.handles.remove_any(number)
        self._instructions.append(ForgetVariable(name))
        return variable

    def devices_of(self, graph: Graph, bound: BoundLeaves) -> dict[int, str]:
        """Return the devices, by name, of the leaves that have memory already."""
        found: dict[int, str] = {}
        for number, leaf in enumerate(graph.leaves):
            known = self.variables.get(leaf.name) if leaf.kind is LeafKind.VARIABLE else None
            tensor = bound.tensors.get(number) or (known and known[1])
            if tensor is not None and tensor.storage is not None:
                found[number] = tensor.storage.device
        return found

    def bind_leaves(self, graph: Graph, handles: Mapping[int, int]) -> BoundLeaves:
        """Hold tensors as leaves of a future plan, given their handles by leaf.

        Raises UnknownHandleError, InvalidArgumentError, or the error of a weight's writer.
        """
        self._check_open()
        tensors = {}
        weights = {leaf for leaf in handles if graph.leaves[leaf].kind is LeafKind.WEIGHT}
        for leaf, number in handles.items():
            tensors[leaf] = self.handles.get(number, TensorHandle)
            check_leaf(tensors[leaf], graph.leaves[leaf].type, number)
            if leaf in weights:
                check_weight(tensors[leaf], number)
        self._check_assigned(graph, tensors, weights)
        return hold_leaves(tensors, weights, handles)

    def hold_weight(self, number: int, type: TensorType) -> BoundLeaves:
        """Hold one tensor as a weight. Raises as `bind_leaves`."""
        self._check_open()
        tensor = self.handles.get(number, TensorHandle)
        check_leaf(tensor, type, number)
        check_weight(tensor, number)
        return hold_leaves({0: tensor}, {0}, {0: number})

    def _check_assigned(self, graph: Graph, tensors: Mapping[int, TensorHandle], weights: Set[int]) -> None:
        """Raise InvalidArgumentError for a weight whose bytes a run of the graph would assign."""
        for leaf in {node.operands[0] for node in graph.nodes if node.op == "assign"} if weights else ():
            name = graph.leaves[leaf].name
            variable = tensors.get(leaf) or self.variables.get(name, (0, None))[1]
            for weight in weights:
                if variable is not None and overlap(tensors[weight], variable):
                    raise InvalidArgumentError(
                        f"the graph assigns variable {name!r}, which shares bytes with its weight "
                        f"{graph.leaves[weight].name!r}; a weight does not change during a run",
                        advice="copy one of them, or use the variable in both places",
                    )

    def release_leaves(self, bound: BoundLeaves) -> None:
        """Release the tensors that a plan held."""
        let_go_of(bound)
        self.release(bound.tensors.values())

    # Plans and reservations

    def hold_number(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Reserve a number for a plan or reservation. Raises the error that refuses it."""
        self._check_open()
        self.handles.check_new(number, kind)
        self.handles.reserve(number)

    def add_reservation(self, number: int, reservation: object) -> ReservationHandle:
        """Add memory for plans under a held number. Raises the error that closed the session."""
        self._check_open()
        self.handles.give_up(number)
        self.handles.check_new(number, ReservationHandle)
        made = self.add_unnumbered_reservation(reservation)
        self.handles.add(number, made)
        return made

    def add_unnumbered_reservation(
        self, reservation: object, request: ReserveRequest | None = None
    ) -> ReservationHandle:
        """Add memory that is in no table, for `exchange_reservations`."""
        made = ReservationHandle(reservation, request=request)
        self._reservations[made] = None
        return made

    def add_plan(self, number: int, plan: PlanHandle) -> None:
        """Add a compiled plan under a held number. The plan holds its leaves.

        Raises LimitExceededError, or the error that closed the session.
        """
        self._check_open()
        self.handles.give_up(number)
        self.handles.check_new(number, PlanHandle)
        slots = plan.slots
        self._resources.check_queues(len(slots.queues) if slots.holders == 0 else 0)
        plan.check_there()
        self.handles.add(number, plan)
        self.add_unnumbered(plan)

    def add_unnumbered(self, plan: PlanHandle) -> None:
        """Add a plan that is in no table, for `exchange`. Raises the error that closed the
        session."""
        self._check_open()
        slots = plan.slots
        self.plans[plan] = None
        if slots.holders == 0:
            for queue in slots.queues:
                # The queue of a plan from the cache may have failed before.
                queue.error = None
                self._resources.open_queue(queue)
        slots.holders += 1

    def exchange(self, plan: PlanHandle, other: PlanHandle) -> None:
        """Let two plans of one graph change places: each has the other's devices afterwards."""
        for name in ("device", "plan", "slots", "read", "assigned", "bound", "weights", "request"):
            mine, theirs = getattr(plan, name), getattr(other, name)
            setattr(plan, name, theirs)
            setattr(other, name, mine)
        for one in (plan, other):
            one.storages = one.written_storages = ()

    def exchange_reservations(self, one: ReservationHandle, other: ReservationHandle) -> None:
        """Let two reservations change places, after their plans have."""
        for name in ("reservation", "slots", "request"):
            mine, theirs = getattr(one, name), getattr(other, name)
            setattr(one, name, theirs)
            setattr(other, name, mine)

    def take_plan(self, number: int) -> PlanHandle:
        """Remove a plan from the handle table, before it is freed. Raises UnknownHandleError."""
        plan = self.handles.get(number, PlanHandle)
        plan.check_there()
        self.handles.remove(number)
        self.handles.reserve(number)
        self._taken[plan] = None
        return plan

    def let_go_of_taken(self, plan: PlanHandle) -> None:
        """Release a plan that `take_plan` returned, once its runs have ended."""
        self._taken.pop(plan, None)
        self.release_plan(plan)

    def put_plan_back(self, number: int, plan: PlanHandle) -> None:
        """Undo `take_plan`."""
        self._taken.pop(plan, None)
        self.handles.give_up(number)
        if self.closed is None:
            self.handles.add(number, plan)

    def discard(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Free a plan or reservation whose client left before it received the handle."""
        found = self.handles.peek(number, PlanHandle) or self.handles.peek(number, ReservationHandle)
        if isinstance(found, kind):
            self.handles.remove(number)
            found.end()
            self.release_plan(found)

    # Release

    def release_plan(self, plan: PlanHandle | ReservationHandle) -> None:
        """Free a plan or reservation, already out of the handle table, once its runs have ended."""
        if plan.slots.is_idle:
            self.release((plan,))
        else:
            self._to_release.append(plan)

    def runs_ended(self, slots: RunSlots) -> None:
        """Release the plans that waited for the last run in these slots."""
        if self._to_release:
            ended = [plan for plan in self._to_release if plan.slots is slots]
            self._to_release = [plan for plan in self._to_release if plan.slots is not slots]
            self.release(ended)

    def release(self, handles: Iterable[Handle]) -> None:
        """Release the objects of handles that are out of the handle table and unused."""
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
        """Release everything. Nothing runs any more."""
        self._instructions.extend(map(ReleasePlan, self.plans))
        self._instructions.extend(map(ReleaseReservation, self._reservations))
        self._resources.release_all(self.handles.values())
        self.plans.clear()
        self._reservations.clear()
        self._taken.clear()
        self.variables.clear()
        self.handles.clear()
