"""Plans that a session compiled: found again by what they were compiled of, and kept for a while.

A plan that is compiled again as long as it is there is not made again: it gets one more handle, and the runs
of all its handles are serial. When its last handle is freed it stays for as long as it is one of the few
that were used last, takes little memory, and nobody wants that; then it costs a look-up to compile it again.

What a session compiled before and may compile again: validated graphs and their schedules, by content.

Both are immutable and hold no memory of a device, so what they cost is time alone. A session keeps its own;
nothing of them is seen by another.
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

#: The most graphs, schedules of one graph, and bytes of messages that a session keeps. In Python a graph
#: takes some thirty times the bytes of its message.
MOST_GRAPHS, MOST_SCHEDULES, MOST_BYTES = 4, 8, 2 * 2**20


@dataclass(eq=False, slots=True, weakref_slot=True)
class KnownGraph:
    """A validated graph and its schedules; with each, how much free memory makes memory irrelevant."""

    graph: Graph
    #: Of its message; 0 for one that came without: nobody can find it again.
    size_bytes: int = 0
    schedules: dict[Hashable, tuple[Schedule, int]] = field(default_factory=dict)
    #: If this is a graph whose weights lie over devices: what it was made of.
    divided: Divided | None = None
    #: What it became last when weights were to lie over devices, and how these were to.
    _division: tuple[Mapping[int, RowSplit], KnownGraph] | None = None

    def division(self, splits: Mapping[int, RowSplit], divide: Callable[[], Divided]) -> KnownGraph:
        """The graph with weights over devices, as `divide` makes it now, or made it the last time."""
        if self._division is None or self._division[0] != splits:
            made = divide()
            growth = len(made.graph.nodes) / max(1, len(self.graph.nodes))
            self._division = splits, KnownGraph(made.graph, int(self.size_bytes * growth), divided=made)
        return self._division[1]

    @property
    def kept_bytes(self) -> int:
        """Of messages that would be as large as all that is kept."""
        return self.size_bytes + (self._division[1].size_bytes if self._division else 0)

    def schedule(self, key: Hashable, free_bytes: Sequence[int]) -> Schedule | None:
        """The schedule of this key, if all devices have so much that memory decides nothing."""
        found, ample = self.schedules.get(key, (None, 0))
        return found if min(free_bytes) >= ample else None

    def keep(self, key: Hashable, found: Schedule, free_bytes: Sequence[int], copies: int = 1) -> None:
        """Keeps a schedule, if it does not depend on how much memory was free."""
        ample = ample_bytes(self.graph, found, copies)
        if min(free_bytes) < ample:
            return
        if len(self.schedules) >= MOST_SCHEDULES:
            del self.schedules[next(iter(self.schedules))]
        self.schedules[key] = found, ample


class KnownGraphs:
    """Those that were validated last. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        #: The least recently used first.
        self._known: dict[Hashable, KnownGraph] = {}
        #: Those too that only a plan keeps: it may be compiled again as long as it is there.
        self._alive: WeakValueDictionary[Hashable, KnownGraph] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<KnownGraphs {len(self._known)}>"

    def validated(self, graph: Graph | ReceivedGraph, bound: Collection[int]) -> KnownGraph:
        """The graph, checked now or before; `bound` is that of `validate`. Raises what `validate` does."""
        if isinstance(graph, Graph):
            return KnownGraph(validate(graph, self._limits, bound))
        key = graph.digest, frozenset(bound)
        with self._lock:
            found = self._alive.get(key)
            if found is not None and self._known.pop(key, None) is not None:
                self._known[key] = found
        if found is None:
            found = KnownGraph(validate(graph.decode(), self._limits, bound), graph.size_bytes)
            self._add(key, found)
        return found

    def _add(self, key: Hashable, made: KnownGraph) -> None:
        with self._lock:
            self._known[key] = self._alive[key] = made
            while len(self._known) > MOST_GRAPHS or self._size_bytes() > MOST_BYTES:
                del self._known[next(iter(self._known))]

    def _size_bytes(self) -> int:
        return sum(one.kept_bytes for one in self._known.values())


#: The most plans without a handle that a session keeps, their memory on devices, and the bytes of their
#: graphs' messages, of which those in Python are a multiple.
MOST_IDLE, MOST_IDLE_BYTES, MOST_IDLE_MESSAGES = 4, 64 * 2**20, MOST_BYTES


