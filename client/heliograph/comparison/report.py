"""The report of a comparison of two devices: a row and a verdict for each node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from heliograph.comparison.differences import Difference
from heliograph_proto.types import TensorType


class Verdict(Enum):
    """The verdict on a node."""

    #: Both devices agree, within the tolerance.
    OK = "ok"
    #: They do not.
    DIFFERS = "differs"
    #: Computing it failed on a device.
    FAILED = "failed"
    #: A device does not offer it.
    UNSUPPORTED = "unsupported"
    #: No device computed its operands.
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class ComparedNode:
    """A node, and the difference of the two devices' results."""

    #: Its number in the graph.
    number: int
    name: str
    op: str
    type: TensorType
    #: The normalised mean squared error that is allowed: the op's own.
    tolerance: float
    verdict: Verdict
    #: None where there were not two results.
    difference: Difference | None = None
    #: Why there were not, in words.
    note: str = ""

    def __str__(self) -> str:
        found = self.difference
        if found is None:
            return f"{self.number} {self.name} {self.type}: {self.verdict.value}, {self.note}"
        return (
            f"{self.number} {self.name} {self.type}: {self.verdict.value}, NMSE {found.nmse:.3g} "
            f"(tolerance {self.tolerance:.3g}), largest difference {found.max_difference:.3g}, "
            f"{found.different} elements differ"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The compared nodes, in the graph's order."""

    #: Addresses of the two devices; `a` is the reference.
    a: str
    b: str
    rows: tuple[ComparedNode, ...]
    #: True if `on_node` ended it early.
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """True if no node failed or differed beyond its tolerance. Unsupported ones do not
        count."""
        return not any(row.verdict in (Verdict.DIFFERS, Verdict.FAILED) for row in self.rows)

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph.comparison.notebook_view import comparison_view

        return comparison_view(self)

    def count(self, verdict: Verdict) -> int:
        """The number of nodes with a verdict."""
        return sum(row.verdict is verdict for row in self.rows)

    def worst(self, count: int | None = None) -> list[ComparedNode]:
        """The rows, the worst first; at most `count`."""
        return sorted(self.rows, key=_badness)[:count]

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.count(one)} {one.value}" for one in Verdict if self.count(one))
        return f"<Comparison of {self.a} and {self.b}: {counts or 'no nodes'}>"


def _badness(row: ComparedNode) -> tuple[int, float]:
    order = (Verdict.FAILED, Verdict.DIFFERS, Verdict.UNSUPPORTED, Verdict.SKIPPED, Verdict.OK)
    # NaN is worse than any number.
    nmse = 0.0 if row.difference is None else row.difference.nmse
    return order.index(row.verdict), -nmse if nmse == nmse else float("-inf")
