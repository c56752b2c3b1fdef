"""How transfers grow until they take long enough to tell a transport's rate, within a bounded time. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from heliograph.cli.doctor.measurements import Rate

#: The first transfer, by a network that may be slow, and the largest one.
FIRST_BYTES = 64 * 2**10
LARGEST_BYTES = 64 * 2**20
#: How long one direction is measured, and the most where round trips are long; so many are added.
ROAD_SECONDS = 0.5
MOST_ROAD_SECONDS = 1.0
ADDED_ROUND_TRIPS = 10
#: From when on a transfer is long enough to tell its rate: in seconds, and in round trips.
LONG_ENOUGH = 0.05
LONG_ENOUGH_ROUND_TRIPS = 5
#: What each transfer takes of the time at least, so that they end even if the clock stands still.
SHORTEST_SECONDS = 1e-4
#: A transfer may be so many times the one before.
GROWTH = 4


@dataclass(frozen=True, slots=True)
class Growth:
    """How transfers of one way of a transport grow."""

    first_bytes: int = FIRST_BYTES
    most_bytes: int = LARGEST_BYTES
    #: What each costs whatever its size.
    round_trip_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """How long all of them may take."""
        return min(ROAD_SECONDS + ADDED_ROUND_TRIPS * self.round_trip_seconds, MOST_ROAD_SECONDS)

    def next_bytes(self, size_bytes: int, seconds: float, left_seconds: float) -> int | None:
        """The size of the next transfer after one that took so long; None: the time is over.

        A larger one is taken to be no faster than this one, so that it ends within the time that is left.
        """
        fits = int(size_bytes * left_seconds / seconds)
        if fits < size_bytes:
            return None
        is_long = seconds >= max(LONG_ENOUGH, LONG_ENOUGH_ROUND_TRIPS * self.round_trip_seconds)
        grown = min(size_bytes * GROWTH, fits, self.most_bytes)
        return size_bytes if is_long or grown < 2 * size_bytes else grown


def grow(transfer: Callable[[int], float], growth: Growth) -> Rate:
    """Transfers of growing sizes: the rate of the largest, by the median of their times. `transfer` gives the
    seconds of one."""
    size: int | None = min(growth.first_bytes, growth.most_bytes)
    left, times = growth.seconds, dict[int, list[float]]()
    while size is not None:
        seconds = max(transfer(size), 1e-9)
        times.setdefault(size, []).append(seconds)
        left -= max(seconds, SHORTEST_SECONDS)
        size = growth.next_bytes(size, seconds, left)
    largest = max(times)
    return Rate(largest, statistics.median(times[largest]), len(times[largest]))
