"""Runs and loops that end early: variables hold the last completed step, and stay usable."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg

SECONDS = 20.0
SIZE = 2**16
ONE = np.float32(1)


def counting() -> hg.Graph:
    """Two variables that are raised by x, one at the begin of a step and one at its end."""
    g = hg.Graph()
    x = g.input("x", (), "f32")
    first, last = g.variable("first", (SIZE,), "f32"), g.variable("last", (SIZE,), "f32")
    counted = hg.assign(first, first + x)
    y = counted
    for _ in range(8):
        y = hg.tanh(y * 0.5)
    hg.assign(last, last + x)
    g.output("mean", hg.mean(y))
    g.output("count", counted[:1])
    return g


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(counting())


def count(plan: hg.Plan) -> int:
    """The steps that both variables say were completed."""
    values = plan.checkpoint(SECONDS)
    found = np.unique(np.concatenate([values["first"], values["last"]]))
    assert found.size == 1, f"the variables hold parts of steps: {found}"
    return int(found[0])


def cancel_all(runs: list[hg.RunFuture]) -> None:
    for run in runs:
        run.cancel()


def test_a_loop_that_is_cancelled_leaves_the_variables_after_its_last_step(plan: hg.Plan) -> None:
    for _ in range(3):
        before = count(plan)
        loop = plan.loop(x=ONE, steps=10**9, taps=["count"])
        next(iter(loop.taps(SECONDS)))
        loop.cancel()
        with pytest.raises(hg.CancelledError):
            loop.result(SECONDS)
        assert loop.steps and count(plan) == before + loop.steps
    plan.run(x=ONE, timeout=SECONDS)


def test_a_loop_that_is_stopped_gives_the_result_of_its_last_step(plan: hg.Plan) -> None:
    loop = plan.loop(x=ONE, steps=10**9, taps=["count"])
    next(iter(loop.taps(SECONDS)))
    assert loop.stop()
    result = loop.result(SECONDS)
    assert loop.steps == count(plan) == result["count"][0]
    assert not loop.stop()


def test_a_loop_that_is_stopped_before_it_begins_runs_one_step(plan: hg.Plan) -> None:
    running = plan.loop(x=ONE, steps=10**9)
    loop = plan.loop(x=ONE, steps=10**9)
    loop.stop()
    running.stop()
    running.result(SECONDS)
    loop.result(SECONDS)
    assert loop.steps == 1


def test_a_loop_whose_time_is_over_leaves_whole_steps(plan: hg.Plan) -> None:
    loop = plan.loop(x=ONE, steps=10**9, timeout=0.05)
    with pytest.raises(hg.DeadlineExceededError):
        loop.result(SECONDS)
    assert count(plan) == loop.steps


def test_runs_that_are_cancelled_at_any_time_spoil_nothing(session: hg.Session, plan: hg.Plan) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, done = random.Random(seed), 0
    for _ in range(40):
        before = count(plan)
        runs = [plan.submit(x=ONE) for _ in range(chance.randint(1, 4))]
        cancelling = threading.Timer(chance.random() * 0.002, cancel_all, (runs,))
        cancelling.start()
        ended = [run.exception(SECONDS) for run in runs]
        cancelling.join()
        assert all(one is None or isinstance(one, hg.CancelledError) for one in ended)
        # A run that was reported as cancelled has not begun to write.
        assert count(plan) == before + sum(one is None for one in ended)
        done += count(plan) - before
    print(f"{done} runs ended before they were cancelled")


@pytest.mark.parametrize("spread", [False, True], ids=["one member", "both members"])
def test_runs_of_a_pool_that_are_cancelled_spoil_nothing(spread: bool) -> None:
    cpu = "--device", "cpu:threads=1"
    with running_daemon(*cpu) as one, running_daemon(*cpu) as other, hg.connect([one, other]) as session:
        names = [device.name for device in session.devices][-2:]
        g = hg.Graph()
        x = g.input("x", (), "f32")
        first, last = g.variable("first", (SIZE,), "f32"), g.variable("last", (SIZE,), "f32")
        g.output("first", hg.assign(first, first + x)[:1])
        with g.scope("last"):
            hg.assign(last, last + x)
        pins = {"last/*": names[1]} if spread else None
        plan = session.compile(g, names if spread else names[:1], pins=pins)
        plan.run(x=ONE, timeout=SECONDS)
        for delay in (0, 0.0005, 0.001, 0.003):
            before, run = count(plan), plan.submit(x=ONE)
            threading.Event().wait(delay)
            run.cancel()
            done = run.exception(SECONDS) is None
            assert count(plan) == before + done


def failing(early: bool) -> hg.Graph:
    """A variable that is raised behind or before a row is looked up."""
    g = hg.Graph()
    table, row = g.input("table", (4, 3), "f32"), g.input("row", (2,), "i32")
    total = g.variable("total", (3,), "f32")
    if early:
        hg.assign(total, total + 1)
    rows = hg.ops.get_rows(table, row)
    g.output("y", rows)
    if not early:
        hg.assign(total, total + hg.sum(rows, axis=0))
    return g


TABLE = np.ones((4, 3), np.float32)
GOOD, BAD = np.array([1, 2], np.int32), np.array([3, -7], np.int32)


def test_a_run_that_fails_before_it_writes_leaves_the_variables_alone(session: hg.Session) -> None:
    plan = session.compile(failing(early=False))
    plan.run(table=TABLE, row=GOOD)
    with pytest.raises(hg.OutOfRangeError):
        plan.run(table=TABLE, row=BAD)
    plan.run(table=TABLE, row=GOOD)
    assert plan.checkpoint()["total"].tolist() == [4, 4, 4]


def test_a_variable_that_a_run_has_torn_is_named_and_can_be_set_again(session: hg.Session) -> None:
    total = session.put(np.zeros(3, np.float32))
    plan = session.compile(failing(early=True), variables={"total": total})
    with pytest.raises(hg.OutOfRangeError):
        plan.run(table=TABLE, row=BAD)
    with pytest.raises(hg.ComputeFailedError, match=r"variable 'total' was left half written") as torn:
        plan.run(table=TABLE, row=GOOD)
    assert "write the whole variable again" in torn.value.advice
    total.set(np.zeros(3, np.float32))
    plan.run(table=TABLE, row=GOOD)
    assert total.get().tolist() == [1, 1, 1]


def test_a_run_with_an_input_that_was_never_made_spoils_no_variable(
    session: hg.Session, plan: hg.Plan
) -> None:
    plan.run(x=ONE)
    g = hg.Graph()
    g.output("x", hg.ops.get_rows(g.input("table", (4, 1), "f32"), g.input("row", (1,), "i32")).reshape(()))
    never = session.compile(g).submit(table=TABLE[:, :1], row=BAD[1:], fetch=False)
    with pytest.raises(hg.OutOfRangeError):
        plan.run(x=never.result(SECONDS)["x"])
    plan.run(x=ONE)
    assert count(plan) == 2


def test_loops_of_asyncio_are_stopped_and_cancelled_at_the_end_of_a_step(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(counting())
        loop = plan.loop(x=ONE, steps=10**9, taps=["count"])
        await anext(loop.taps(SECONDS))
        assert loop.stop()
        result = await loop.result(SECONDS)
        assert loop.steps == result["count"][0]
        again = plan.loop(x=ONE, steps=10**9, taps=["count"])
        await anext(again.taps(SECONDS))
        again.cancel()
        with pytest.raises(hg.CancelledError):
            await again.result(SECONDS)
        values = await plan.checkpoint(SECONDS)
        expected = (loop.steps or 0) + (again.steps or 0)
        assert all((one == expected).all() for one in values.values())

    async def main() -> None:
        async with hg.aio.connect(url) as session:
            await test(session)

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 3], ids=["first run", "later run"])
def test_an_index_out_of_range_is_named_with_its_place(session: hg.Session, times: int) -> None:
    g = hg.Graph()
    table, rows = g.input("table", (2, 4, 3), "f32"), g.input("rows", (2, 2), "i32")
    g.output("y", hg.ops.get_rows(table, rows))
    plan, tables = session.compile(g), np.ones((2, 4, 3), np.float32)
    good, bad = np.array([[1, 2], [3, 0]], np.int32), np.array([[1, 2], [3, -7]], np.int32)
    for _ in range(times):
        plan.run(table=tables, rows=good)
    with pytest.raises(
        hg.OutOfRangeError, match=r"index -7 is not one of 4 rows, at \[1, 1\] of the indices"
    ):
        plan.run(table=tables, rows=bad)
    plan.run(table=tables, rows=good)
