"""The verdicts of a soak: growth is found in noise, and a failure is explained or is a fault."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
from soaking.clients import Failure
from soaking.disturbances import GRACE_SECONDS, Disturbance
from soaking.trends import LEAST_SAMPLES, LEVEL, Bound, judge, trend

Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"

SAMPLES = 24
TIMES = np.arange(SAMPLES) * 4.0
#: An hour at this rate is far above the noise of a minute and a half.
NOISE, RISE = 1.0, 12.0
BOUND = Bound(per_hour=40.0, slack=4.0)


@pytest.fixture
def noise() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def _line(rise: float) -> Array:
    return rise * TIMES / TIMES[-1]


def test_a_line_has_its_slope() -> None:
    found = trend(TIMES, 3.0 + 0.5 * TIMES)
    assert found.slope == found.least == 0.5
    assert found.tau == 1 and found.seconds == TIMES[-1] and found.count == SAMPLES


def test_a_constant_does_not_grow() -> None:
    found = judge(TIMES, np.full(SAMPLES, 7.0), Bound(0, 0))
    assert found.whole.slope == found.whole.least == found.whole.tau == 0
    assert not found.grows


def test_outliers_do_not_move_the_slope() -> None:
    values = 0.5 * TIMES
    values[[3, 11, 19]] = 1e9
    assert trend(TIMES, values).slope == pytest.approx(0.5)


def test_the_limit_agrees_with_the_test_of_mann_and_kendall(noise: np.random.Generator) -> None:
    # Ten samples, without ties: the variance of Kendall's score is 125.
    for _ in range(300):
        values = noise.normal(size=10) + noise.uniform(0, 0.6) * np.arange(10)
        found = trend(np.arange(10.0), values)
        z = found.tau * 45 / np.sqrt(125)
        if abs(z - 3.09) > 0.2:
            assert (found.least > 0) == (z > 3.09)


def test_noise_rarely_looks_like_growth(noise: np.random.Generator) -> None:
    series = 4000
    found = sum(trend(TIMES, noise.normal(size=SAMPLES)).least > 0 for _ in range(series))
    # Four are to be expected, and 20 come about once in a hundred million runs.
    assert found <= 5 * LEVEL * series


@pytest.mark.parametrize("kind", ["normal", "spikes", "whole numbers", "steps back and forth"])
def test_noise_within_the_slack_does_not_grow(kind: str, noise: np.random.Generator) -> None:
    for _ in range(300):
        match kind:
            case "normal":
                values = noise.normal(size=SAMPLES)
            case "spikes":
                values = noise.standard_cauchy(size=SAMPLES)
            case "whole numbers":
                values = noise.integers(0, 3, SAMPLES).astype(float)
            case _:
                values = np.repeat(noise.integers(0, 3, SAMPLES // 3), 3).astype(float)
        assert not judge(TIMES, values, BOUND).grows


def test_a_leak_in_noise_is_found(noise: np.random.Generator) -> None:
    for _ in range(300):
        assert judge(TIMES, _line(RISE * 2) + noise.normal(size=SAMPLES), BOUND).grows


def test_a_leak_within_the_bound_of_a_long_soak_passes(noise: np.random.Generator) -> None:
    times = np.arange(300) * 9.0
    hours = times / 3600
    assert not judge(times, 0.8 * BOUND.per_hour * hours + noise.normal(size=300), BOUND).grows
    assert judge(times, 1.5 * BOUND.per_hour * hours + noise.normal(size=300), BOUND).grows


def test_what_fills_and_then_stays_rarely_looks_like_growth(noise: np.random.Generator) -> None:
    filled = 100.0 * (1 - np.exp(-TIMES / TIMES[-1] * 12))
    found = 0
    for _ in range(300):
        found += judge(TIMES, filled + noise.normal(size=SAMPLES), BOUND).grows
        step = np.where(noise.integers(2, SAMPLES // 2) > np.arange(SAMPLES), 0.0, 50.0)
        found += judge(TIMES, step + noise.normal(size=SAMPLES), BOUND).grows
    # The later half decides, so one in 3,000 fills is taken for growth. Without the slack, it is one in 20.
    assert found <= 5


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(ValueError, match=f"{2 * LEAST_SAMPLES - 1} samples"):
        judge(TIMES[: 2 * LEAST_SAMPLES - 1], TIMES[: 2 * LEAST_SAMPLES - 1], BOUND)


CUT = Disturbance("cut", frozenset({"alice"}), frozenset({"UnavailableError"}), began=10.0, ended=12.0)
FAILURE = Failure("alice", "run", "UnavailableError", ("UnavailableError", "ConnectionError"), "", 9.0, 11.0)


def test_a_failure_of_its_time_client_and_kind_is_explained() -> None:
    assert CUT.explains(FAILURE)
    assert CUT.explains(replace(FAILURE, began=12.0 + GRACE_SECONDS / 2, ended=20.0))


@pytest.mark.parametrize(
    "other",
    [
        replace(FAILURE, client="bob"),
        replace(FAILURE, classes=("DeadlineExceededError", "WorkError")),
        replace(FAILURE, classes=()),
        replace(FAILURE, began=8.0, ended=9.5),
        replace(FAILURE, began=12.5 + GRACE_SECONDS, ended=20.0),
    ],
)
def test_any_other_failure_is_not(other: Failure) -> None:
    assert not CUT.explains(other)
