"""How long a schedule will take, before it runs: of each split when it begins, copies and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from heliograph_proto.graph import Graph
from heliograph_server.core.scheduling.between import ahead_of
from heliograph_server.core.scheduling.costs import Costs
from heliograph_server.core.scheduling.model import Schedule, Split
from heliograph_server.core.scheduling.order import Clock, clocks


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """In seconds."""

    #: After the run did.
    began_s: float
    #: Until it has all that it needs.
    copy_s: float
    compute_s: float

    @property
    def ended_s(self) -> float:
        return self.began_s + self.copy_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a run."""

    splits: tuple[SplitPrediction, ...]
    #: Of one that is alone: until the last split has ended.
    seconds: float
    #: What of a device's computing, or of a way's bytes, takes longest in a run: with many runs under way one
    #: ends each time this has passed.
    stage_s: float

    def every_s(self, pipeline: int) -> float:
        """How often a run ends where so many may be under way at once."""
        return self.seconds if pipeline <= 1 else max(self.stage_s, self.seconds / pipeline)


def predict(graph: Graph, schedule: Schedule, costs: Costs) -> Prediction:
    """Devices run their splits in order; splits of different ones overlap where `clocks` lets them, and
    copies ahead overlap with the split before."""
    ended = clocks(graph, schedule)
    ahead = ahead_of(graph, schedule, ended)
    found: list[SplitPrediction] = []
    for number, split in enumerate(schedule.splits):
        found.append(_predict_split(number, split, ended[number], ahead.get(number, {}), costs, found))
    total = max((one.ended_s for one in found), default=0.0)
    return Prediction(tuple(found), total, _stage(schedule, costs, found))


def _predict_split(
    number: int,
    split: Split,
    needed: Clock,
    ahead: Mapping[int, int],
    costs: Costs,
    before: list[SplitPrediction],
) -> SplitPrediction:
    """`before`: the splits before this one; `ahead`: the values that are copied while one of these runs."""
    began = max((before[other].ended_s for other in needed if other >= 0), default=0.0)
    late = costs.copies(copy for copy in split.copies if copy.value not in ahead)
    waits = 0.0
    if ahead:
        earlier = before[next(iter(ahead.values()))]
        early = costs.copies(copy for copy in split.copies if copy.value in ahead)
        waits = max(0.0, earlier.began_s + earlier.copy_s + early - began)
    compute = float(costs.nodes[split.device, list(split.nodes)].sum())
    return SplitPrediction(began, waits + late, compute)


def _stage(schedule: Schedule, costs: Costs, found: list[SplitPrediction]) -> float:
    computing: Counter[int] = Counter()
    copying: Counter[tuple[int, int]] = Counter()
    for split, predicted in zip(schedule.splits, found, strict=True):
        computing[split.device] += predicted.compute_s  # type: ignore[assignment]
        for copy in split.copies:
            there = copy.source, copy.destination
            copying[there] += copy.size_bytes * costs.seconds_per_byte(*there)  # type: ignore[assignment]
    return max([*computing.values(), *copying.values()], default=0.0)
