"""The times of a plan's runs in a few numbers."""

from __future__ import annotations

import random

import pytest

from heliograph.cli.common.plan_view import quantile_us
from heliograph_server.plans.plan_times import PlanTimes, run_times


def test_quantiles_of_the_counts_are_those_of_the_runs() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    took = sorted(chance.lognormvariate(5.0, 2.0) + 1 for _ in range(2_000))
    times = PlanTimes()
    for one in took:
        times.note(one)
    counts = {one.took_us: one.runs for one in run_times([times])}
    assert sum(counts.values()) == len(took)
    for part in (0.1, 0.5, 0.99):
        assert quantile_us(counts, part) == pytest.approx(took[int(part * len(took)) - 1], rel=0.05)


def test_many_runs_take_a_bounded_number_of_counts() -> None:
    times = PlanTimes()
    for took in (0.0, -1.0, 1e-9, 1.0, float("inf"), *(1.01**power for power in range(5_000))):
        times.note(took)
    assert len(run_times([times])) <= 513
    assert sum(one.runs for one in run_times([times])) == 5_005


def test_steps_of_a_loop_and_copies_of_a_plan_add_up() -> None:
    one, other = PlanTimes(), PlanTimes()
    one.note(100.0, runs=7)
    other.note(100.0)
    other.note(3.0)
    found = run_times([one, other])
    assert [it.runs for it in found] == [1, 8] and found[0].took_us < found[1].took_us
