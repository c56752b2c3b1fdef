"""Schedules of random graphs over random devices, checked on symbols: thousands, no device runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from scheduling_graphs import Checker, random_problem

from heliograph_proto.errors import HeliographError, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from heliograph_server.scheduler.schedule import schedule

BATCHES, BATCH = 6, 500


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_graphs_over_random_devices_have_the_results_of_the_unsplit_graph(batch: int) -> None:
    refused: Counter[type[HeliographError]] = Counter()
    met: Counter[str] = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        problem = random_problem(seed)
        try:
            found = schedule(problem)
        except (InvalidArgumentError, UnsupportedError, OutOfMemoryError) as error:
            refused[type(error)] += 1
            continue
        try:
            found = replace(found, ahead_bytes=Random(seed).choice((None, 0, 100)))
            checker = Checker(problem, found)
            checker.check(Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met["ahead"] += bool(checker.ahead)
        met["rows"] += any(move.rows for one in checker.moves for move in one.copies)
    assert sum(refused.values()) < BATCH / 2, f"too few are checked: {refused}"
    assert met["ahead"] > BATCH / 10 and met["rows"] > 2, f"too few have what is checked: {met}"
