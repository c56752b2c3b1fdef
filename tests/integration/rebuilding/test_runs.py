"""Runs over a lost device: those that are repeated, and those that cannot be."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
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

GIVEN = inputs(4, (4, 64))


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(stages(), ALL, pins=PINS, on_loss="rebuild")


def test_other_plans_fail_and_say_which_device_is_lost(pool: Losable, session: hg.Session) -> None:
    plain = session.compile(stages(), ALL, pins=PINS)
    pool.lose("fake1")
    with pytest.raises(hg.DeviceLostError, match="device fake1 is lost"):
        plain.run(x=GIVEN[0])
    assert plain.rebuilds == ()
    with pytest.raises(hg.InvalidArgumentError, match="on_loss is 'mend'"):
        session.compile(stages(), ALL, on_loss="mend")  # type: ignore[arg-type]
    with pytest.raises(hg.InvalidArgumentError, match="journal_bytes"):
        session.compile(stages(), ALL, on_loss="rebuild", journal_bytes=-1)


def test_a_plan_on_devices_that_are_left_is_as_it_was(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(stages(), ["fake2", "fake0"], on_loss="rebuild")
    pool.lose("fake1")
    assert same(plan.run(x=GIVEN[0])["y"], undisturbed(stages(), GIVEN[:1])[0])
    assert plan.rebuilds == ()


def test_the_user_is_told_once(pool: Losable, plan: hg.Plan, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heliograph"):
        pool.lose("fake1")
        for one in GIVEN:
            plan.run(x=one, timeout=SECONDS)
    told = [one.getMessage() for one in caplog.records if "placed again" in one.getMessage()]
    assert len(told) == 1 and "fake1" in told[0] and "fake0, fake2" in told[0] and "repeated: 1" in told[0]


def test_outputs_that_stay_on_the_server_are_made_again(pool: Losable, plan: hg.Plan) -> None:
    gate = pool.hold("fake2")
    run = plan.submit(x=GIVEN[0], fetch=False, timeout=SECONDS)
    assert gate.entered.wait(SECONDS)
    pool.lose("fake2")
    tensor = run.result()["y"]
    assert same(tensor.get(), undisturbed(stages(), GIVEN[:1])[0])


def test_a_tensor_on_a_lost_device_is_gone(pool: Losable, plan: hg.Plan) -> None:
    tensor = plan.run(x=GIVEN[0], fetch=False)["y"]
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError):
        tensor.get(timeout=SECONDS)


def test_a_large_output_that_was_not_read_before_the_loss_is_computed_again(
    pool: Losable, session: hg.Session
) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (300_000,), "f32") * 2.0)
    plan = session.compile(g, ALL, on_loss="rebuild")
    x = np.arange(300_000, dtype=np.float32)
    run = plan.submit(x=x, timeout=SECONDS)
    session.synchronize(SECONDS)
    x_before, x[:] = x.copy(), 0
    pool.lose(plan.device)
    assert np.array_equal(run.result()["y"], x_before * 2)


def test_a_run_of_tensors_is_not_repeated(pool: Losable, session: hg.Session, plan: hg.Plan) -> None:
    tensor = session.put(GIVEN[0], "fake0")
    assert same(plan.run(x=tensor)["y"], undisturbed(stages(), GIVEN[:1])[0])
    pool.lose("fake1")
    with pytest.raises(hg.DeviceLostError, match="an input is a tensor") as refusal:
        plan.run(x=tensor, timeout=SECONDS)
    assert "run it again: the plan was placed again" in refusal.value.advice
    assert same(plan.run(x=tensor, timeout=SECONDS)["y"], undisturbed(stages(), GIVEN[:1])[0])


def test_a_loop_is_repeated_from_its_inputs(pool: Losable, session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (8,), "f32")
    g.output("x", hg.tanh(x * 1.5 + 0.1))
    plan = session.compile(g, ALL, on_loss="rebuild")
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    expected = plan.loop(x=x, steps=50, carry={"x": "x"}).result()["x"]
    pool.devices[plan.device].script.lost_after = 20
    run = plan.loop(x=x, steps=50, carry={"x": "x"}, timeout=SECONDS)
    assert same(run.result()["x"], expected) and run.steps == 50
    assert len(plan.rebuilds) == 1


def test_a_loop_that_was_stopped_is_not_repeated(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    loop = plan.loop(x=GIVEN[0][0], steps=10**9, timeout=SECONDS)
    assert loop.stop()
    loop.result(SECONDS)
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="the loop was stopped"):
        plan.run(x=GIVEN[0][0], timeout=SECONDS)


def test_a_loop_that_was_fed_is_not_repeated(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    loop = plan.loop(x=GIVEN[0][0], steps=10**9, feed="x", timeout=SECONDS)
    assert loop.feed({"x": GIVEN[1][0]}).result(SECONDS) >= 0
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="the loop was fed while it ran"):
        loop.result(SECONDS)


def test_a_feed_that_came_too_late_lets_a_loop_be_repeated(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    x = GIVEN[0][0]
    loop = plan.loop(x=x, steps=2, feed="x", timeout=SECONDS)
    loop.result(SECONDS)
    assert isinstance(loop.feed({"x": x}).exception(SECONDS), hg.LoopEndedError)
    pool.lose(plan.device)
    assert same(plan.run(x=x, timeout=SECONDS)["y"], undisturbed(summing(), [x] * 3)[-1])


def test_what_stop_comes_too_late_for_is_repeated(pool: Losable, session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    x = GIVEN[0][0]
    loop = plan.loop(x=x, steps=2, timeout=SECONDS)
    loop.result(SECONDS)
    assert not loop.stop()
    run = plan.submit(x=x, timeout=SECONDS)
    run.stop()  # no effect: it is no loop
    run.result(SECONDS)
    pool.lose(plan.device)
    assert same(plan.run(x=x, timeout=SECONDS)["y"], undisturbed(summing(), [x] * 4)[-1])


def test_an_observed_run_is_not_repeated(pool: Losable, plan: hg.Plan) -> None:
    gate = pool.hold("fake1")
    run = plan.submit(x=GIVEN[0], taps=["stage0/*"], timeout=SECONDS)
    assert gate.entered.wait(SECONDS)
    pool.lose("fake1")
    with pytest.raises(hg.DeviceLostError, match="observed"):
        run.result(SECONDS)
    assert same(plan.run(x=GIVEN[0], timeout=SECONDS)["y"], undisturbed(stages(), GIVEN[:1])[0])


def test_a_weight_that_was_a_tensor_on_the_lost_device_is_missed(pool: Losable, session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") * g.bound_weight("w", (4,), "f32"))
    weight = session.put(np.ones(4, np.float32), "fake0")
    plan = session.compile(g, ["fake0", "fake1"], weights={"w": weight}, on_loss="rebuild")
    pool.lose("fake0")
    with pytest.raises(hg.MissingContentError, match="'w' was a tensor on device fake0") as refusal:
        plan.run(x=np.ones(4, np.float32), timeout=SECONDS)
    assert "g.weight" in refusal.value.advice


def scaled(session: hg.Session) -> tuple[hg.Plan, hg.Tensor]:
    """A plan on fake0 that sums what it is given times a weight, a tensor on fake1."""
    g = hg.Graph()
    w = g.bound_weight("w", (4,), "f32")
    total = g.variable("total", (4,), "f32")
    g.output("y", hg.assign(total, total + g.input("x", (4,), "f32") * w))
    weight = session.put(np.ones(4, np.float32), "fake1")
    return session.compile(g, ["fake0", "fake1"], weights={"w": weight}, on_loss="rebuild"), weight


def test_runs_are_not_repeated_with_a_weight_that_was_written_since(
    pool: Losable, session: hg.Session
) -> None:
    plan, weight = scaled(session)
    x = np.ones(4, np.float32)
    plan.checkpoint()
    plan.run(x=x, timeout=SECONDS)
    weight.set(2 * x)
    plan.run(x=x, timeout=SECONDS)
    pool.lose("fake0")
    with pytest.raises(hg.DeviceLostError, match="a weight was written since"):
        plan.run(x=x, timeout=SECONDS)


def test_a_checkpoint_after_a_weight_was_written_is_gone_on_from(pool: Losable, session: hg.Session) -> None:
    plan, weight = scaled(session)
    x = np.ones(4, np.float32)
    plan.run(x=x, timeout=SECONDS)
    weight.set(2 * x)
    plan.checkpoint()
    plan.run(x=x, timeout=SECONDS)
    pool.lose("fake0")
    assert plan.run(x=x, timeout=SECONDS)["y"].tolist() == [5] * 4


def test_variables_that_are_tensors_of_the_client_are_refused(session: hg.Session) -> None:
    total = session.empty((64,), "f32", "fake0")
    with pytest.raises(hg.InvalidArgumentError, match="cannot be restored"):
        session.compile(summing(), ALL, variables={"total": total}, on_loss="rebuild")


def test_mending_ends_with_the_time_of_the_run_and_goes_on_with_the_next(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(4)
    expected = undisturbed(summing(), given)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    plan.checkpoint()
    plan.run(x=given[1])
    pool.lose(plan.device)
    gate = pool.hold("fake1")
    with pytest.raises(hg.DeadlineExceededError):
        plan.run(x=given[3], timeout=0.5)
    assert gate.entered.is_set()
    gate.open()
    # The run whose time was over has no effect.
    assert same(plan.checkpoint(timeout=SECONDS)["total"] + np.float32(1), expected[1])
    assert same(plan.run(x=given[2], timeout=SECONDS)["y"], expected[2])
    assert plan.devices == ("fake1",)


def test_a_run_that_is_repeated_has_the_time_that_it_had(pool: Losable, plan: hg.Plan) -> None:
    gate, later = pool.hold("fake1"), pool.hold("fake2")
    run = plan.submit(x=GIVEN[0], timeout=1)
    assert gate.entered.wait(SECONDS)
    pool.lose("fake1")
    with pytest.raises(hg.DeadlineExceededError):
        run.result()
    later.open()
    assert same(plan.run(x=GIVEN[1], timeout=SECONDS)["y"], undisturbed(stages(), GIVEN)[1])


def test_many_threads_that_notice_it_mend_once(pool: Losable, plan: hg.Plan) -> None:
    expected = undisturbed(stages(), GIVEN)
    gate = pool.hold("fake1")
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(plan.run, {"x": one}, timeout=SECONDS) for one in GIVEN]
        assert gate.entered.wait(SECONDS)
        pool.lose("fake1")
        results = [one.result(SECONDS)["y"] for one in found]
    assert all(same(*pair) for pair in zip(results, expected, strict=True))
    assert len(plan.rebuilds) == 1


def test_results_that_nobody_waits_for_keep_nothing(pool: Losable, plan: hg.Plan) -> None:
    for one in GIVEN * 20:
        plan.submit(x=one)
    for one in GIVEN * 60:
        plan.run(x=one)
    gc.collect()
    assert plan._live_group.journal.size_bytes < 40 * GIVEN[0].nbytes
    pool.lose("fake1")
    assert same(plan.run(x=GIVEN[0], timeout=SECONDS)["y"], undisturbed(stages(), GIVEN[:1])[0])
    assert plan.rebuilds[0].repeated <= 2


def test_a_plan_that_is_freed_is_not_placed_again(pool: Losable, session: hg.Session, plan: hg.Plan) -> None:
    other = session.compile(stages(2), ALL, on_loss="rebuild")
    plan.free()
    pool.lose("fake0")
    assert same(other.run(x=GIVEN[0], timeout=SECONDS)["y"], undisturbed(stages(2), GIVEN[:1])[0])
    assert plan.rebuilds == ()
    with pytest.raises(hg.UnknownHandleError):
        plan.run(x=GIVEN[0])


def test_a_cancelled_run_is_not_repeated(pool: Losable, plan: hg.Plan) -> None:
    gate = pool.hold("fake1")
    run = plan.submit(x=GIVEN[0])
    assert gate.entered.wait(SECONDS)
    assert run.cancel()
    with pytest.raises(hg.CancelledError):
        run.result(SECONDS)
    assert plan.rebuilds == ()


def test_updating_such_a_plan_is_refused(plan: hg.Plan) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="cannot become"):
        plan.update(stages(2))
