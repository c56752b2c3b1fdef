"""The times of a plan's runs in a few numbers, whatever the number of runs. Pure.

Times are counted in logarithmic buckets, 1/16 of an octave wide, so that quantiles of the runs
between two looks follow from the difference of two counts. A run costs a fraction of a microsecond.

One thread at a time notes; any thread looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import log2

from heliograph_proto.plans import RunTime

#: Buckets in an octave.
STEPS = 16
#: Longer runs count as this, about an hour, so there are at most 512 buckets.
MOST_US = 2.0**32


class PlanTimes:
    """The runs of one copy of a plan since it was compiled."""

    __slots__ = ("_counts", "waited_us")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        #: The time that runs waited in the queue of their device, and for their turn.
        self.waited_us = 0.0

    def __repr__(self) -> str:
        return f"<PlanTimes of {sum(self._counts.values())} runs>"

    def note(self, took_us: float, runs: int = 1) -> None:
        """Count runs that took so long each."""
        bucket = int(log2(took_us if took_us < MOST_US else MOST_US) * STEPS) if took_us > 1 else 0
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + runs

    def counts(self) -> dict[int, int]:
        """The number of runs by bucket."""
        return self._counts.copy()


def run_times(parts: Iterable[PlanTimes]) -> tuple[RunTime, ...]:
    """The times of all runs of a plan's copies, in ascending order."""
    total = Counter[int]()
    for one in parts:
        total.update(one.counts())
    return tuple(RunTime(2 ** ((bucket + 0.5) / STEPS), total[bucket]) for bucket in sorted(total))
