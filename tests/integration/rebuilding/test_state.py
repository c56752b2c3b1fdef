"""Variables of plans that are placed again: shared ones, checkpoints, the journal and its bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from losing import (
    ALL,
    SECONDS,
    Array,
    Losable,
    inputs,
    reading,
    same,
    summing,
    undisturbed,
)

import heliograph as hg


def reads(session: hg.Session) -> hg.Plan:
    return session.compile(reading(), ALL, on_loss="rebuild")


def factor(value: float) -> Array:
    return np.full((), value, np.float32)


def test_plans_that_share_a_variable_are_placed_again_together(pool: Losable, session: hg.Session) -> None:
    given = inputs(4)
    expected = undisturbed(summing(), given)
    writer, reader = session.compile(summing(), ALL, on_loss="rebuild"), reads(session)
    writer.run(x=given[0])
    taken = reader.checkpoint()
    assert set(taken) == {"total"}
    writer.run(x=given[1])
    pool.lose(writer.device)
    found = reader.run(k=factor(1), timeout=SECONDS)["y"]
    assert same(found + np.float32(1), expected[1])
    assert len(writer.rebuilds) == len(reader.rebuilds) == 1
    assert same(writer.run(x=given[2], timeout=SECONDS)["y"], expected[2])


def test_a_reading_run_is_repeated_between_the_runs_that_it_stood_between(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(4)
    expected = undisturbed(summing(), given)
    writer, reader = session.compile(summing(), ALL, on_loss="rebuild"), reads(session)
    writer.checkpoint()
    gate = pool.hold(writer.device)
    first = writer.submit(x=given[0], timeout=SECONDS)
    between = reader.submit(k=factor(1), timeout=SECONDS)
    second = writer.submit(x=given[1], timeout=SECONDS)
    assert gate.entered.wait(SECONDS)
    pool.lose(writer.device)
    assert same(second.result()["y"], expected[1])
    assert same(between.result()["y"] + np.float32(1), expected[0])
    assert same(first.result()["y"], expected[0])


def test_a_second_loss_is_mended_too(pool: Losable, session: hg.Session) -> None:
    given = inputs(5)
    expected = undisturbed(summing(), given)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    plan.checkpoint()
    for place, one in enumerate(given[1:3], 1):
        pool.lose(plan.device)
        assert same(plan.run(x=one, timeout=SECONDS)["y"], expected[place])
    assert plan.devices == ("fake2",) and len(plan.rebuilds) == 2
    pool.lose("fake2")
    with pytest.raises(hg.DeviceLostError, match="none of its devices is left"):
        plan.run(x=given[3], timeout=SECONDS)


def test_a_device_that_is_lost_while_the_plan_is_placed_there_is_left_out_too(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(3)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    plan.checkpoint()
    pool.devices["fake1"].script.lost_after = 0
    pool.lose("fake0")
    assert same(plan.run(x=given[1], timeout=SECONDS)["y"], undisturbed(summing(), given)[1])
    assert plan.devices == ("fake2",)


def test_a_journal_that_is_full_says_so_at_the_loss(pool: Losable, session: hg.Session) -> None:
    given = inputs(40)
    plan = session.compile(summing(), ALL, on_loss="rebuild", journal_bytes=4000)
    plan.checkpoint()
    for one in given[:20]:
        plan.run(x=one)
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match=r"more than the journal keeps \(4,000\).*more often"):
        plan.run(x=given[20], timeout=SECONDS)


def test_a_checkpoint_empties_the_journal(pool: Losable, session: hg.Session) -> None:
    given = inputs(40)
    plan = session.compile(summing(), ALL, on_loss="rebuild", journal_bytes=4000)
    for place, one in enumerate(given[:-1]):
        plan.run(x=one)
        if place % 2:
            plan.checkpoint()
    pool.lose(plan.device)
    found = plan.run(x=given[-1], timeout=SECONDS)["y"]
    assert same(found, undisturbed(summing(), given)[-1])
    assert plan.rebuilds[0].replayed == 1


def test_restoring_a_checkpoint_goes_back_to_it_also_after_a_loss(
    pool: Losable, session: hg.Session, tmp_path: Path
) -> None:
    given = inputs(3)
    expected = undisturbed(summing(), given)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    plan.checkpoint().save(tmp_path / "one.npz")
    plan.run(x=given[2])
    pool.lose(plan.device)
    plan.restore(hg.load_checkpoint(tmp_path / "one.npz"), timeout=SECONDS)
    assert same(plan.run(x=given[1], timeout=SECONDS)["y"], expected[1])


def test_restoring_goes_on_where_there_was_no_checkpoint(pool: Losable, session: hg.Session) -> None:
    given = inputs(3)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.run(x=given[0])
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="no checkpoint"):
        plan.run(x=given[1], timeout=SECONDS)
    zeros = hg.Checkpoint({"total": np.zeros(64, np.float32)}, plan_types(plan))
    plan.restore(zeros, timeout=SECONDS)
    assert same(plan.run(x=given[0], timeout=SECONDS)["y"], undisturbed(summing(), given)[0])


def plan_types(plan: hg.Plan) -> dict[str, hg.TensorType]:
    return {name: tensor.type for name, tensor in plan.variables.items()}


def test_a_checkpoint_of_another_plan_is_refused(session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    with pytest.raises(hg.InvalidArgumentError, match="no variable 'total'"):
        plan.restore(hg.Checkpoint({}, {}))
    with pytest.raises(hg.InvalidArgumentError, match="needs a checkpoint"):
        plan.restore({"total": np.zeros(64, np.float32)})  # type: ignore[arg-type]


def test_what_somebody_writes_into_a_variable_is_not_lost_silently(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(2)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    plan.variables["total"][3:5].set(np.ones(2, np.float32))
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="written by other means"):
        plan.run(x=given[0], timeout=SECONDS)


def test_a_checkpoint_after_a_write_goes_on_from_it(pool: Losable, session: hg.Session) -> None:
    [given] = inputs(1)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.variables["total"].set(np.full(64, 8, np.float32))
    assert np.all(plan.checkpoint()["total"] == 8)
    pool.lose(plan.device)
    found = plan.run(x=given, timeout=SECONDS)["y"]
    weight = np.linspace(0.1, 1.7, 64, dtype=np.float32)
    assert np.allclose(found, 4 + given * weight + 1)


def test_a_variable_is_not_shared_with_a_plan_that_is_not_rebuilt(session: hg.Session) -> None:
    kept = session.compile(summing(), ALL, on_loss="rebuild")
    with pytest.raises(hg.InvalidArgumentError, match="'total'.*is not") as refusal:
        session.compile(summing(), ALL)
    assert "both" in refusal.value.advice
    session.compile(reading(), ALL).run(k=factor(1))
    kept.run(x=inputs(1)[0])


def test_nor_the_other_way_round_and_what_one_left_needs_a_checkpoint(
    pool: Losable, session: hg.Session
) -> None:
    plain = session.compile(summing(), ALL)
    plain.run(x=inputs(1)[0])
    with pytest.raises(hg.InvalidArgumentError, match="'total'"):
        session.compile(summing(), ALL, on_loss="rebuild")
    plain.free()
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    pool.lose(plan.device)
    with pytest.raises(hg.DeviceLostError, match="other plans may have changed"):
        plan.run(x=inputs(1)[0], timeout=SECONDS)


def test_a_variable_is_not_bound_to_another_plan_that_assigns_it(session: hg.Session) -> None:
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    with pytest.raises(hg.InvalidArgumentError, match="'total'.*is not"):
        session.compile(summing(), ALL, variables={"total": plan.variables["total"]})


def test_plans_with_a_checkpoint_each_are_joined_by_a_third(pool: Losable, session: hg.Session) -> None:
    def of(name: str) -> hg.Graph:
        g = hg.Graph()
        a = g.variable(name, (4,), "f32")
        g.output("y", hg.assign(a, a * 2 + g.input("x", (4,), "f32")))
        return g

    both = hg.Graph()
    a, b = both.variable("a", (4,), "f32"), both.variable("b", (4,), "f32")
    both.output("y", hg.assign(a, a + b))
    one, another = (session.compile(of(name), ALL, on_loss="rebuild") for name in "ab")
    x = np.arange(4, dtype=np.float32)
    one.run(x=x)
    one.checkpoint()
    another.checkpoint()
    one.run(x=x)
    another.run(x=x + 1)
    third = session.compile(both, ALL, on_loss="rebuild")
    third.run()
    pool.lose(third.device)
    assert np.array_equal(third.run(timeout=SECONDS)["y"], 3 * x + 2 * (x + 1))
    assert set(third.checkpoint()) == {"a", "b"}


def test_a_run_that_failed_for_another_reason_leaves_nothing_to_replay(
    pool: Losable, session: hg.Session
) -> None:
    given = inputs(3)
    plan = session.compile(summing(), ALL, on_loss="rebuild")
    plan.checkpoint()
    pool.devices[plan.device].script.fail("compute", hg.ComputeFailedError("the fan stopped"))
    with pytest.raises(hg.ComputeFailedError, match="the fan"):
        plan.run(x=given[0])
    pool.lose(plan.device)
    with pytest.raises(hg.HeliographError, match="another reason|the fan"):
        plan.run(x=given[1], timeout=SECONDS)


def test_variables_that_no_run_changed_begin_again_with_their_first_elements(
    pool: Losable, session: hg.Session
) -> None:
    g = hg.Graph()
    v = g.variable("begun", (3,), "f32", init=np.float32([1, 2, 3]))
    g.output("y", hg.assign(v, v * 2.0))
    plan = session.compile(g, ALL, on_loss="rebuild")
    pool.lose(plan.device)
    assert plan.run(timeout=SECONDS)["y"].tolist() == [2, 4, 6]
    assert len(plan.rebuilds) == 1
