"""Caches of one session: compiled plans, and validated graphs with their schedules.

A plan is found by its key: everything that it was compiled from. Compiling it again adds a handle,
and the runs of all its handles are serial. After its last handle is freed, the plan is kept while
it is among the few most recently used, takes little memory, and no other work needs that memory or
that of its weights.

Graphs and schedules are found by content. They are immutable and hold no device memory, so they
only save time. Sessions do not share them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from heliograph_proto.graph import Graph, Leaf, LeafKind, validate
from heliograph_proto.plans import Partition, PlanOptions, Port, ReceivedGraph, RowSplit
from heliograph_proto.sessions import Limits
from heliograph_server.compile.memory_fit import ample_bytes
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.reservation import MemoryReservation
from heliograph_server.resources.handles import BoundLeaves, ReservationHandle
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.run_slots import RunSlots
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.tensor_split import Divided
from heliograph_server.weights.tenant_store import WeightUse

#: The most graphs, schedules of one graph, and bytes of graph messages in the cache. A graph takes
#: about thirty times the bytes of its message in Python.
MOST_GRAPHS, MOST_SCHEDULES, MOST_BYTES = 4, 8, 2 * 2**20


@dataclass(eq=False, slots=True, weakref_slot=True)
class KnownGraph:
    """A validated graph and its schedules."""

    graph: Graph
    #: The size of its message; 0 for one without a message, which cannot be found again.
    size_bytes: int = 0
    #: Schedules by key, each with the free memory that makes memory irrelevant.
    schedules: dict[Hashable, tuple[Schedule, int]] = field(default_factory=dict)
    #: The division of the client's graph, if this is a graph with weights split over devices.
    divided: Divided | None = None
    #: The last request to split weights, and the graph that it led to.
    _division: tuple[Mapping[int, RowSplit], KnownGraph] | None = None

    def division(self, splits: Mapping[int, RowSplit], divide: Callable[[], Divided]) -> KnownGraph:
        """Return the graph with split weights, made by `divide` now or at the last call."""
        if self._division is None or self._division[0] != splits:
            made = divide()
            growth = len(made.graph.nodes) / max(1, len(self.graph.nodes))
            self._division = splits, KnownGraph(made.graph, int(self.size_bytes * growth), divided=made)
        return self._division[1]

    @property
    def kept_bytes(self) -> int:
        """The bytes of messages for the graph and its division."""
        return self.size_bytes + (self._division[1].size_bytes if self._division else 0)

    def schedule(self, key: Hashable, free_bytes: Sequence[int]) -> Schedule | None:
        """Return the schedule of a key, unless a device has too little memory to ignore it."""
        found, ample = self.schedules.get(key, (None, 0))
        return found if min(free_bytes) >= ample else None

    def keep(self, key: Hashable, found: Schedule, free_bytes: Sequence[int], copies: int = 1) -> None:
        """Keep a schedule, unless it depends on the free memory."""
        ample = ample_bytes(self.graph, found, copies)
        if min(free_bytes) < ample:
            return
        if len(self.schedules) >= MOST_SCHEDULES:
            del self.schedules[next(iter(self.schedules))]
        self.schedules[key] = found, ample


class KnownGraphs:
    """The most recently validated graphs. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        #: Least recently used first.
        self._known: dict[Hashable, KnownGraph] = {}
        #: Also those that only a plan keeps alive.
        self._alive: WeakValueDictionary[Hashable, KnownGraph] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<KnownGraphs {len(self._known)}>"

    def validated(self, graph: Graph | ReceivedGraph, bound: Collection[int]) -> KnownGraph:
        """Return the validated graph, from the cache if possible.

        `bound` is passed to `validate`. Raises the errors of `validate`.
        """
        if isinstance(graph, Graph):
            return KnownGraph(validate(graph, self._limits, bound))
        key = graph.digest, frozenset(bound)
        with self._lock:
            found = self._alive.get(key)
            if found is not None and self._known.pop(key, None) is not None:
                self._known[key] = found
        if found is None:
            found = KnownGraph(validate(graph.decode(), self._limits, bound), graph.size_bytes)
            with self._lock:
                self._known[key] = self._alive[key] = found
                kept_bytes = sum([one.kept_bytes for one in self._known.values()])
                # A graph's kept bytes may have changed since the sum was taken.
                while self._known and (len(self._known) > MOST_GRAPHS or kept_bytes > MOST_BYTES):
                    kept_bytes -= self._known.pop(next(iter(self._known))).kept_bytes
        return found


