"""Plans that are placed again when a device is lost, with `hg.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from losing import (
    ALL,
    PINS,
    SECONDS,
    Losable,
    inputs,
    reading,
    same,
    stages,
    summing,
    undisturbed,
)

import heliograph as hg

Scenario = Callable[[hg.aio.Session], Awaitable[None]]


def play(pool: Losable, scenario: Scenario) -> None:
    async def played() -> None:
        async with await hg.aio.connect(pool.url) as session:
            await asyncio.wait_for(scenario(session), 3 * SECONDS)

    asyncio.run(played())


async def entered(gate: object) -> None:
    assert await asyncio.to_thread(gate.entered.wait, SECONDS)  # type: ignore[attr-defined]


def test_a_run_and_runs_of_a_pipeline_are_repeated(pool: Losable) -> None:
    given = inputs(6, (4, 64))
    expected = undisturbed(stages(), given)

    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(stages(), ALL, pins=PINS, pipeline=2, on_loss="rebuild")
        assert same((await plan.run(x=given[0], timeout=SECONDS))["y"], expected[0])
        gate = pool.hold("fake1")
        runs = [plan.submit(x=one, timeout=SECONDS) for one in given]
        await entered(gate)
        pool.lose("fake1")
        found = await asyncio.gather(*runs)
        assert all(same(one["y"], other) for one, other in zip(found, expected, strict=True))
        assert len(plan.rebuilds) == 1 and all(one.done() for one in runs)
        assert "fake1" not in str(await plan.explain())

    play(pool, scenario)


def test_a_loop_is_stopped_while_it_is_repeated(pool: Losable) -> None:
    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(stages(1), ["fake0", "fake1"], on_loss="rebuild")
        assert plan.device == "fake0"
        pool.devices["fake0"].script.lost_after = 20
        again = pool.hold("fake1")
        loop = plan.loop(x=inputs(1, (4, 64))[0], steps=10**9, timeout=SECONDS)
        waiting = asyncio.ensure_future(loop.result())
        await entered(again)
        assert not loop.done() and loop.stop()
        again.open()
        await waiting
        assert loop.steps in range(1, 10**9) and loop.done() and not loop.stop()

    play(pool, scenario)


def test_variables_go_on_from_the_checkpoint(pool: Losable) -> None:
    given = inputs(5)
    expected = undisturbed(summing(), given)

    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(summing(), ALL, on_loss="rebuild")
        reader = await session.compile(reading(), ALL, on_loss="rebuild")
        await plan.run(x=given[0])
        assert set(await plan.checkpoint()) == {"total"}
        await plan.run(x=given[1])
        runs = [plan.submit(x=one, timeout=SECONDS) for one in given[2:4]]
        pool.lose(plan.device)
        read = reader.submit(k=np.ones((), np.float32), timeout=SECONDS)
        assert same((await runs[1])["y"], expected[3]) and same((await runs[0])["y"], expected[2])
        assert same((await read)["y"] + np.float32(1), expected[3])
        taken = await plan.checkpoint()
        await plan.run(x=given[0])
        pool.lose(plan.device)
        await plan.restore(taken, timeout=SECONDS)
        assert same((await plan.run(x=given[4], timeout=SECONDS))["y"], expected[4])

    play(pool, scenario)


def test_what_cannot_be_repeated_is_refused(pool: Losable) -> None:
    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(summing(), ALL, on_loss="rebuild")
        await plan.run(x=inputs(1)[0])
        pool.lose(plan.device)
        with pytest.raises(hg.DeviceLostError, match="no checkpoint"):
            await plan.run(x=inputs(1)[0], timeout=SECONDS)
        alone = await session.compile(stages(), "fake1", on_loss="rebuild")
        pool.lose("fake1")
        error = await alone.submit(x=inputs(1, (4, 64))[0], timeout=SECONDS).exception()
        assert isinstance(error, hg.DeviceLostError) and "none of its devices is left" in error.message

    play(pool, scenario)


def test_a_task_that_is_cancelled_while_it_mends_leaves_it_to_the_next(pool: Losable) -> None:
    given = inputs(3)
    expected = undisturbed(summing(), given)

    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(summing(), ALL, on_loss="rebuild")
        await plan.checkpoint()
        await plan.run(x=given[0])
        pool.lose(plan.device)
        gate = pool.hold("fake1")
        mending = asyncio.ensure_future(plan.run(x=given[2]))
        await entered(gate)
        mending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mending
        gate.open()
        assert same((await plan.run(x=given[1], timeout=SECONDS))["y"], expected[1])

    play(pool, scenario)


def test_a_loop_is_repeated_and_an_input_may_be_overwritten(pool: Losable) -> None:
    g = hg.Graph()
    x = g.input("x", (8,), "f32")
    g.output("x", hg.tanh(x * 1.5 + 0.1))

    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(g, ALL, on_loss="rebuild")
        start = np.linspace(-1, 1, 8, dtype=np.float32)
        expected = (await plan.loop(x=start, steps=50, carry={"x": "x"}))["x"]
        pool.devices[plan.device].script.lost_after = 20
        run = plan.loop(x=start, steps=50, carry={"x": "x"}, timeout=SECONDS)
        start[:] = 0
        assert same((await run)["x"], expected) and run.steps == 50

    play(pool, scenario)


def test_many_tasks_that_notice_it_mend_once(pool: Losable) -> None:
    given = inputs(8, (4, 64))
    expected = undisturbed(stages(), given)

    async def scenario(session: hg.aio.Session) -> None:
        plan = await session.compile(stages(), ALL, pins=PINS, on_loss="rebuild")
        gate = pool.hold("fake1")
        tasks = [asyncio.ensure_future(plan.run(x=one, timeout=SECONDS)) for one in given]
        await entered(gate)
        pool.lose("fake1")
        found = await asyncio.gather(*tasks)
        assert all(same(one["y"], other) for one, other in zip(found, expected, strict=True))
        assert len(plan.rebuilds) == 1

    play(pool, scenario)
