"""What a session compiled before and may compile again: validated graphs and their schedules, by content.

Both are immutable and hold no memory of a device, so what they cost is time alone. A session keeps its own;
nothing of them is seen by another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from heliograph_proto.graph import Graph, validate
from heliograph_proto.limits import Limits
from heliograph_proto.rows import RowSplit
from heliograph_server.core.scheduling import Schedule
from heliograph_server.core.scheduling.rows import Divided
from heliograph_server.core.spreading import ample_bytes

#: The most graphs, schedules of one graph, and bytes of messages that a session keeps. In Python a graph
#: takes some thirty times the bytes of its message.
MOST_GRAPHS, MOST_SCHEDULES, MOST_BYTES = 4, 8, 2 * 2**20


@dataclass(frozen=True, slots=True)
class ReceivedGraph:
    """A graph as it came: the digest of its bytes, how many there were, and how to make it of them."""

    digest: bytes
    size_bytes: int
    #: Raises what is wrong with it.
    decode: Callable[[], Graph]


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
