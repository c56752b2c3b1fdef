"""The asyncio API over every transport: the same names, awaited; cancelling at every await."""

from __future__ import annotations

import asyncio
import gc
import socket

import numpy as np
import pytest
from asyncio_tests import run

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry

X = np.arange(12, dtype=np.float32).reshape(4, 3)
BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def plus_one(shape: tuple[int, ...] = (4, 3)) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", shape, "f32") + 1.0)
    return g


def test_the_same_names_awaited(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one())
        assert np.array_equal((await plan.run(x=X))["y"], X + 1)
        future = plan.submit(x=X)
        assert np.array_equal((await future.result(timeout=10))["y"], X + 1)
        assert (await future)["y"] is (await future)["y"] and future.done() and not future.cancel()
        t = session.empty((4, 3), "f32")
        await t.set(X)
        view = t[1:3]
        assert np.array_equal(await view.get(), X[1:3])
        kept = (await plan.run(x=t, fetch=False))["y"]
        assert np.array_equal(await kept.get(), X + 1)
        assert (await session.devices[0].memory()).total_bytes >= 0
        await session.synchronize(timeout=10)

    run(url, test)


def test_a_session_can_be_awaited_too(url: str) -> None:
    async def main() -> None:
        session = await hg.aio.connect(url)
        try:
            assert "open" in repr(session)
        finally:
            await session.close()
            await session.close()
        with pytest.raises(hg.SessionClosedError):
            session.empty(1, "f32")

    asyncio.run(main())


