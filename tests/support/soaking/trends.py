"""Trends of samples: a decision whether a series grows, by statistics that outliers do not move.

The slope is the median of the slopes of all pairs of samples: Theil (1950) and Sen (1968). Its
confidence limit is that of the test of Mann (1945) and Kendall (1975) with the correction for ties,
as in Gilbert, "Statistical Methods for Environmental Pollution Monitoring" (1987), sections 16.4
and 16.5. The limit is above zero exactly if the test finds an increase at that level.

The test takes samples as independent. Samples of a process are not: a cache that fills, or an
allocator that keeps its largest size, rises for a while and then stays. So a series grows only if
its whole and its later half both rise, each by more than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

#: The probability that noise without a trend is taken for an increase, in a whole series.
LEVEL = 0.001
#: The same for the later half, which decides between growth that goes on and growth that has ended.
LATER_LEVEL = 0.05
#: The fewest samples of a half: fewer show no increase at these levels.
LEAST_SAMPLES = 8
HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class Bound:
    """The most that a series may rise: by the hour, and at least `slack` in any time."""

    per_hour: float
    slack: float

    def over(self, seconds: float) -> float:
        """Return the most that a series may rise in this time."""
        return max(self.slack, self.per_hour * seconds / HOUR_SECONDS)


@dataclass(frozen=True)
class Trend:
    """The slope of a series, by the second."""

    slope: float
    #: The lower confidence limit of the slope.
    least: float
    #: Kendall's tau-a: -1, always falling, to 1, always rising.
    tau: float
    seconds: float
    count: int


def trend(times: Sequence[float], values: Sequence[float], level: float = LEVEL) -> Trend:
    """Return the slope of at least two samples, with its limit at this level."""
    at, of = np.asarray(times, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(at), 1)
    rises = of[second] - of[first]
    slopes = np.sort(rises / (at[second] - at[first]))
    score = float(np.sign(rises).sum())
    n = len(at)
    ties = np.unique(of, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    width = NormalDist().inv_cdf(1 - level) * math.sqrt(variance)
    rank = math.floor((len(slopes) - width) / 2) - 1
    least = float(slopes[rank]) if rank >= 0 else -math.inf
    return Trend(float(np.median(slopes)), least, score / len(slopes), float(at[-1] - at[0]), n)


@dataclass(frozen=True)
class Judgement:
    """The trend of a series, that of its later half, and the decision."""

    whole: Trend
    later: Trend
    bound: Bound

    @property
    def grows(self) -> bool:
        """True if the series rises by more than its bound, in whole and in its later half."""
        return all(one.least * one.seconds > self._most(one) for one in (self.whole, self.later))

    def _most(self, found: Trend) -> float:
        """Return the bound for a part; a half has its share of the slack."""
        share = found.seconds / self.whole.seconds
        return Bound(self.bound.per_hour, self.bound.slack * share).over(found.seconds)


def judge(times: Sequence[float], values: Sequence[float], bound: Bound) -> Judgement:
    """Judge a series of at least `2 * LEAST_SAMPLES` samples. Raises ValueError for fewer."""
    if len(times) < 2 * LEAST_SAMPLES:
        raise ValueError(f"{len(times)} samples, fewer than {2 * LEAST_SAMPLES}")
    half = len(times) // 2
    return Judgement(trend(times, values), trend(times[half:], values[half:], LATER_LEVEL), bound)
