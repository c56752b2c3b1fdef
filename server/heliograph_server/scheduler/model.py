"""What the scheduler is given and what it gives: frozen dataclasses and numbers, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heliograph_proto.graph import Graph
from heliograph_proto.plans import Cause

if TYPE_CHECKING:
    from heliograph_server.scheduler.costs import Costs


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device computes, by which the time of a node is estimated that was never measured."""

    flops_per_s: float = 5e10
    #: Of operands read and results written.
    bytes_per_s: float = 1e10
    #: What every node takes, however small.
    node_s: float = 2e-6

    def slowed(self, factor: float) -> Rates:
        """Those of a device that takes so many times as long."""
        return Rates(self.flops_per_s / factor, self.bytes_per_s / factor, self.node_s * factor)


@dataclass(frozen=True, slots=True)
class SiteLink:
    """The way between the devices of two sites."""

    round_trip_s: float = 1e-3
    bytes_per_s: float = 1.25e8
    #: Whether both were measured; else what was not is assumed.
    is_measured: bool = False
    #: The names of the two sites, for people.
    sites: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device as the scheduler sees it. Its place in the problem is its priority, 0 the highest."""

    name: str
    #: For each node why it cannot run here; empty if it can.
    refusals: Sequence[str]
    #: Places of the devices whose memory its kernels read in place; its own among them.
    reads: frozenset[int]
    #: What it may use for weights, variables and results.
    free_bytes: int
    #: Whether its memory is the host's.
    is_host: bool = False
    #: Whether it is there to help others with some ops, in their memory.
    helps: bool = False
    #: For each node whether fetching its weights from the host pays; empty: never.
    offloads: Sequence[bool] = ()
    #: Learned from runs; None: not known, so it counts as the others do.
    rates: Rates | None = None
    #: Seconds of a node, by its kind (`Problem.kinds`), where that was measured.
    times: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph, the devices it may use, and what is settled already."""

    graph: Graph
    devices: Sequence[Candidate]
    #: Leaves whose bytes lie on a device already, by value.
    placed: Mapping[int, int] = field(default_factory=dict)
    #: What the user wants, by node.
    pins: Mapping[int, int] = field(default_factory=dict)
    #: Whether a device may fetch weights that lie on the host.
    offload: bool = True
    #: Nodes with which a split begins, whatever runs before them.
    begins: frozenset[int] = frozenset()
    #: The ways between devices of different sites, by the places of both. Where there are none, memory alone
    #: decides; else predicted times do.
    links: Mapping[tuple[int, int], SiteLink] = field(default_factory=dict)
    #: The way between where runs come from and each device that is elsewhere, by its place: inputs come that
    #: way and outputs go.
    origins: Mapping[int, SiteLink] = field(default_factory=dict)
    #: The kind of each node: those of one kind take the same time. None: each is its own.
    kinds: Sequence[int] | None = None
    #: How many runs may be under way at once.
    pipeline: int = 1
    #: How many of the devices, from the first, may be chosen by time; the others run what these cannot. None:
    #: all.
    chosen: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node's device and why."""

    device: int
    cause: Cause
    #: Of WEIGHT and OFFLOAD: the place of the operand.
    operand: int = -1

    def __str__(self) -> str:
        return f"{self.cause} {self.operand}" if self.operand >= 0 else str(self.cause)


#: Of a copy: all rows.
ALL_ROWS = -1
#: Smaller copies are not made ahead: handing them to another thread takes longer than they do.
AHEAD_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Copy:
    """A value that a split needs in its own device's memory."""

    value: int
    source: int
    destination: int
    #: At most, where not all rows are copied.
    size_bytes: int
    #: The value whose elements are the rows, or experts, that the split reads: no others are copied.
    rows: int = ALL_ROWS


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive nodes on one device."""

    device: int
    #: By number, in order.
    nodes: tuple[int, ...]
    #: Made before it runs.
    copies: tuple[Copy, ...]
    #: Values from outside of the split that it reads: leaves, and results of earlier splits.
    inputs: tuple[int, ...]
    #: Results that later splits read, or that the graph returns.
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A graph over devices."""

    splits: tuple[Split, ...]
    assignments: tuple[Assignment, ...]
    #: The device of each leaf; -1: an input, which comes with each run.
    homes: tuple[int, ...]
    #: Copies of so many bytes or more are made while the split before runs, where they can be: that takes
    #: memory for both at once. None: none are.
    ahead_bytes: int | None = AHEAD_BYTES
    #: Nodes that are observed: each is the last one of its split.
    taps: frozenset[int] = frozenset()
    #: By which times can be predicted; None where memory alone decided.
    costs: Costs | None = field(default=None, compare=False)
    #: Nodes whose results other hosts read: each is the last one of its split.
    departures: frozenset[int] = frozenset()

    @property
    def main(self) -> int:
        """The device of the last split, on which outputs are made; without nodes, the first one."""
        return self.splits[-1].device if self.splits else 0

    @property
    def only(self) -> int | None:
        """The one device on which all nodes run in one split and all leaves lie; None: there are several."""
        used = {home for home in self.homes if home >= 0}
        used.update(one.device for one in self.splits)
        if len(self.splits) > 1 or len(used) > 1:
            return None
        return used.pop() if used else 0

    @property
    def copied_bytes(self) -> int:
        """Of one run."""
        return sum(copy.size_bytes for one in self.splits for copy in one.copies)
