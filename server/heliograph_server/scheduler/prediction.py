"""The predicted time of a schedule: when each split begins, copies and computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.scheduler.costs import Costs
from heliograph_server.scheduler.model import Schedule, Split
from heliograph_server.scheduler.split_memory import ahead_of
from heliograph_server.scheduler.splits import Clock, clocks


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """Times of one split, in seconds."""

    #: After the start of the run.
    began_s: float
    #: Until it has all of its inputs.
    copy_s: float
    compute_s: float

    @property
    def ended_s(self) -> float:
        return self.began_s + self.copy_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of a run."""

    splits: tuple[SplitPrediction, ...]
    #: For a single run: until the last split has ended.
    seconds: float
    #: The longest time that a run occupies one device or one link. With many runs in flight, a run
    #: ends after each such time.
    stage_s: float

    def every_s(self, pipeline: int) -> float:
        """Return the interval at which runs end, if up to `pipeline` runs may be in flight."""
        return self.seconds if pipeline <= 1 else max(self.stage_s, self.seconds / pipeline)


def predict(graph: Graph, schedule: Schedule, costs: Costs) -> Prediction:
    """Predict the times of a run.

    Devices run their splits in order. Splits of different devices overlap where `clocks` lets them,
    and copies ahead overlap with the split before. Inputs are sent to all devices when the run
    begins. The run is over when each remote device has reported its end, with its outputs.
    """
    ended = clocks(graph, schedule)
    ahead = ahead_of(graph, schedule, ended)
    transfers = _RunTransfers(graph, schedule)
    found: list[SplitPrediction] = []
    total = 0.0
    for number, split in enumerate(schedule.splits):
        needed, early = ended[number], ahead.get(number, {})
        arrival = (
            costs.origin_seconds(split.device, transfers.sent[number]) if transfers.reads[number] else 0.0
        )
        found.append(_predict_split(split, needed, early, costs, found, arrival))
        total = max(total, found[-1].ended_s + costs.origin_seconds(split.device, transfers.returned[number]))
    return Prediction(tuple(found), total, _stage(schedule, costs, found, transfers))


class _RunTransfers:
    """Bytes of inputs and outputs, by split."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        returned = {port.value for port in graph.outputs}
        sent: dict[int, int] = {}
        present: set[tuple[int, int]] = set()
        #: True if it reads any input.
        self.reads: list[bool] = []
        #: Bytes of all inputs that its device has by then.
        self.sent: list[int] = []
        self.returned: list[int] = []
        inputs = {value for value, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT}
        for split in schedule.splits:
            read = inputs.intersection(split.inputs)
            new = [value for value in read if (value, split.device) not in present]
            present.update((value, split.device) for value in new)
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
    arrival_s: float,
) -> SplitPrediction:
    """Predict one split. `before` is the predictions of the earlier splits, `ahead` maps each value
    copied ahead to the split during which it is copied, and `arrival_s` is when inputs arrive."""
    began = max((before[other].ended_s for other in needed if other >= 0), default=0.0)
    late = costs.copies(copy for copy in split.copies if copy.value not in ahead)
    waits = max(0.0, arrival_s - began)
    if ahead:
        earlier = before[next(iter(ahead.values()))]
        early = costs.copies(copy for copy in split.copies if copy.value in ahead)
        waits = max(waits, earlier.began_s + earlier.copy_s + early - began)
    compute = float(costs.nodes[split.device, list(split.nodes)].sum())
    return SplitPrediction(began, waits + late, compute)


def _stage(schedule: Schedule, costs: Costs, found: list[SplitPrediction], transfers: _RunTransfers) -> float:
    computing: defaultdict[int, float] = defaultdict(float)
    copying: defaultdict[tuple[int, int], float] = defaultdict(float)
    for device, size_bytes in transfers.total_sent.items():
        copying[-1, device] = size_bytes * costs.origin_seconds_per_byte(device)
    for split, size_bytes in zip(schedule.splits, transfers.returned, strict=True):
        copying[split.device, -1] += size_bytes * costs.origin_seconds_per_byte(split.device)
    for split, predicted in zip(schedule.splits, found, strict=True):
        computing[split.device] += predicted.compute_s
        for copy in split.copies:
            pair = copy.source, copy.destination
            copying[pair] += copy.size_bytes * costs.seconds_per_byte(*pair)
    return max([*computing.values(), *copying.values()], default=0.0)
