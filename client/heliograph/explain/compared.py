"""Two explanations beside each other: nodes that differ in device, time, memory or fusion.

print(plan.explain().compare(other.explain()))
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.explain.parts import ExplainedNode
from heliograph.explain.pictures.words import time_text
from heliograph.explain.tables import Table, align
from heliograph.graph.arguments import counted
from heliograph.graph.files.atomic_files import replacing
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from heliograph.explain.explanation import Explanation

#: The most nodes of a table, unless every one is shown.
MOST_ROWS = 30
#: The share by which times may differ, and the least difference in microseconds that counts.
TOLERANCE, LEAST_US = 0.1, 1.0
_COLUMNS = ("device", "time", "memory", "together")


class PlanAspect(Enum):
    """A way in which a node of two plans differs."""

    #: Only one of the plans has it.
    PRESENCE = "presence"
    DEVICE = "device"
    TIME = "time"
    #: The bytes of the memory that runs compute in.
    MEMORY = "memory"
    #: The nodes that are computed together with it.
    FUSION = "fusion"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node in one of two compared plans."""

    node: ExplainedNode
    #: Its part of the time, in microseconds; 0: unknown.
    time_us: float
    #: The bytes that it takes of the memory that runs compute in; None: unknown.
    stored_bytes: int | None
    #: The names of the nodes that are computed together with it; None: unknown.
    together: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """A node of two compared plans, by its name, and what differs."""

    name: str
    op: str
    #: None: the plan does not have it.
    a: PlannedNode | None
    b: PlannedNode | None
    aspects: tuple[PlanAspect, ...]


@dataclass(frozen=True, slots=True)
class ComparedPlans:
    """Two explanations and the nodes that differ. Its text is tables."""

    a: Explanation
    b: Explanation
    #: In the order of the first plan; those that only the second has come last.
    differences: tuple[PlanDifference, ...]

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<ComparedPlans: {self.summary()}>"

    def count(self, aspect: PlanAspect) -> int:
        """The number of nodes that differ in an aspect."""
        return sum(aspect in one.aspects for one in self.differences)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(one)} in {one}" for one in PlanAspect if self.count(one))
        nodes = counted(len(self.differences), "node")
        return f"{nodes} differ{'s' * (len(self.differences) == 1)}{f': {counts}' if counts else ''}"

    def table(self, *, nodes: bool = False) -> str:
        """Tables of the plans as a whole, and of nodes that differ; with `nodes`, of all of them."""
        tables = [self.whole_table()]
        if self.differences:
            tables.append(self.node_table(None if nodes else MOST_ROWS))
        return "\n\n".join([self.summary(), *("\n".join(align(one)) for one in tables)])

    def json(self) -> str:
        """Return a JSON object for programs: "a" and "b", each as `Explanation.json` has it, and
        "differences"."""
        rows = [
            {
                "name": one.name,
                "op": one.op,
                "aspects": [str(aspect) for aspect in one.aspects],
                "a": _side_as_json(one.a),
                "b": _side_as_json(one.b),
            }
            for one in self.differences
        ]
        sides = {"a": json.loads(self.a.json()), "b": json.loads(self.b.json())}
        return json.dumps({**sides, "differences": rows}, indent=2)

    def html(self, path: str | os.PathLike[str], *, titles: Sequence[str] = ("Plan a", "Plan b")) -> None:
        """Write both plans side by side, and the nodes that differ, as a page in one file.

        Raises InvalidArgumentError if the file cannot be written.
        """
        from heliograph.explain.picturing import page_of_two

        if len(titles) != 2:
            raise InvalidArgumentError(
                f"{len(titles)} titles for two plans", advice="titles=('before', 'after')"
            )
        with replacing(Path(path)) as part:
            part.write_text(page_of_two(self, titles), encoding="utf-8")

    def whole_table(self) -> Table:
        """A table of the devices, steps, memory and times of each plan as a whole."""
        rows: Table = [["", "a", "b"]]
        both = self.a, self.b
        rows.append(["devices", *(", ".join(dict.fromkeys(s.device for s in one.splits)) for one in both)])
        rows.append(["splits", *(str(len(one.splits)) for one in both)])
        rows.append(["nodes", *(str(len(one.nodes)) for one in both)])
        rows.append(["steps", *(str(sum(split.steps for split in one.splits)) for one in both)])
        rows.append(["copied in a run", *(size_text(one.copied_bytes) for one in both)])
        computing = (sum(device.compute_bytes for device in one.devices) for one in both)
        rows.append(["memory for computing", *map(size_text, computing)])
        rows.append(["last run", *(time_text(one.run_us) for one in both)])
        rows.append(["predicted", *(time_text(one.predicted_us) for one in both)])
        return rows

    def node_table(self, most: int | None) -> Table:
        """A line for each node that differs, or for `most` of them."""
        rows: Table = [["node", "differs in", *(f"{what} {side}" for what in _COLUMNS for side in "ab")]]
        rows += [_cells(one) for one in self.differences[:most]]
        if (left := len(self.differences) - len(rows) + 1) > 0:
            rows.append([f"{left} more", *["-"] * (len(rows[0]) - 1)])
        return rows