#: The most plans without a handle in the cache, their device memory, and the bytes of their graphs'
#: messages, of which their size in Python is a multiple.
MOST_IDLE, MOST_IDLE_BYTES, MOST_IDLE_MESSAGES = 4, 64 * 2**20, MOST_BYTES


@dataclass(frozen=True, slots=True)
class NamedPorts:
    """The values of a graph that have names."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    #: With their numbers.
    variables: tuple[tuple[int, Leaf], ...]
    #: The numbers of variables that the graph assigns.
    assigned: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, partition: Partition | None = None) -> NamedPorts:
        """Return a validated graph's ports. A partition's arrivals are no inputs of its runs."""
        late = {one.leaf for one in partition.arrivals} if partition is not None else ()
        inputs, variables = [], []
        for number, leaf in enumerate(graph.leaves):
            if leaf.kind is LeafKind.VARIABLE:
                variables.append((number, leaf))
            elif leaf.kind is LeafKind.INPUT and number not in late:
                inputs.append(Port(leaf.name, leaf.type))
        outputs = [Port(one.name, graph.type_of(one.value)) for one in graph.outputs]
        assigned = frozenset([node.operands[0] for node in graph.nodes if node.op == "assign"])
        return cls(tuple(inputs), tuple(outputs), tuple(variables), assigned)


@dataclass(eq=False, slots=True)
class KnownPlan:
    """A plan in the cache, and the number of its handles."""

    #: Everything that it was compiled from; None: it cannot be found again.
    key: Hashable
    known: KnownGraph
    loaded: LoadedPlan
    slots: RunSlots
    ports: NamedPorts
    #: True if it holds no tensors of the client, and so may be kept without a handle.
    lasts: bool
    #: Its use of weights.
    weights: WeightUse
    #: The reservation whose memory it uses, if any.
    reservation: MemoryReservation | None = None
    handles: int = 1

    def uses_variable(self, name: str) -> bool:
        """True if it reads or assigns a variable of this name."""
        return any(leaf.name == name for _, leaf in self.ports.variables)

    @property
    def may_stay(self) -> bool:
        """True if it may be kept without a handle now."""
        is_over = self.reservation is not None and self.reservation.is_over
        return self.lasts and not is_over and not self.loaded.is_lost


def key_of(
    options: PlanOptions,
    known: KnownGraph,
    bound: BoundLeaves,
    reservation: ReservationHandle | None,
    stamp: Hashable = None,
) -> Hashable:
    """Return the key of a plan: graph, tensors, reservation, options, and measurements.

    None for a graph without a message, and for a partition, whose edges are its own. The key
    includes names, since errors and ports have them.
    """
    if not known.size_bytes or options.partition is not None:
        return None
    tensors = frozenset((leaf, one.storage, one.layout.offset_bytes) for leaf, one in bound.tensors.items())
    return known, tensors, reservation, stamp, options


class KnownPlans:
    """All plans of a session. Thread-safe. It takes no lock of a session while it holds its own."""

    def __init__(self, room: MemoryReclaim) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._by_key: dict[Hashable, KnownPlan] = {}
        self._by_plan: dict[LoadedPlan, KnownPlan] = {}
        #: Plans without a handle, least recently used first, and their bytes by device.
        self._idle: dict[KnownPlan, Mapping[str, int]] = {}
        self._closed = False
        room.join(self)

    def learn(self) -> None:
        """Record the times of last runs that only reports of plans contain."""
        with self._lock:
            plans = list(self._by_plan)
        for plan in plans:
            plan.learn()

    def __repr__(self) -> str:
        return f"<KnownPlans {len(self._by_plan)}, {len(self._idle)} of them idle>"

    @property
    def idle(self) -> int:
        """The number of plans without a handle."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Their memory on all devices."""
        with self._lock:
            return sum(sum(kept.values()) for kept in self._idle.values())

    def idle_on(self, device: str) -> int:
        """Return the memory of plans without a handle on one device."""
        with self._lock:
            return sum(kept.get(device, 0) for kept in self._idle.values())

    def take(self, key: Hashable) -> KnownPlan | None:
        """Find the plan of a key, for one more handle. Plans on lost devices are not found."""
        with self._lock:
            found = self._by_key.get(key) if key is not None else None
            if found is not None and found.loaded.is_lost:
                # It is freed with its last handle, or is idle and has lost its memory.
                self._forget(found)
                found = None
            if found is not None:
                if self._idle.pop(found, None) is not None:
                    found.loaded.forget_times()
                    found.weights.is_resting = False
                found.handles += 1
        return found

    def add(self, made: KnownPlan) -> None:
        """Add a new plan, for its first handle."""
        with self._lock:
            self._by_plan[made.loaded] = made
            if made.key is not None:
                self._by_key[made.key] = made

    def is_alone(self, loaded: LoadedPlan) -> bool:
        """True if a plan has only one handle."""
        with self._lock:
            return self._by_plan[loaded].handles == 1

    def hand_over(self, loaded: LoadedPlan) -> None:
        """Forget the key of a plan whose memory or variables another one has now."""
        with self._lock:
            if (found := self._by_plan.get(loaded)) is not None:
                self._forget(found)

    def release(self, loaded: LoadedPlan) -> None:
        """Release one handle. After the last one, the plan is kept for a while, or freed."""
        with self._lock:
            found = self._by_plan.get(loaded)
            if found is None:
                return
            found.handles -= 1
            gone = [] if found.handles else self._retire(found)
        for one in gone:
            one.loaded.free()

    def _retire(self, plan: KnownPlan) -> list[KnownPlan]:
        """Keep a plan without a handle if possible. Return the plans to free instead."""
        plan.loaded.trim()
        plan.weights.is_resting = True
        kept = {plan: plan.loaded.kept_bytes()}
        stays = plan.may_stay and not self._closed and self._by_key.get(plan.key) is plan
        if not stays or _is_too_much(kept):
            gone = [plan]
        else:
            self._idle.update(kept)
            kept, gone = dict(self._idle), []
            while _is_too_much(kept):
                gone.append(next(iter(kept)))
                del kept[gone[-1]]
        self._drop(gone)
        return gone

    def make_room(self) -> bool:
        """Free the plans without a handle. True if there were any."""
        with self._lock:
            gone = list(self._idle)
            self._drop(gone)
        for one in gone:
            one.loaded.free()
        return bool(gone)

    def forget_lost(self) -> None:
        """Free the plans without a handle on lost devices, so that they do not count for new ones.

        A new device may have the name of a lost one.
        """
        with self._lock:
            gone = [one for one in self._idle if one.loaded.is_lost]
            self._drop(gone)
        for one in gone:
            one.loaded.free()

    def forget_variable(self, name: str) -> None:
        """Free the plans without a handle that use a variable. Others are not kept without one."""
        with self._lock:
            users = [one for one in self._by_plan.values() if one.uses_variable(name)]
            gone = [one for one in users if one in self._idle]
            for one in users:
                self._forget(one)
            self._drop(gone)
        for one in gone:
            one.loaded.free()

    def end(self, reservation: MemoryReservation) -> None:
        """Free the plans in a reservation, even those with handles. None of them runs."""
        with self._lock:
            gone = [one for one in self._by_plan.values() if one.reservation is reservation]
            self._drop(gone)
        for one in gone:
            one.loaded.free()

    def _drop(self, gone: list[KnownPlan]) -> None:
        for one in gone:
            self._idle.pop(one, None)
            self._forget(one)
            self._by_plan.pop(one.loaded, None)

    def _forget(self, one: KnownPlan) -> None:
        if self._by_key.get(one.key) is one:
            del self._by_key[one.key]

    def close(self) -> None:
        """Free plans without a handle, now and from now on. Idempotent."""
        self._closed = True
        self._room.leave(self)
        self.make_room()


def _is_too_much(idle: Mapping[KnownPlan, Mapping[str, int]]) -> bool:
    """True if these plans without a handle are more than a session may keep."""
    return (
        len(idle) > MOST_IDLE
        or sum(sum(kept.values()) for kept in idle.values()) > MOST_IDLE_BYTES
        or sum(one.known.kept_bytes for one in idle) > MOST_IDLE_MESSAGES
    )
