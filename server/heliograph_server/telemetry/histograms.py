"""Counts of runs and durations of their phases, cheap enough for every run."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_proto.errors import CancelledError, DeadlineExceededError, HeliographError
from heliograph_server.session.run_timeline import RunRecord

#: In seconds: from a small plan on the CPU to a long training step.
BOUNDS = (
    0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
#: The phases of a run: until its turn, until its inputs are ready, until devices have computed,
#: until its outputs are delivered.
PHASES = ("queue", "input", "compute", "output")


class Histogram:
    """Counts of numbers by upper bound. For one thread at a time."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self._counts)}>"

    def add(self, value: float) -> None:
        """Count a number."""
        if value > 0.0:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value
        else:
            self._counts[0] += 1

    @property
    def sum(self) -> float:
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """The count of numbers up to each bound; the last bound is "+Inf"."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(frozen=True, slots=True)
class RunTotals:
    """The totals of all runs."""

    #: By tenant and outcome.
    runs: dict[tuple[str, str], int]
    #: By phase: the counts by bound, and the sum of seconds.
    phases: dict[str, tuple[list[tuple[str, float]], float]]
    #: The bytes in commands and completions of runs.
    received_bytes: int
    sent_bytes: int


class RunCounter:
    """An observer of runs that counts them, in about a microsecond each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: Counter[tuple[str, str]] = Counter()
        self._queue, self._input, self._compute, self._output = (Histogram() for _ in PHASES)
        self._received_bytes = self._sent_bytes = 0

    def __repr__(self) -> str:
        return f"<RunCounter of {self._runs.total()} runs>"

    def run_ended(self, run: RunRecord) -> None:
        """Count a run."""
        outcome = "ok" if run.error is None else outcome_of(run.error)
        with self._lock:
            self._runs[run.principal.tenant, outcome] += 1
            self._queue.add(run.began - run.came)
            self._input.add(run.had_inputs - run.began)
            self._compute.add(run.computed - run.had_inputs)
            self._output.add(run.ended - run.computed)
            self._received_bytes += run.received_bytes
            self._sent_bytes += run.sent_bytes

    def totals(self) -> RunTotals:
        """The totals so far."""
        with self._lock:
            parts = zip(PHASES, (self._queue, self._input, self._compute, self._output), strict=True)
            phases = {name: (one.cumulative(), one.sum) for name, one in parts}
            return RunTotals(dict(self._runs), phases, self._received_bytes, self._sent_bytes)


def outcome_of(error: HeliographError) -> str:
    """The outcome of a run with an error: "cancelled" by its client, or "failed"."""
    return "cancelled" if isinstance(error, CancelledError | DeadlineExceededError) else "failed"
