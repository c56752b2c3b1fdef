"""The predictions in a plan's report: of the run, its splits, its copies and the links that they
use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from heliograph_proto.graph import Graph
from heliograph_proto.plans import LinkReport, PlanReport, SplitReport
from heliograph_server.scheduler.costs import Costs
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.prediction import SplitPrediction, predict


def with_prediction(report: PlanReport, graph: Graph, schedule: Schedule) -> PlanReport:
    """Return the report with the times that were predicted when the plan was made, if any."""
    if schedule.costs is None or len(report.splits) != len(schedule.splits):
        return report
    found = predict(graph, schedule, schedule.costs)
    pairs = zip(report.splits, found.splits, strict=True)
    return replace(
        report,
        splits=tuple(_split(one, expected, schedule.costs) for one, expected in pairs),
        predicted_us=found.seconds * 1e6,
        links=tuple(_links(schedule, schedule.costs)),
    )


def _split(report: SplitReport, found: SplitPrediction, costs: Costs) -> SplitReport:
    copies = tuple(
        replace(one, predicted_us=costs.copy(one.source, report.device, one.size_bytes) * 1e6)
        for one in report.copies
    )
    return replace(
        report,
        copies=copies,
        predicted_copy_us=found.copy_s * 1e6,
        predicted_compute_us=found.compute_s * 1e6,
        predicted_began_us=found.began_s * 1e6,
    )


def _links(schedule: Schedule, costs: Costs) -> Iterator[LinkReport]:
    """Yield the links that inputs, outputs and copies use, each once."""
    pairs = [(copy.source, copy.destination) for split in schedule.splits for copy in split.copies]
    used = [costs.origins[one.device] for one in schedule.splits if one.device in costs.origins]
    used += [costs.links[pair] for pair in dict.fromkeys(pairs) if pair in costs.links]
    for one in dict.fromkeys(used):
        here, there = one.sites
        yield LinkReport(here, there, one.round_trip_s * 1e6, one.bytes_per_s, one.is_measured)
