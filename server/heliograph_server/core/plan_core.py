"""Plans, variables, and the tensors that are leaves of plans: the part of a session's protocol that
compiling changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set

from heliograph_proto import commands as c
from heliograph_proto.description import Port
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType
from heliograph_server.core.checks import check_leaf, check_weight, overlap, storage_of
from heliograph_server.core.handles import (
    NOTHING_BOUND,
    BoundLeaves,
    PlanHandle,
    ReservationHandle,
    Storage,
    TensorHandle,
    hold_leaves,
    layout,
    let_go_of,
)
from heliograph_server.core.ordering import Entry, wait_for_writers
from heliograph_server.core.session_state import SessionState
from heliograph_server.core.turns import Turns


class PlanCore(SessionState, ABC):
    """What of a session's state plans are made of. The rest is `SessionCore`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: Why the session ended.
        self.closed: HeliographError | None = None
        #: Taken out of the table, to be freed when their runs are over.
        self._to_release: list[PlanHandle | ReservationHandle] = []
        #: How many waited so far.
        self._waiters = 0
        #: Variables that were made so far.
        self._variables_made = 0

    @abstractmethod
    def _settle(self) -> None:
        """Lets everything that is ready have its turn."""

    def add_variable(self, name: str, type: TensorType, device: str, buffer: object) -> int:
        """A variable and its server-made handle. Raises LimitExceededError, or why the session closed."""
        if self.closed is not None:
            raise self.closed
        self.handles.check_room(TensorHandle)
        self._variables_made += 1
        number = c.SERVER_HANDLE | self._variables_made
        tensor = TensorHandle(layout(type), Storage(type.nbytes, device, buffer, is_charged=True))
        self.handles.add(number, tensor)
        self.variables[name] = (number, tensor)
        self._storages[storage_of(tensor)] = None
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

    def hold_number(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Holds the number of a plan, or of a reservation, to be. Raises what it would be refused with."""
        if self.closed is not None:
            raise self.closed
        self.handles.check_new(number, kind)
        self.handles.reserve(number)

    def add_reservation(self, number: int, reservation: object) -> ReservationHandle:
        """Memory for plans, under a number that was held. Raises why the session closed."""
        if self.closed is not None:
            raise self.closed
        self.handles.give_up(number)
        self.handles.check_new(number, ReservationHandle)
        made = ReservationHandle(reservation)
        self.handles.add(number, made)
        self._reservations[made] = None
        return made

    def discard(self, number: int, kind: type[PlanHandle] | type[ReservationHandle]) -> None:
        """Frees what was made for a client that left meanwhile, before any command could name it."""
        found = self.handles.peek(number, PlanHandle) or self.handles.peek(number, ReservationHandle)
        if isinstance(found, kind):
            self.handles.remove(number)
            found.end()
            self.release_plan(found)
        self._settle()

    def add_plan(
        self,
        number: int,
        device: str,
        ports: tuple[Sequence[Port], Sequence[Port]],
        variables: tuple[Iterable[TensorHandle], Iterable[TensorHandle]],
        plan: object,
        bound: BoundLeaves = NOTHING_BOUND,
        turns: Turns | None = None,
        tapped_bytes: int = 0,
        reservation: ReservationHandle | None = None,
        is_portion: bool = False,
    ) -> None:
        """A compiled plan: its inputs and outputs, the variables that it reads and assigns, the tensors
        that are its leaves, which it holds from here on, the turns by which it runs (None: its own, one at a
        time), how much each run tells of nodes, the reservation in which it lies, if any, and whether it is
        a portion of a graph on several hosts."""
        if self.closed is not None:
            raise self.closed
        self.handles.give_up(number)
        self.handles.check_new(number, PlanHandle)
        inputs, outputs = map(tuple, ports)
        read, assigned = map(tuple, variables)
        turns = turns or Turns()
        self._check_lanes(turns)
        held = bound, plan, turns, tapped_bytes, reservation, 0 if is_portion else None
        made = PlanHandle(device, inputs, outputs, read, assigned, *held)
        made.check_there()
        self.handles.add(number, made)
        self._plans[made] = None
        self._hold_turns(made.turns)

    def bind_leaves(self, leaves: Mapping[int, tuple[int, TensorType]], weights: Set[int]) -> BoundLeaves:
        """Holds tensors as leaves of a plan to be: handle and type by leaf; those of weights are frozen.

        Raises UnknownHandleError, InvalidArgumentError, or the error of what was to write a weight.
        """
        if self.closed is not None:
            raise self.closed
        found = {leaf: self._bindable(leaf in weights, *what) for leaf, what in leaves.items()}
        return hold_leaves(found, weights, {leaf: number for leaf, (number, _) in leaves.items()})

    def await_writers(self, numbers: Iterable[int]) -> int:
        """Under which number `Resume` comes when the bytes of tensors are there; 0: they are, or never will.

        For bytes that exist already, commands that write them anew are waited for as well.
        """
        waiting = Entry(0)
        found = (self.handles.peek(number, TensorHandle) for number in numbers)
        wait_for_writers(waiting, [one for one in found if one is not None])
        if waiting.blockers == 0:
            return 0
        self._waiters += 1
        waiting.waiter = self._waiters
        return waiting.waiter

    def _bindable(self, is_weight: bool, number: int, type: TensorType) -> TensorHandle:
        tensor = self.handles.get(number, TensorHandle)
        check_leaf(tensor, type, number)
        if is_weight:
            check_weight(tensor, number)
            self._check_nobody_assigns(tensor, number)
        return tensor

    def _check_nobody_assigns(self, tensor: TensorHandle, number: int) -> None:
        if any(overlap(tensor, variable) for plan in self._plans for variable in plan.assigned):
            raise InvalidArgumentError(
                f"tensor {number} is the variable of a plan that assigns it; a weight does not change",
                advice="copy it, or bind it as a variable",
            )

    def release_leaves(self, bound: BoundLeaves) -> None:
        """Lets go of tensors that a plan held."""
        let_go_of(bound)
        self._release_handles(bound.tensors.values())
        self._settle()

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

    def release_plan(self, plan: PlanHandle | ReservationHandle) -> None:
        """Frees a plan, or the memory of several, that is in the table no more, once its runs are over."""
        if plan.turns.is_idle:
            self._release_handles((plan,))
        else:
            self._to_release.append(plan)
        self._settle()

    def runs_ended(self, turns: Turns) -> None:
        """The last run by these turns is over."""
        ended = [plan for plan in self._to_release if plan.turns is turns]
        self._to_release = [plan for plan in self._to_release if plan.turns is not turns]
        self._release_handles(ended)

    def _hold_turns(self, turns: Turns) -> None:
        if turns.holders == 0:
            for lane in turns.lanes:
                # Of a plan that was kept it may have failed in another life.
                lane.error = None
                self._open_lane(lane)
        turns.holders += 1
