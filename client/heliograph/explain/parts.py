"""The parts of an explanation: nodes, copies and splits, with names instead of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph_proto.plans import Cause, Route
from heliograph_proto.types import TensorType


def host_of(device: str) -> str:
    """The host of a device NAME/DEVICE of a pool; empty: the server's own."""
    return device.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """A node of the graph, and where it runs."""

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
    #: The number, from 1, of the set of its split's nodes that run at the same time; 0: it runs alone.
    concurrent: int = 0


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
    #: Whether no other rows, or experts, of it are copied than those that the run reads.
    rows_only: bool = False
    #: Whether it is copied while the split before on its device computes.
    ahead: bool = False
    #: How it travels between hosts; a head says so.
    route: Route = Route.WITHIN
    #: How long it was expected to take by itself, in microseconds; 0: nobody knew.
    predicted_us: float = 0.0

    @property
    def label(self) -> str:
        """Its name, and how it is copied where that is not as usual."""
        return f"{self.name}{' (rows)' * self.rows_only}{' (ahead)' * self.ahead}"


@dataclass(frozen=True, slots=True)
class ExplainedShare:
    """Rows of a weight that lie on a device; all of them where something reads it as a whole."""

    #: The weight's number.
    leaf: int
    name: str
    #: The device's name.
    device: str
    #: The first row, and how many: columns where `matmul` reads the weight.
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
    #: None in a plan that computes nothing, and where parts of products run alone.
    nodes: tuple[ExplainedNode, ...]
    #: Made before its nodes run.
    copies: tuple[ExplainedCopy, ...]
    #: What its nodes became.
    steps: int
    #: The memory taken for its intermediate results.
    compute_bytes: int
    #: How long its copies took in the last run, in microseconds; 0 before the first.
    copy_us: float
    #: How long it computed in the last run, in microseconds; 0 before the first.
    compute_us: float
    #: When it began, in microseconds after the run did. Splits of different devices may overlap.
    began_us: float
    #: Parts of products whose weight lies over devices.
    parts: tuple[ExplainedPart, ...] = ()
    #: What the device says of how it runs, in words.
    note: str = ""
    #: What `copy_us`, `compute_us` and `began_us` were expected to be when the plan was made; 0: nobody knew.
    predicted_copy_us: float = 0.0
    predicted_compute_us: float = 0.0
    predicted_began_us: float = 0.0

    @property
    def copied_bytes(self) -> int:
        """Of its copies, in each run."""
        return sum(copy.size_bytes for copy in self.copies)

    @property
    def ended_us(self) -> float:
        """When it had computed, in microseconds after the run began."""
        return self.began_us + self.copy_us + self.compute_us

    @property
    def predicted_us(self) -> float:
        """How long it was expected to take, copies and all, in microseconds; 0: nobody knew."""
        return self.predicted_copy_us + self.predicted_compute_us

    @property
    def ends(self) -> tuple[str, str]:
        """The names of its first and its last node, or else of products; "-" where there is none."""
        found = self.nodes or self.parts
        return (found[0].name, found[-1].name) if found else ("-", "-")
