"""The scheduler's input and output: frozen dataclasses and numbers, no devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Cause

if TYPE_CHECKING:
    from heliograph_server.scheduler.costs import Costs


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device, from which the time of unmeasured nodes is estimated."""

    flops_per_s: float = 5e10
    #: Bytes of operands read and results written.
    bytes_per_s: float = 1e10
    #: The minimum time of a node.
    node_s: float = 2e-6

    def slowed(self, factor: float) -> Rates:
        """Return the rates of a device that is `factor` times slower."""
        return Rates(self.flops_per_s / factor, self.bytes_per_s / factor, self.node_s * factor)


@dataclass(frozen=True, slots=True)
class SiteLink:
    """The link between the devices of two sites."""

    round_trip_s: float = 1e-3
    bytes_per_s: float = 1.25e8
    #: True if both were measured; otherwise the unmeasured one is a default.
    is_measured: bool = False
    #: The names of the two sites, for reports.
    sites: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device as the scheduler sees it. Its place in the problem is its priority, 0 the highest."""

    name: str
    #: For each node the reason why it cannot run here; empty if it can.
    refusals: Sequence[str]
    #: Places of the devices whose memory its kernels read in place, including its own.
    reads: frozenset[int]
    #: The bytes available for weights, variables and results.
    free_bytes: int
    #: True if its memory is the host's.
    is_host: bool = False
    #: True if it runs some ops on behalf of other devices, in their memory.
    helps: bool = False
    #: For each node, true if fetching its weights from the host pays; empty: never.
    offloads: Sequence[bool] = ()
    #: Learned from runs; None: unknown, so the mean of the others' applies.
    rates: Rates | None = None
    #: Measured seconds of a node, by its kind (`Problem.kinds`).
    times: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph, the devices it may use, and the decisions that are already made."""

    graph: Graph
    devices: Sequence[Candidate]
    #: The device of each leaf that already lies on one, by value.
    placed: Mapping[int, int] = field(default_factory=dict)
    #: The device that the user pinned each node to.
    pins: Mapping[int, int] = field(default_factory=dict)
    #: True if a device may fetch weights that lie on the host.
    offload: bool = True
    #: Nodes that begin a split, regardless of the node before.
    begins: frozenset[int] = frozenset()
    #: The links between devices of different sites, by the places of both. Without links, memory
    #: alone decides; with them, predicted times decide.
    links: Mapping[tuple[int, int], SiteLink] = field(default_factory=dict)
    #: The link between the origin of runs and each remote device, by its place. It carries inputs
    #: and outputs.
    origins: Mapping[int, SiteLink] = field(default_factory=dict)
    #: The kind of each node; nodes of one kind take the same time. None: each node is its own kind.
    kinds: Sequence[int] | None = None
    #: The number of runs that may be in flight at once.
    pipeline: int = 1
    #: The number of devices, from the first, that may be chosen by time; the others run what these
    #: cannot. None: all devices.
    chosen: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node's device and the cause."""

    device: int
    cause: Cause
    #: For WEIGHT and OFFLOAD: the place of the operand.
    operand: int = -1

    def __str__(self) -> str:
        return f"{self.cause} {self.operand}" if self.operand >= 0 else str(self.cause)


#: For `Copy.rows`: all rows are copied.
ALL_ROWS = -1
#: Smaller copies are not made ahead: handing one to another thread takes longer than the copy.
AHEAD_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a value to the memory of a split's device."""

    value: int
    source: int
    destination: int
    #: An upper bound if only some rows are copied.
    size_bytes: int
    #: The value whose elements name the rows, or experts, that the split reads; only those are
    #: copied.
    rows: int = ALL_ROWS


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive nodes on one device."""

    device: int
    #: Node numbers, in order.
    nodes: tuple[int, ...]
    #: Copies made before it runs.
    copies: tuple[Copy, ...]
    #: Values that it reads from outside: leaves, and results of earlier splits.
    inputs: tuple[int, ...]
    #: Results that later splits read or the graph returns.
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The placement of a graph over devices."""

    splits: tuple[Split, ...]
    assignments: tuple[Assignment, ...]
    #: The device of each leaf; -1: an input, which comes with each run.
    homes: tuple[int, ...]
    #: Where possible, copies of at least this size are made while the split before runs, which
    #: takes memory for both at once. None: no copies are made ahead.
    ahead_bytes: int | None = AHEAD_BYTES
    #: Observed nodes; each is the last one of its split.
    taps: frozenset[int] = frozenset()
    #: The costs for predicting times; None where memory alone decided.
    costs: Costs | None = field(default=None, compare=False)
    #: Nodes whose results other hosts read; each is the last one of its split.
    departures: frozenset[int] = frozenset()

    @classmethod
    def on_first(cls, graph: Graph) -> Schedule:
        """Return the homes and assignments of a graph on the first device, without splits."""
        homes = tuple([-1 if leaf.kind is LeafKind.INPUT else 0 for leaf in graph.leaves])
        return cls((), (Assignment(0, Cause.FIRST_THAT_CAN),) * len(graph.nodes), homes)

    @property
    def split_of(self) -> dict[int, int]:
        """The split of each node."""
        return {node: number for number, one in enumerate(self.splits) for node in one.nodes}

    @property
    def main(self) -> int:
        """The device of the last split, which computes the outputs; without nodes, the first
        device."""
        return self.splits[-1].device if self.splits else 0

    @property
    def only(self) -> int | None:
        """The device that runs all nodes in one split and holds all leaves; None if there are
        several."""
        used = {home for home in self.homes if home >= 0}
        used.update(one.device for one in self.splits)
        if len(self.splits) > 1 or len(used) > 1:
            return None
        return used.pop() if used else 0

    @property
    def copied_bytes(self) -> int:
        """The bytes copied in one run."""
        return sum(copy.size_bytes for one in self.splits for copy in one.copies)