def test_calls_under_way_end_with_the_session_that_closes(url: str) -> None:
    async def main() -> None:
        for turns in range(40):
            session = await hg.aio.connect(url)
            calls = [asyncio.create_task(session.estimate(plus_one((4, 3 + n)))) for n in range(4)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await session.close()
            for found in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(found, (hg.PlanEstimate, hg.ConnectionError)), found

    asyncio.run(main())


def test_large_tensors_go_in_pieces(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        tensors = await asyncio.gather(*(session.put(BIG + step) for step in range(4)))
        found = await asyncio.gather(*(t.get() for t in tensors))
        assert all(np.array_equal(array, BIG + step) for step, array in enumerate(found))
        future = await tensors[0].set(BIG * 2, copy=False)
        await future
        assert np.array_equal(await tensors[0].get(), BIG * 2)

    run(url, test)


def test_submit_is_a_plain_call_after_which_the_array_may_be_overwritten(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one(BIG.shape))
        mine, futures = BIG.copy(), []
        for step in range(6):
            mine[:] = BIG + step
            futures.append(plan.submit(x=mine))
        mine[:] = -1
        for step, future in enumerate(futures):
            assert np.array_equal((await future.result(timeout=60))["y"], BIG + step + 1)

    run(url, test)


def test_commands_keep_their_order_behind_a_submit_that_waits(url: str) -> None:
    """The run must see the tensor as it was when it was submitted, though its bytes take long."""

    async def test(session: hg.aio.Session) -> None:
        g = hg.Graph()
        g.output("y", g.input("x", BIG.shape, "f32") + g.input("t", (), "f32"))
        plan = await session.compile(g)
        t = await session.put(np.float32(1))
        futures = []
        for step in range(4):
            futures.append(plan.submit(x=BIG, t=t))
            await t.set(np.float32(step + 2))
        t.free()
        for step, future in enumerate(futures):
            assert np.array_equal((await future)["y"], BIG + np.float32(step + 1))

    run(url, test)


def test_many_tasks_share_a_session(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one(BIG.shape))

        async def work(step: int) -> None:
            t = await session.put(BIG + step)
            assert np.array_equal((await plan.run(x=t))["y"], BIG + step + 1)

        await asyncio.gather(*(work(step) for step in range(16)))

    run(url, test)


def test_variables_and_checkpoints(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        g = hg.Graph()
        v = g.variable("count", (), "f32")
        g.output("count", hg.assign(v, v + 1.0))
        plan = await session.compile(g)
        await asyncio.gather(*(plan.run() for _ in range(5)))
        assert (await plan.checkpoint())["count"] == 5

    run(url, test)


def test_events_are_awaitable(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        first, second = session.devices[0].stream(), session.stream()
        event = first.record()
        second.wait(event)
        await event
        await event.result(timeout=10)
        await second.synchronize(timeout=10)

    run(url, test)


def test_events_are_recorded_again(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        event, stream = session.event(), session.stream()
        await event
        stream.wait(event)
        for _ in range(2):
            assert stream.record(event) is event
            await event.result(timeout=10)
        event.free()
        await session.synchronize(timeout=10)

    run(url, test)


def test_errors_are_the_same(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one())
        with pytest.raises(hg.InvalidInputError, match="no input"):
            plan.submit(y=X)
        with pytest.raises(hg.InvalidInputError, match="missing"):
            await plan.run()
        t = session.empty((2**45,), "f64")
        with pytest.raises(hg.OutOfMemoryError):
            await t[:1].get()
        with pytest.raises(TypeError, match="await"):
            np.asarray(t)

    run(url, test)


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def main() -> None:
        with pytest.raises(hg.UnavailableError, match="no server answers"):
            await hg.aio.connect(f"grpc://127.0.0.1:{port}")

    asyncio.run(main())


# A scripted device, in this process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device of `local:` sessions of this test."""
    device = FakeDevice()
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))
    return device


def test_cancelling_the_task_cancels_the_run(fake: FakeDevice) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one())
        for wait in (lambda: plan.run(x=X), lambda: plan.submit(x=X).result()):
            gate = fake.script.hold("compute")
            task = asyncio.ensure_future(wait())
            await asyncio.to_thread(gate.entered.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert np.array_equal((await plan.run(x=X, timeout=10))["y"], X + 1)

    run("local:", test)


def test_a_run_past_its_timeout_is_cancelled(fake: FakeDevice) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one())
        fake.script.hold("compute")
        with pytest.raises(hg.DeadlineExceededError):
            await plan.run(x=X, timeout=0.05)
        assert np.array_equal((await plan.run(x=X, timeout=10))["y"], X + 1)

    run("local:", test)


def test_a_cancelled_future_ends_with_a_typed_error(fake: FakeDevice) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one())
        gate = fake.script.hold("compute")
        future = plan.submit(x=X)
        await asyncio.to_thread(gate.entered.wait, 10)
        assert not future.done() and future.cancel()
        assert isinstance(await future.exception(timeout=10), hg.CancelledError)

    run("local:", test)


def test_cancelling_while_compiling_leaves_nothing(fake: FakeDevice) -> None:
    async def test(session: hg.aio.Session) -> None:
        gate = fake.script.hold("compile")
        task = asyncio.ensure_future(session.compile(plus_one()))
        await asyncio.to_thread(gate.entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert np.array_equal((await (await session.compile(plus_one())).run(x=X))["y"], X + 1)

    run("local:", test)


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_cancelling_a_transfer_at_any_await_leaves_the_session_whole(url: str, steps: int) -> None:
    async def test(session: hg.aio.Session) -> None:
        plan = await session.compile(plus_one(BIG.shape))
        for start in (lambda: session.put(BIG), lambda: plan.run(x=BIG)):
            task = asyncio.ensure_future(start())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
        del task
        gc.collect()
        assert np.array_equal((await plan.run(x=BIG, timeout=30))["y"], BIG + 1)
        try:
            await session.synchronize(timeout=10)
        except hg.CancelledError:
            pass  # a write that was cancelled, which has no other reader
        assert session.statistics().in_flight_bytes == 0

    run(url, test)


def test_a_server_s_facts_and_the_traffic_of_both_sides(url: str) -> None:
    async def test(session: hg.aio.Session) -> None:
        tensor = await session.put(BIG)
        assert np.array_equal(await tensor.get(), BIG)
        here, there = session.statistics().traffic, await session.server_traffic()
        assert here.written_bytes == here.read_bytes == there.written_bytes == there.read_bytes == BIG.nbytes
        assert here.copied_out_bytes == BIG.nbytes and there.copied_out_bytes >= BIG.nbytes
        assert (await session.server_facts())["numpy"] == np.__version__

    run(url, test)
