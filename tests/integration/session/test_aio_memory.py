"""Buffers, bound weights, updates and questions under asyncio, over every transport."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from asyncio_tests import run

import heliograph as hg

X = np.arange(12, dtype=np.float32).reshape(4, 3)
W = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def product() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 3), "f32") @ g.bound_weight("w", (3, 5), "f32"))
    return g


def plus(number: float, shape: tuple[int, ...] = (4, 3)) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", shape, "f32") + number)
    return g


def test_buffers_and_lists_of_tensors(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        buffer = session.buffer(1024, usage="compute")
        t = buffer.place((4, 3), "f32", 64)
        await t.set(X)
        assert t.buffer is buffer and np.array_equal(await t.get(), X)
        await t.set_2d(np.full((4, 1), 9, np.float32), stride_bytes=12)
        assert (await t.get_2d(4, 4, 0, 12)).view(np.float32).tolist() == [[9]] * 4
        buffer.clear(0)
        assert not (await t.get()).any()
        one, two = session.empty_many([((4, 3), "f32"), ((4, 3), "f32")])
        await one.set(X)
        assert await one.copy_and_wait(two, timeout=30) in hg.CopyPath
        assert one.buffer is two.buffer and np.array_equal(await two.get(), X)
        small, _ = session.empty_many([((4,), "f32"), ((2**45,), "f64")])
        with pytest.raises(hg.OutOfMemoryError):
            await small.get()

    run(url, test)


def test_bound_weights_and_updates(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        w = await session.put(W)
        plan = await session.compile(product(), weights={"w": w})
        found = (await plan.run(x=X))["y"]
        assert np.allclose(found, X @ W, atol=1e-5)
        await plan.update(plus(2.0))
        assert np.array_equal((await plan.run(x=X))["y"], X + 2)
        with pytest.raises(hg.InvalidArgumentError, match="no content"):
            await plan.update(product())
        w.memset(0)
        assert not (await w.get()).any()
        assert np.array_equal((await session.compute(plus(3.0), x=X))["y"], X + 3)
        assert (await session.estimate(product())).weights_bytes == W.nbytes

    run(url, test)


def test_runs_that_wait_for_credit_come_before_an_update(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus(1.0, BIG.shape))
        futures = [plan.submit(x=BIG + step) for step in range(4)]
        await plan.update(plus(2.0))
        for step, future in enumerate(futures):
            assert np.array_equal((await future.result(timeout=60))["y"], BIG + step + 1)
        assert np.array_equal((await plan.run(x=X))["y"], X + 2)

    run(url, test)


def test_a_plan_is_not_run_while_it_is_updated(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus(1.0))
        updating = asyncio.create_task(plan.update(plus(2.0)))
        await asyncio.sleep(0)
        with pytest.raises(hg.InvalidArgumentError, match="being updated"):
            await plan.run(x=X)
        await updating
        assert np.array_equal((await plan.run(x=X))["y"], X + 2)

    run(url, test)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 30])
def test_an_update_can_be_cancelled_at_any_await(url: str, turns: int) -> None:
    """Afterwards the plan is what it was, or what it was to be, or freed; never anything between."""

    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus(1.0))
        updating = asyncio.create_task(plan.update(plus(2.0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        updating.cancel()
        (ended,) = await asyncio.gather(updating, return_exceptions=True)
        if "freed" in repr(plan):
            with pytest.raises(hg.UnknownHandleError, match="freed"):
                await plan.run(x=X)
        else:
            number = 2 if ended is None else 1
            assert np.array_equal((await plan.run(x=X))["y"], X + number)
        assert np.array_equal((await session.compute(plus(3.0), x=X))["y"], X + 3)

    run(url, test)


def test_an_update_that_was_not_sent_in_time_changes_nothing(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus(1.0))
        with pytest.raises(hg.DeadlineExceededError, match="updating the plan"):
            await plan.update(plus(2.0), timeout=0)
        assert np.array_equal((await plan.run(x=X))["y"], X + 1)

    run(url, test)


def test_outputs_are_written_to_tensors(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan, t = await session.compile(plus(1.0)), session.empty((4, 3), "f32")
        assert (await plan.run(x=X, out={"y": t}))["y"] is t
        assert np.array_equal(await t.get(), X + 1)
        assert (await plan.submit(x=X * 2, out={"y": t}))["y"] is t
        assert np.array_equal(await t.get(), X * 2 + 1)

    run(url, test)


def test_questions(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        device = session.device(session.best_device().name.upper())
        type_ = session.empty((4, 3), "f32").type
        assert [one.why_not for one in await device.query([hg.OpQuery("add", (type_, type_), type_)])] == [""]
        assert await device.unsupported(product()) == []
        assert (await device.placement([((4, 3), "f32")])).tensor_bytes == (48,)
        assert "cpu" in [one.name for one in await session.backends()]
        assert session.devices_of(hg.DeviceType.GPU) == []

    run(url, test)


def test_an_array_is_used_in_place() -> None:
    async def test(session: hg.aio.Session) -> None:
        mine = hg.aligned_empty((4, 3), "f32")
        mine[:] = X
        t = session.wrap(mine)
        assert np.array_equal((await session.compute(plus(1.0), x=t))["y"], X + 1)
        t[0].memset(0)
        await session.synchronize(timeout=10)
        assert not mine[0].any()

    run("local:", test)