@dataclass(frozen=True, slots=True)
class NamedPorts:
    """What of a graph has names for its client. Leaves with their numbers."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    variables: tuple[tuple[int, Leaf], ...]
    #: Numbers of variables that the graph assigns.
    assigned: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, partition: Partition | None = None) -> NamedPorts:
        """Those of a validated graph. What arrives while a partition runs is no input of its runs."""
        late = {one.leaf for one in partition.arrivals} if partition is not None else ()
        return cls(
            inputs=tuple(
                Port(leaf.name, leaf.type)
                for n, leaf in enumerate(graph.leaves)
                if leaf.kind is LeafKind.INPUT and n not in late
            ),
            outputs=tuple(Port(one.name, graph.type_of(one.value)) for one in graph.outputs),
            variables=tuple(
                (n, leaf) for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.VARIABLE
            ),
            assigned=frozenset(node.operands[0] for node in graph.nodes if node.op == "assign"),
        )


@dataclass(eq=False, slots=True)
class KnownPlan:
    """A plan and whoever has a handle of it."""

    #: What it was compiled of; None: nobody can ask for the same again.
    key: Hashable
    known: KnownGraph
    loaded: LoadedPlan
    slots: RunSlots
    ports: NamedPorts
    #: Whether it holds nothing that is the client's, and so may stay without a handle.
    lasts: bool
    #: In whose memory it lies, if so.
    reservation: MemoryReservation | None = None
    handles: int = 1

    @property
    def may_stay(self) -> bool:
        """Whether it may stay without a handle, now."""
        is_over = self.reservation is not None and self.reservation.is_over
        return self.lasts and not is_over and not self.loaded.is_lost


def key_of(
    options: PlanOptions,
    known: KnownGraph,
    bound: BoundLeaves,
    reservation: ReservationHandle | None,
    stamp: Hashable = None,
) -> Hashable:
    """What a plan is compiled of: the graph, the tensors that its leaves are, the memory in which it is to
    lie, how it is compiled, and what was measured of its devices.

    None for a graph that came without its message, and for a partition, whose edges are no other's. Names are
    in it, since errors and ports carry them.
    """
    if not known.size_bytes or options.partition is not None:
        return None
    tensors = frozenset((leaf, one.storage, one.layout.offset_bytes) for leaf, one in bound.tensors.items())
    return known, tensors, reservation, stamp, options


class KnownPlans:
    """All plans of a session. Thread-safe; asks for no lock of a session while it holds its own."""

    def __init__(self, room: MemoryReclaim) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._by_key: dict[Hashable, KnownPlan] = {}
        self._by_plan: dict[LoadedPlan, KnownPlan] = {}
        #: Without a handle, the least recently used first, and what they take, by device.
        self._idle: dict[KnownPlan, Mapping[str, int]] = {}
        self._closed = False
        room.join(self)

    def learn(self) -> None:
        """Has the times of their last runs recorded where only reports tell them."""
        with self._lock:
            plans = list(self._by_plan)
        for plan in plans:
            plan.learn()

    def __repr__(self) -> str:
        return f"<KnownPlans {len(self._by_plan)}, {len(self._idle)} of them idle>"

    @property
    def idle(self) -> int:
        """How many have no handle."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """What those take of all devices."""
        with self._lock:
            return sum(sum(kept.values()) for kept in self._idle.values())

    def idle_on(self, device: str) -> int:
        """What those take of one device."""
        with self._lock:
            return sum(kept.get(device, 0) for kept in self._idle.values())

    def take(self, key: Hashable) -> KnownPlan | None:
        """The plan that was compiled of this, for one more handle; none that needs a device that is lost."""
        with self._lock:
            found = self._by_key.get(key) if key is not None else None
            if found is not None and found.loaded.is_lost:
                # It goes with its last handle, or was idle: then it takes nothing any more.
                self._forget(found)
                found = None
            if found is not None:
                if self._idle.pop(found, None) is not None:
                    found.loaded.forget_times()
                found.handles += 1
        return found

    def add(self, made: KnownPlan) -> None:
        """A new plan, for its first handle."""
        with self._lock:
            self._by_plan[made.loaded] = made
            if made.key is not None:
                self._by_key[made.key] = made

    def is_alone(self, loaded: LoadedPlan) -> bool:
        """Whether a plan has one handle only."""
        with self._lock:
            return self._by_plan[loaded].handles == 1

    def hand_over(self, loaded: LoadedPlan) -> None:
        """A plan gave its memory to another: it is not to be found any more."""
        with self._lock:
            self._forget(self._by_plan[loaded])

    def release(self, loaded: LoadedPlan) -> None:
        """One handle less; after the last one the plan is kept for a while, or freed."""
        with self._lock:
            found = self._by_plan.get(loaded)
            if found is None:
                return
            found.handles -= 1
            gone = [] if found.handles else self._retire(found)
        for one in gone:
            one.loaded.free()

    def _retire(self, plan: KnownPlan) -> list[KnownPlan]:
        """Keeps a plan that lost its last handle, if it may stay; those that go for it, or itself."""
        plan.loaded.trim()
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
        """Frees the plans without a handle. Whether there were any."""
        with self._lock:
            gone = list(self._idle)
            self._drop(gone)
        for one in gone:
            one.loaded.free()
        return bool(gone)

    def forget_lost(self) -> None:
        """Those without a handle that were compiled for devices that are gone take no memory of those that
        have their names now."""
        with self._lock:
            gone = [one for one in self._idle if one.loaded.is_lost]
            self._drop(gone)
        for one in gone:
            one.loaded.free()

    def end(self, reservation: MemoryReservation) -> None:
        """Frees the plans that lie there, whoever has a handle of them. Nothing of them runs."""
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
        """Frees what has no handle, now and from now on. Idempotent."""
        self._closed = True
        self._room.leave(self)
        self.make_room()


def _is_too_much(idle: Mapping[KnownPlan, Mapping[str, int]]) -> bool:
    """Whether so many plans without a handle are more than a session may keep."""
    return (
        len(idle) > MOST_IDLE
        or sum(sum(kept.values()) for kept in idle.values()) > MOST_IDLE_BYTES
        or sum(one.known.kept_bytes for one in idle) > MOST_IDLE_MESSAGES
    )
