"""Figures of ours beside those of a peer or a limit, measured in the same run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

#: How long both rest before each turn. OpenMP's threads look for more work for some milliseconds after a
#: parallel region (GNU's runtime 300,000 times, about 7 ms), and a turn of the other that begins meanwhile
#: has a processor less. Our threads do so for a tenth of a millisecond, so a rest is no favour to ggml.
REST_SECONDS = 0.02
#: Of the rounds that a benchmark names, the share that is measured; the command sets it.
SHARE = float(os.environ.get("BENCH_SHARE", "1"))
#: The fewest rounds, of which a median can leave one out.
FEWEST = 3


def shared(rounds: int) -> int:
    """Return how many of the rounds are measured: a share of them, but at least three."""
    return min(rounds, max(FEWEST, round(rounds * SHARE)))


@dataclass(frozen=True)
class Figure:
    """One line of the table. `ratio` is ours / peer and is held against `bar`."""

    name: str
    ours: float
    peer: float
    bar: float
    unit: str
    #: The peer or the limit, in words.
    against: str
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def ok(self) -> bool:
        return self.ratio <= self.bar


def seconds_of(call: Callable[[], object], runs: int, warmup: int = 3) -> list[float]:
    """Return the seconds of each of `runs` calls."""
    for _ in range(warmup):
        call()
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def least_computing(call: Callable[[], object], runs: int) -> float:
    """Return the least of the seconds that this thread computes in a call, which other processes on
    the machine disturb little."""
    found = []
    for _ in range(runs):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return min(found)


def rested_turns(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int, runs: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of the runs of two calls, in turns so that a drift of the machine meets
    both, with a rest before each turn, for calls that have threads of their own in this process.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(shared(rounds)):
        for call, seconds in zip((ours, peer), found, strict=True):
            time.sleep(REST_SECONDS)
            seconds += seconds_of(call, runs, warmup=1)
    return found


def paired_medians(
    ours: Callable[[int], list[float]], peer: Callable[[int], list[float]], rounds: int, runs: int
) -> tuple[float, float]:
    """Medians of two things measured in turn, so that a drift of the machine meets both."""
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(shared(rounds)):
        mine += ours(runs)
        theirs += peer(runs)
    return statistics.median(mine), statistics.median(theirs)
