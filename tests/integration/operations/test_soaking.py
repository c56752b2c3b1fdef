"""A planted leak of every kind is found by the samples and the statistic of a soak."""

from __future__ import annotations

import secrets

import pytest
from soaking.plugin import PLANTS
from soaking.runner import soak


@pytest.mark.slow
def test_planted_leaks_are_found() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    report = soak(4.0, seed, plants=[*PLANTS], round_seconds=0.15)
    assert report.growing == {f"daemon.{name}" for name in PLANTS}, report.faults
    assert report.wrong_answers == report.hangs == report.deaths == 0
