"""How long a schedule will take, before it runs: of each split when it begins, copies and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.scheduler.costs import Costs
from heliograph_server.scheduler.model import Schedule, Split
from heliograph_server.scheduler.split_memory import ahead_of
from heliograph_server.scheduler.splits import Clock, clocks


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
    copies ahead overlap with the split before. Inputs are sent to all devices when the run begins; it is over
    when what is elsewhere has told of its end, with its outputs."""
    ended = clocks(graph, schedule)
    ahead = ahead_of(graph, schedule, ended)
    travels = _Travels(graph, schedule)
    found: list[SplitPrediction] = []
    total = 0.0
    for number, split in enumerate(schedule.splits):
        needed, early = ended[number], ahead.get(number, {})
        comes = costs.comes(split.device, travels.sent[number]) if travels.reads[number] else 0.0
        found.append(_predict_split(split, needed, early, costs, found, comes))
        total = max(total, found[-1].ended_s + costs.comes(split.device, travels.returned[number]))
    return Prediction(tuple(found), total, _stage(schedule, costs, found, travels))


class _Travels:
    """Bytes of inputs and outputs, by split."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        returned = {port.value for port in graph.outputs}
        sent: dict[int, int] = {}
        there: set[tuple[int, int]] = set()
        #: Whether it reads any input.
        self.reads: list[bool] = []
        #: Of all inputs that its device has by then.
        self.sent: list[int] = []
        self.returned: list[int] = []
        inputs = {value for value, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT}
        for split in schedule.splits:
            read = inputs.intersection(split.inputs)
            new = [value for value in read if (value, split.device) not in there]
            there.update((value, split.device) for value in new)
            new_bytes = sum([graph.type_of(value).nbytes for value in new])
            sent[split.device] = sent.get(split.device, 0) + new_bytes
            self.reads.append(bool(read))
            self.sent.append(sent[split.device])
            made = returned.intersection(split.outputs)
            self.returned.append(sum([graph.type_of(value).nbytes for value in made]))
        #: By device.
        self.total_sent = sent


def _predict_split(
    split: Split,
    needed: Clock,
    ahead: Mapping[int, int],
    costs: Costs,
    before: list[SplitPrediction],
    comes_s: float,
) -> SplitPrediction:
    """`before`: the splits before this one; `ahead`: the values that are copied while one of these runs;
    `comes_s`: when inputs are there."""
    began = max((before[other].ended_s for other in needed if other >= 0), default=0.0)
    late = costs.copies(copy for copy in split.copies if copy.value not in ahead)
    waits = max(0.0, comes_s - began)
    if ahead:
        earlier = before[next(iter(ahead.values()))]
        early = costs.copies(copy for copy in split.copies if copy.value in ahead)
        waits = max(waits, earlier.began_s + earlier.copy_s + early - began)
    compute = float(costs.nodes[split.device, list(split.nodes)].sum())
    return SplitPrediction(began, waits + late, compute)


def _stage(schedule: Schedule, costs: Costs, found: list[SplitPrediction], travels: _Travels) -> float:
    computing: Counter[int] = Counter()
    copying: Counter[tuple[int, int]] = Counter()
    for device, size_bytes in travels.total_sent.items():
        copying[-1, device] = size_bytes * costs.origin_seconds_per_byte(device)  # type: ignore[assignment]
    for split, size_bytes in zip(schedule.splits, travels.returned, strict=True):
        copying[split.device, -1] += size_bytes * costs.origin_seconds_per_byte(split.device)  # type: ignore[assignment]
    for split, predicted in zip(schedule.splits, found, strict=True):
        computing[split.device] += predicted.compute_s  # type: ignore[assignment]
        for copy in split.copies:
            there = copy.source, copy.destination
            copying[there] += copy.size_bytes * costs.seconds_per_byte(*there)  # type: ignore[assignment]
    return max([*computing.values(), *copying.values()], default=0.0)
