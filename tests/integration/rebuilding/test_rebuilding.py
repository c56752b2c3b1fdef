"""Plans that are placed again when a device is lost: results are those of undisturbed runs, bit for
bit."""

from __future__ import annotations

import pytest
from losing import (
    ALL,
    PINS,
    SECONDS,
    Losable,
    inputs,
    same,
    stages,
    summing,
    undisturbed,
)

import heliograph as hg


def test_a_run_after_a_loss_gives_what_it_would_have_given(pool: Losable, session: hg.Session) -> None:
    given = inputs(3, (4, 64))
    expected = undisturbed(stages(), given)
    plan = session.compile(stages(), ALL, pins=PINS, on_loss="rebuild")
    assert plan.devices == ("fake0", "fake1", "fake2")
    assert same(plan.run(x=given[0], timeout=SECONDS)["y"], expected[0])
    pool.lose("fake1")
    assert same(plan.run(x=given[1], timeout=SECONDS)["y"], expected[1])
    assert "fake1" not in plan.devices
    [rebuild] = plan.rebuilds
    assert rebuild.lost == ("fake1",) and "it was pulled out" in rebuild.reason and rebuild.repeated == 1
    assert "fake1" not in str(plan.explain())
    assert same(plan.run(x=given[2], timeout=SECONDS)["y"], expected[2])
    assert len(plan.rebuilds) == 1


def test_a_run_that_is_under_way_is_repeated(pool: Losable, session: hg.Session) -> None:
    [given] = inputs(1, (4, 64))
    plan = session.compile(stages(), ALL, pins=PINS, on_loss="rebuild")
    gate = pool.hold("fake1")
    run = plan.submit(x=given, timeout=SECONDS)
    assert gate.entered.wait(SECONDS)
    pool.lose("fake1")
    assert same(run.result()["y"], undisturbed(stages(), [given])[0])


def test_runs_of_a_pipeline_are_repeated_in_order(pool: Losable, session: hg.Session) -> None:
    given = inputs(8, (4, 64))
    plan = session.compile(stages(), ALL, pins=PINS, pipeline=3, on_loss="rebuild")
    gate = pool.hold("fake1")
    runs = [plan.submit(x=one, timeout=SECONDS) for one in given]
    assert gate.entered.wait(SECONDS)
    pool.lose("fake1")
    found = [one.result()["y"] for one in runs]
    assert all(same(*pair) for pair in zip(found, undisturbed(stages(), given), strict=True))
    assert len(plan.rebuilds) == 1


def test_variables_go_on_from_the_checkpoint_and_the_runs_since(pool: Losable, session: hg.Session) -> None:
    given = inputs(6)
    expected = undisturbed(summing(), given)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    for one in given[:2]:
        plan.run(x=one)
    checkpoint = plan.checkpoint()
    assert set(checkpoint) == {"total"} and checkpoint.nbytes == 256
    for one in given[2:4]:
        plan.run(x=one)
    pool.lose(plan.device)
    found = [plan.run(x=one, timeout=SECONDS)["y"] for one in given[4:]]
    assert same(found[0], expected[4]) and same(found[1], expected[5])
    assert plan.rebuilds[0].replayed == 2


def test_without_a_checkpoint_a_changed_variable_is_not_lost_silently(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(2)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="no checkpoint") as refusal:
        plan.run(x=given[1], timeout=SECONDS)
    assert "plan.checkpoint()" in refusal.value.advice


def test_variables_that_no_run_has_changed_need_no_checkpoint(pool: Losable, session: hg.Session) -> None:
    given = inputs(2)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    pool.lose(plan.device)
    found = [plan.run(x=one, timeout=SECONDS)["y"] for one in given[:1]]
    assert same(found[0], undisturbed(summing(), given)[0])


def test_without_survivors_the_loss_is_raised_with_advice(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(stages(), "fake1", on_loss="rebuild")
    pool.lose("fake1")
    with pytest.raises(hg.DeviceLostError, match="none of its devices is left: fake1") as refusal:
        plan.run(x=inputs(1, (4, 64))[0], timeout=SECONDS)
    assert "more devices" in refusal.value.advice