def compare(a: Explanation, b: Explanation, tolerance: float = TOLERANCE) -> ComparedPlans:
    """Compare two explanations; see `Explanation.compare`. Raises InvalidArgumentError."""
    if not 0 <= tolerance < math.inf:
        raise InvalidArgumentError(f"the tolerance {tolerance} is no share", advice="such as 0.1, for 10 %")
    timing, sides = _sides(a)
    other_timing, others = _sides(b)
    times = timing == other_timing != "work"
    found = []
    for key in [*sides, *(key for key in others if key not in sides)]:
        mine, its = sides.get(key), others.get(key)
        aspects = tuple(_aspects(mine, its, tolerance if times else math.inf))
        if aspects:
            one = mine or its
            assert one is not None
            found.append(PlanDifference(one.node.name, one.node.op, mine, its, aspects))
    return ComparedPlans(a, b, tuple(found))


def _aspects(a: PlannedNode | None, b: PlannedNode | None, tolerance: float) -> list[PlanAspect]:
    if a is None or b is None:
        return [PlanAspect.PRESENCE]
    apart = abs(a.time_us - b.time_us)
    differs = {
        PlanAspect.DEVICE: a.node.device != b.node.device,
        PlanAspect.TIME: apart > LEAST_US and apart > tolerance * min(a.time_us, b.time_us),
        PlanAspect.MEMORY: None not in (a.stored_bytes, b.stored_bytes) and a.stored_bytes != b.stored_bytes,
        PlanAspect.FUSION: None not in (a.together, b.together) and a.together != b.together,
    }
    return [aspect for aspect, is_different in differs.items() if is_different]


def _sides(found: Explanation) -> tuple[str, dict[tuple[str, str, int], PlannedNode]]:
    """Return the kind of the times, and nodes by name, op and occurrence among those of one name."""
    from heliograph.explain.picturing import times_of

    timing, times = times_of(found, found._graph)
    stored: Counter[int] = Counter()
    for one in found.stored:
        stored[one.value - len(found._graph.leaves)] += one.size_bytes
    steps: dict[tuple[int, int], set[str]] = {}
    for node in found.nodes:
        steps.setdefault((node.split, node.step), set()).add(node.name)
    told = any(node.step for node in found.nodes)
    seen: Counter[tuple[str, str]] = Counter()
    sides = {}
    for node, took in zip(found.nodes, times, strict=True):
        together = steps[node.split, node.step] - {node.name} if node.step else set[str]()
        sides[node.name, node.op, seen[node.name, node.op]] = PlannedNode(
            node,
            0.0 if timing == "work" else took,
            stored[node.number] if found._tells_memory else None,
            frozenset(together) if told else None,
        )
        seen[node.name, node.op] += 1
    return timing, sides


def _cells(one: PlanDifference) -> list[str]:
    def both(read: Any) -> list[str]:
        return [read(side) if side is not None else "-" for side in (one.a, one.b)]

    return [
        one.name,
        ", ".join(map(str, one.aspects)),
        *both(lambda side: side.node.device),
        *both(lambda side: time_text(side.time_us)),
        *both(lambda side: "-" if side.stored_bytes is None else size_text(side.stored_bytes)),
        *both(lambda side: "-" if side.together is None else str(1 + len(side.together))),
    ]


def _side_as_json(side: PlannedNode | None) -> dict[str, Any] | None:
    if side is None:
        return None
    together = None if side.together is None else sorted(side.together)
    return {
        "number": side.node.number,
        "device": side.node.device,
        "time_us": side.time_us,
        "stored_bytes": side.stored_bytes,
        "together": together,
    }
