"""Counts and times of a loaded model: for the protocol's statistics, and for metrics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from heliograph_server.telemetry.histograms import Histogram
from heliograph_server.telemetry.telemetry import Buckets, ModelFigures

#: The bounds of the histogram of rows of a run.
ROWS = tuple(float(2**power) for power in range(11))
#: The phases of a request: waiting for its run, joining inputs, the run, parting outputs.
PHASES = ("queue", "input", "compute", "output")
#: The most notes of requests that are not counted yet.
MOST_NOTES = 64


@dataclass(slots=True)
class Duration:
    """A number of times, and their sum."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add times of this sum."""
        self.count += count
        self.seconds += seconds

    @property
    def nanoseconds(self) -> int:
        """The sum in nanoseconds."""
        return round(self.seconds * 1e9)


def _durations() -> dict[str, Duration]:
    return {phase: Duration() for phase in PHASES}


@dataclass(slots=True)
class Figures:
    """The statistics of a model so far."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    phases: dict[str, Duration] = field(default_factory=_durations)
    #: The phases of runs but the queue, by their rows.
    by_rows: dict[int, dict[str, Duration]] = field(default_factory=dict)
    rows: int = 0
    runs: int = 0
    #: The time of the last request, in milliseconds since 1970.
    last_ms: int = 0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The seconds of a run."""

    input: float
    compute: float
    output: float


class ModelStatistics:
    """Counts the requests and runs of a model. Thread-safe.

    A request is on its way meanwhile, so it only leaves a note, and many notes are counted
    together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()
        self._seconds = {phase: Histogram() for phase in ("request", *PHASES)}
        self._rows = Histogram(ROWS)
        #: The arguments of `ran` and `answered` that are not counted yet.
        self._runs: deque[tuple[int, Sequence[float], RunTimes]] = deque()
        self._answers: deque[tuple[float, bool]] = deque()

    def ran(self, rows: int, queued: Sequence[float], times: RunTimes) -> None:
        """Count a run of so many rows, and of requests that were queued for these seconds."""
        self._runs.append((rows, queued, times))

    def answered(self, seconds: float, *, failed: bool = False) -> None:
        """Count a request that was answered, or failed, after this time."""
        self._figures.last_ms = round(time.time() * 1e3)
        self._answers.append((seconds, failed))
        # Each run has a request, so this bounds the notes of runs too.
        if len(self._answers) >= MOST_NOTES:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Count what was noted. Lock held."""
        while self._runs:
            self._count_run(*self._runs.popleft())
        while self._answers:
            seconds, failed = self._answers.popleft()
            (self._figures.fail if failed else self._figures.success).add(seconds)
            self._seconds["request"].add(seconds)

    def _count_run(self, rows: int, queued: Sequence[float], times: RunTimes) -> None:
        found = self._figures
        found.runs += 1
        found.rows += rows
        self._rows.add(rows)
        of_size = found.by_rows.setdefault(rows, _durations())
        parts = {"input": times.input, "compute": times.compute, "output": times.output}
        for phase, seconds in parts.items():
            found.phases[phase].add(seconds * len(queued), len(queued))
            of_size[phase].add(seconds)
            self._seconds[phase].add(seconds)
        found.phases["queue"].add(sum(queued), len(queued))
        for seconds in queued:
            self._seconds["queue"].add(seconds)

    def read(self) -> Figures:
        """Return a copy of the statistics so far."""
        with self._lock:
            self._count()
            return deepcopy(self._figures)

    def figures(self, model: str, version: str, waiting: int) -> ModelFigures:
        """Return the figures for metrics."""
        with self._lock:
            self._count()
            requests = {"ok": self._figures.success.count, "failed": self._figures.fail.count}
            seconds: dict[str, Buckets] = {
                phase: (one.cumulative(), one.sum) for phase, one in self._seconds.items()
            }
            rows = self._rows.cumulative(), self._rows.sum
        return ModelFigures(model, version, requests, waiting, seconds, rows)
