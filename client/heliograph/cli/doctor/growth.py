"""Transfers of growing sizes, until one takes long enough to tell a transport's rate, in a bounded
time.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from heliograph.cli.doctor.measurements import Rate

#: The first transfer over a network that may be slow, and the largest one.
FIRST_BYTES = 64 * 2**10
LARGEST_BYTES = 64 * 2**20
#: How long one direction is measured: these seconds and round trips, and no longer than the second
#: value.
DIRECTION_SECONDS = 0.5
MOST_DIRECTION_SECONDS = 1.0
ADDED_ROUND_TRIPS = 10
#: The least time of a transfer from which its rate is known: in seconds, and in round trips.
LONG_ENOUGH = 0.05
LONG_ENOUGH_ROUND_TRIPS = 5
#: The least time that a transfer is counted with, so that they end even if the clock stands still.
SHORTEST_SECONDS = 1e-4
#: How many times the size of one transfer the next one may have.
GROWTH = 4


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of transfers in one direction of a transport."""

    first_bytes: int = FIRST_BYTES
    most_bytes: int = LARGEST_BYTES
    #: The cost of each transfer, whatever its size.
    round_trip_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The most time for all transfers."""
        return min(DIRECTION_SECONDS + ADDED_ROUND_TRIPS * self.round_trip_seconds, MOST_DIRECTION_SECONDS)

    def next_bytes(self, size_bytes: int, seconds: float, left_seconds: float) -> int | None:
        """Return the size of the transfer after one that took `seconds`, or None if the time is
        over.

        The rate of a larger transfer is assumed to be the same, so that it ends within the time
        that is left.
        """
        fits = int(size_bytes * left_seconds / seconds)
        if fits < size_bytes:
            return None
        is_long = seconds >= max(LONG_ENOUGH, LONG_ENOUGH_ROUND_TRIPS * self.round_trip_seconds)
        grown = min(size_bytes * GROWTH, fits, self.most_bytes)
        return size_bytes if is_long or grown < 2 * size_bytes else grown


def grow(transfer: Callable[[int], float], growth: Growth) -> Rate:
    """Run transfers of growing sizes and return the rate of the largest, by the median of their
    times.

    `transfer` returns the seconds that a transfer of a size takes.
    """
    size: int | None = min(growth.first_bytes, growth.most_bytes)
    left, times = growth.seconds, dict[int, list[float]]()
    while size is not None:
        seconds = max(transfer(size), 1e-9)
        times.setdefault(size, []).append(seconds)
        left -= max(seconds, SHORTEST_SECONDS)
        size = growth.next_bytes(size, seconds, left)
    largest = max(times)
    return Rate(largest, statistics.median(times[largest]), len(times[largest]))
