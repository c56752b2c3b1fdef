"""Quantiles of durations from counts in logarithmic buckets. Pure.

A bucket is 1/16 of an octave wide, so a quantile is right within 5 %. Counts of several moments add
up, and a bounded dictionary has them, whatever the number of runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

#: Buckets in an octave.
STEPS = 16
#: Durations outside are counted as these, in microseconds.
LEAST_US, MOST_US = 1.0, 1e12


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    return math.floor(STEPS * math.log2(min(max(seconds * 1e6, LEAST_US), MOST_US)))


def quantile_us(counts: Mapping[int, int], part: float) -> float:
    """The duration in microseconds that this part of the durations does not exceed; 0 without
    any."""
    left = part * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return float(2 ** ((bucket + 0.5) / STEPS))
    return 0.0


def quantile_of_bounds(
    before: Sequence[float], now: Sequence[float], bounds: Sequence[str], part: float
) -> float:
    """The least upper bound in seconds that this part of the numbers between two cumulative counts
    does not exceed; 0 without any, and the largest finite bound for those above."""
    counts = [late - early for early, late in zip(before, now, strict=True)]
    if not counts or counts[-1] <= 0:
        return 0.0
    place = next(place for place, count in enumerate(counts) if count >= part * counts[-1])
    finite = [float(one) for one in bounds if one != "+Inf"]
    return finite[min(place, len(finite) - 1)]


def summed(parts: Sequence[Counter[int]]) -> Counter[int]:
    """The sum of counts."""
    found: Counter[int] = Counter()
    for one in parts:
        found.update(one)
    return found
