"""The parts of an explanation: nodes, copies and splits, with names instead of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph_proto.plans import Cause, MemoryUse, Route
from heliograph_proto.types import TensorType


def host_of(device: str) -> str:
    """The host of a device NAME/DEVICE of a pool; empty: the server's own."""
    return device.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """A node of the graph and its placement."""

    #: Its number in the graph.
    number: int
    name: str
    op: str
    #: Of its result.
    type: TensorType
    #: The device's name.
    device: str
    #: The split's number.
    split: int
    cause: Cause
    #: The cause in words.
    why: str
    #: The number, from 1, of the set of its split's nodes that run at the same time; 0: it runs
    #: alone.
    concurrent: int = 0
    #: The number, from 1, of its step in the split: nodes of one step are computed together. 0:
    #: before the first run, or the device does not tell.
    step: int = 0
    #: The mean time of that step in the last measured runs, in microseconds; 0: unknown.
    step_us: float = 0.0
    #: The line of code that built it; empty if unknown.
    source: str = ""


@dataclass(frozen=True, slots=True)
class ExplainedCopy:
    """A value that is copied before a split runs."""

    #: Its number in the graph: leaves first, then nodes.
    value: int
    name: str
    type: TensorType
    #: The name of the device that it comes from.
    source: str
    #: At most, if `rows_only`.
    size_bytes: int
    #: True if only the rows, or experts, that the run reads are copied.
    rows_only: bool = False
    #: True if it is copied while its device computes the split before.
    ahead: bool = False
    #: Its route between hosts, as the head reports it.
    route: Route = Route.WITHIN
    #: The predicted time by itself, in microseconds; 0 if unknown.
    predicted_us: float = 0.0

    @property
    def label(self) -> str:
        """Its name, with "(rows)" or "(ahead)" for such copies."""
        return f"{self.name}{' (rows)' * self.rows_only}{' (ahead)' * self.ahead}"


@dataclass(frozen=True, slots=True)
class ExplainedBlock:
    """A block of memory that a run computes in."""

    #: The device's name.
    device: str
    size_bytes: int
    use: MemoryUse


@dataclass(frozen=True, slots=True)
class ExplainedValue:
    """A value in a block, in some steps; values that share bytes live in different steps.

    Steps are counted from 0 over all splits, in their order.
    """

    #: Its number in the graph: leaves first, then nodes.
    value: int
    name: str
    #: The place of the block.
    block: int
    offset_bytes: int
    size_bytes: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class ExplainedShare:
    """Rows of a weight on a device; all rows where a node reads the whole weight."""

    #: The weight's number.
    leaf: int
    name: str
    #: The device's name.
    device: str
    #: The first row and the number of rows: columns where `matmul` reads the weight.
    first: int
    count: int
    size_bytes: int
    are_columns: bool

    @property
    def rows(self) -> str:
        """The rows in words."""
        what = "columns" if self.are_columns else "rows"
        return f"{what} {self.first} to {self.first + self.count}"


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """A product with some rows of a weight; their results are joined in the product's own split."""

    #: The product's number in the graph, and its name.
    node: int
    name: str
    share: ExplainedShare


@dataclass(frozen=True, slots=True)
class ExplainedSplit:
    """Consecutive nodes on one device."""

    number: int
    #: The device's name.
    device: str
    #: Empty in a plan that computes nothing, and where parts of products run alone.
    nodes: tuple[ExplainedNode, ...]
    #: Made before its nodes run.
    copies: tuple[ExplainedCopy, ...]
    #: The number of steps of its nodes.
    steps: int
    #: The memory taken for its intermediate results.
    compute_bytes: int
    #: The time of its copies in the last run, in microseconds; 0 before the first run.
    copy_us: float
    #: Its compute time in the last run, in microseconds; 0 before the first run.
    compute_us: float
    #: Its start, in microseconds after the run's. Splits of different devices may overlap.
    began_us: float
    #: Parts of products with split weights.
    parts: tuple[ExplainedPart, ...] = ()
    #: The device's note on how it runs.
    note: str = ""
    #: The predictions of `copy_us`, `compute_us` and `began_us` from compile time; 0 if unknown.
    predicted_copy_us: float = 0.0
    predicted_compute_us: float = 0.0
    predicted_began_us: float = 0.0
    #: The number of its steps by which values in memory count; 0: unknown.
    memory_steps: int = 0

    @property
    def copied_bytes(self) -> int:
        """The bytes of its copies in each run."""
        return sum(copy.size_bytes for copy in self.copies)

    @property
    def ended_us(self) -> float:
        """Its end, in microseconds after the run began."""
        return self.began_us + self.copy_us + self.compute_us

    @property
    def predicted_us(self) -> float:
        """Its predicted time with copies, in microseconds; 0 if unknown."""
        return self.predicted_copy_us + self.predicted_compute_us

    @property
    def ends(self) -> tuple[str, str]:
        """The names of its first and last node, else of its products; "-" without any."""
        found = self.nodes or self.parts
        return (found[0].name, found[-1].name) if found else ("-", "-")
