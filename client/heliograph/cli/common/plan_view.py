"""Plans in `heliograph top`: a table of them, and one of them alone, from the last looks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from heliograph.cli.common.columns import SPARKS, Column, Line, Row, bar, sparks, table
from heliograph.cli.common.text import plain
from heliograph.explain.pictures.words import time_text
from heliograph_proto.plans import PlanList, PlanReport, PlanStatus, Route, RunTime, SplitReport
from heliograph_proto.types import size_text

#: A session and the handle of one of its plans; 0: all.
Key: TypeAlias = tuple[int, int]
#: A plan at some time of the daemon, in seconds.
Look: TypeAlias = tuple[float, PlanStatus]

PLANS = (
    Column("plan"),
    Column("session", 4),
    Column("devices", 3),
    Column("nodes", 6),
    Column("runs", 5),
    Column("a second"),
    Column("p50"),
    Column("p99", 1),
    Column("waits", 2),
    Column("holds", 3),
    Column("state"),
    Column("lately", 2),
)
DEVICES = (
    Column("device"),
    Column("of the run"),
    Column("computes"),
    Column("copies"),
    Column("weights", 2),
    Column("variables", 1),
    Column("computing", 1),
)
PARTS = (
    Column("slowest parts"),
    Column("of the run"),
    Column("time"),
    Column("predicted", 1),
    Column("about", 2),
)
#: The least lines for parts, however low the screen.
LEAST_PARTS = 3


@dataclass(slots=True)
class PlanLooks:
    """The last looks at plans."""

    #: The plans of the last answer.
    asked: Key = (0, 0)
    left_out: int = 0
    plans: dict[Key, list[Look]] = field(default_factory=dict)
    _incarnation: bytes = b""

    def add(self, asked: Key, found: PlanList) -> None:
        """Take in an answer. Plans that it lacks are forgotten, all of them if the daemon is
        another one."""
        known = self.plans if found.incarnation == self._incarnation else {}
        looks = {(one.session_number, one.plan): (found.uptime_seconds, one) for one in found.plans}
        self.plans = {key: [*known.get(key, ()), one][-SPARKS:] for key, one in looks.items()}
        self.asked, self.left_out, self._incarnation = asked, found.left_out, found.incarnation


def plan_rows(looks: PlanLooks, marked: Key, width: int, room: int | None = None) -> list[Line]:
    """A table of the plans, as many as there is room for, and the marked one."""
    keys = list(looks.plans)
    place = keys.index(marked) if marked in keys else 0
    count = len(keys) if room is None or len(keys) <= room else max(1, room - 1)
    first = max(0, place - count + 1)
    rows = (_plan_row(looks.plans[key]) for key in keys[first : first + count])
    lines = table(PLANS, rows, width, marked=place - first if marked in keys else None)
    if hidden := len(keys) - min(count, len(keys)) + looks.left_out:
        lines.append((f"and {hidden:,} more", ""))
    return lines


def _plan_row(looks: Sequence[Look]) -> Row:
    one, times, rates = looks[-1][1], _lately(looks), _rates(looks)
    return [
        str(one.plan),
        str(one.session_number),
        ", ".join(one.devices),
        f"{one.nodes:,}",
        f"{one.runs:,}",
        f"{rates[-1]:,.0f}" if rates else "",
        time_text(quantile_us(times, 0.5)),
        time_text(quantile_us(times, 0.99)),
        time_text(_wait_us(looks)),
        size_text(one.kept_bytes),
        _state(one, rates),
        sparks(rates),
    ]


def plan_view(looks: PlanLooks, session: int, plan: int, width: int, room: int | None) -> list[Line]:
    """Everything about one plan: its rates and times lately, and which part of a run is slow."""
    found = looks.plans.get((session, plan))
    if not found:
        is_gone = looks.asked == (session, plan)
        words = "is gone" if is_gone else "is looked up"
        return [("", ""), (f"plan {plan} of session {session} {words}", "warning" if is_gone else "quiet")]
    one = found[-1][1]
    lines: list[Line] = [("", ""), (f"plan {plan} of session {session}", "header")]
    lines += [(f"{name:10} {value}", "") for name, value in _facts(found) if value]
    if one.report is None:
        return lines
    parts = table(DEVICES, _device_rows(one.report), width)
    rest = None if room is None else max(LEAST_PARTS, room - len(lines) - len(parts) - 3)
    rows = list(_part_rows(one.report))
    shown = len(rows) if rest is None else rest
    parts += table(PARTS, rows[:shown], width)
    if len(rows) > shown:
        parts.append((f"and {len(rows) - shown:,} that are faster", ""))
    return lines + parts


def _facts(looks: Sequence[Look]) -> list[tuple[str, str]]:
    one, rates, times = looks[-1][1], _rates(looks), _lately(looks)
    rate = rates[-1] if rates else 0.0
    quantiles = f"p50 {time_text(quantile_us(times, 0.5))}, p99 {time_text(quantile_us(times, 0.99))}"
    predicted = f", predicted {time_text(one.predicted_us)}" if one.predicted_us else ""
    return [
        ("state", _state(one, rates)),
        ("devices", plain(", ".join(one.devices))),
        ("graph", f"{one.nodes:,} nodes in {one.splits:,} split{'s'[: one.splits != 1]}"),
        ("runs", f"{one.runs:,}, {rate:,.0f} a second  {sparks(rates)}".rstrip()),
        ("run time", f"{quantiles}, the last {time_text(one.took_us)}{predicted}" if one.runs else ""),
        ("waits", f"{time_text(_wait_us(looks))} a run, in the queue of its device" if one.runs else ""),
        ("memory", _memory(one)),
        ("links", _links(one.report, rate)),
    ]


def _state(one: PlanStatus, rates: Sequence[float]) -> str:
    """Return the present state; a plan that had runs since the look before is between two of
    them."""
    if one.lost:
        return f"lost: {plain(one.lost)}"
    waiting = f", {one.waiting:,} wait" if one.waiting else ""
    if one.loop_steps:
        return f"loop at step {one.loop_step:,} of {one.loop_steps:,}{waiting}"
    if one.running or one.waiting:
        return f"{one.running:,} running{waiting}"
    return "between runs" if rates and rates[-1] else "idle"


def _memory(one: PlanStatus) -> str:
    shares = one.report.devices if one.report is not None else ()
    sizes = {
        "weights": sum(share.weights_bytes for share in shares),
        "variables": sum(share.variables_bytes for share in shares),
    }
    others = "".join(f", {size_text(size)} of {name}" for name, size in sizes.items() if size)
    return f"{size_text(one.kept_bytes)} of its own{others}"


def _links(report: PlanReport | None, rate: float) -> str:
    """The bytes that a run copies between hosts."""
    copies = [copy for one in report.splits for copy in one.copies] if report is not None else []
    size = sum(one.size_bytes for one in copies if one.route is not Route.WITHIN)
    at_most = "at most " if any(one.rows_only for one in copies) else ""
    return f"{at_most}{size_text(size)} a run, {size_text(round(size * rate))}/s" if size else ""


def _device_rows(report: PlanReport) -> Iterator[Row]:
    whole = _run_us(report)
    for place, one in enumerate(report.devices):
        splits = [split for split in report.splits if split.device == place]
        computes, copies = sum(it.compute_us for it in splits), sum(it.copy_us for it in splits)
        sizes = (one.weights_bytes, one.variables_bytes, one.compute_bytes)
        share = bar((computes + copies) / whole) if whole else ""
        yield [one.name, share, time_text(computes), time_text(copies), *map(size_text, sizes)]


def _part_rows(report: PlanReport) -> Iterator[Row]:
    """Splits, and the copies before them, the slowest first."""
    whole = _run_us(report)
    parts: list[tuple[float, float, str, str]] = []
    for place, one in enumerate(report.splits):
        device = report.devices[one.device].name
        parts.append((one.compute_us, one.predicted_compute_us, f"split {place} on {device}", one.note))
        if one.copies:
            sources = dict.fromkeys(report.devices[copy.source].name for copy in one.copies)
            about = f"{size_text(sum(copy.size_bytes for copy in one.copies))} from {', '.join(sources)}"
            parts.append((one.copy_us, one.predicted_copy_us, f"copies to split {place}", about))
    for took, predicted, name, about in sorted(parts, key=lambda part: -part[0]):
        expected = time_text(predicted) if predicted else ""
        yield [name, bar(took / whole) if whole else "", time_text(took), expected, about]


def _run_us(report: PlanReport) -> float:
    """The time of the last run, from its begin to the end of its last split."""
    return max(map(_end_us, report.splits), default=0.0)


def _end_us(one: SplitReport) -> float:
    return one.began_us + one.copy_us + one.compute_us


# The last looks


def _rates(looks: Sequence[Look]) -> list[float]:
    """Runs a second between each two looks."""
    return [
        max(0, new.runs - old.runs) / (now - before)
        for (before, old), (now, new) in pairwise(looks)
        if now > before
    ]


def _lately(looks: Sequence[Look]) -> Mapping[float, int]:
    """The runs by their time: those since the oldest look, or all if there were none."""
    new, old = (_counts(one.times) for one in (looks[-1][1], looks[0][1]))
    found = {took: runs - old.get(took, 0) for took, runs in new.items()}
    return found if sum(found.values()) > 0 else new


def _counts(times: Sequence[RunTime]) -> dict[float, int]:
    return {one.took_us: one.runs for one in times}


def quantile_us(counts: Mapping[float, int], part: float) -> float:
    """The time in microseconds that this part of the runs does not exceed; 0 without any."""
    left = part * sum(counts.values())
    for took in sorted(counts):
        left -= counts[took]
        if left <= 0:
            return took
    return 0.0


def _wait_us(looks: Sequence[Look]) -> float:
    """The mean wait of a run: of those since the oldest look, or of all if there were none."""
    new, old = looks[-1][1], looks[0][1]
    runs, waited = new.runs - old.runs, new.waited_us - old.waited_us
    return waited / runs if runs > 0 else new.waited_us / max(1, new.runs)
