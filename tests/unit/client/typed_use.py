"""What type checkers make of the public API; `test_typed_use` has mypy read it, and nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import heliograph as hg
from heliograph import admin

Array = np.ndarray[Any, Any]


def operators(x: hg.Value, array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    for one in (
        x + 1,
        1.0 - x,
        x[0],
        x @ x,
        -x,
        x > 0,
        x.T,
        hg.softmax(x),
        hg.sum(x, axis=0),
        hg.abs(x),
        x[::-1],
        hg.take(x, [0, -1], axis=0),
        hg.assign(x[1:], 0.0),
    ):
        assert_type(one, hg.Value)
    assert_type(array @ x, hg.Value)
    assert_type(array + x, hg.Value)
    assert_type(x @ array, hg.Value)


def blocking(graph: hg.Graph, value: hg.Value, x: Array) -> None:
    with hg.connect("local:", timeout=None, silence_seconds=10.0) as session:
        assert_type(session, hg.Session)
        plan = session.compile(graph)
        assert_type(plan, hg.Plan)
        assert_type(plan.run(x=x), dict[str, Array])
        assert_type(plan.run({"x": x}, timeout=1.0), dict[str, Array])
        assert_type(plan.run(x=x, fetch=False), dict[str, hg.Tensor])
        assert_type(plan.run(x=x, fetch=["y"]), dict[str, Any])
        assert_type(plan.submit(x=x), hg.RunFuture)
        assert_type(plan.variables, dict[str, hg.Tensor])
        tensor = session.put(x)
        assert_type(tensor[1:3], hg.Tensor)
        assert_type(tensor.get(), Array)
        assert_type(tensor.set(x), None)
        assert_type(tensor.set(x, copy=False), hg.WriteFuture)
        assert_type(session.devices, list[hg.Device])
        assert_type(plan.explain(), hg.Explanation)
        assert_type(plan.submit(x=x, taps=[value, "y"]), hg.RunFuture)
        loop = plan.loop(x=x, steps=10, until="done")
        assert_type(loop, hg.RunFuture)
        assert_type(loop.feed({"x": x}, rows=[0], timeout=1.0), hg.FeedFuture)
        assert_type(loop.feed({"x": x}).result(), int)
        assert_type(loop.stop(), bool)
        assert_type(loop.steps, int | None)
        event, stream = session.event(), session.stream()
        assert_type(stream.record(event), hg.Event)
        assert_type(event.done(), bool)
        assert_type(session.estimate(graph).splits, tuple[hg.SplitEstimate, ...])
        assert_type(session.free_variable("total"), None)
        for change in session.watch():
            assert_type(change.ended, str)


async def asynchronous(graph: hg.Graph, x: Array) -> None:
    async with hg.aio.connect("local:", timeout=None, silence_seconds=10.0) as session:
        assert_type(session, hg.aio.Session)
        plan = await session.compile(graph)
        assert_type(plan, hg.aio.Plan)
        assert_type(await plan.run(x=x), dict[str, Array])
        assert_type(await plan.run(x=x, fetch=False), dict[str, hg.aio.Tensor])
        assert_type(plan.submit(x=x), hg.aio.RunFuture)
        assert_type(await session.put(x), hg.aio.Tensor)
        loop = plan.loop(x=x, steps=10, until="done", feed=["x"])
        assert_type(loop.feed({"x": x}), hg.aio.FeedFuture)
        assert_type(await loop.feed({"x": x}), int)
        assert_type(loop.stop(), bool)
        assert_type(loop.steps, int | None)
        event, stream = session.event(), session.stream()
        assert_type(stream.record(event), hg.aio.Event)
        assert_type((await session.estimate(graph)).splits, tuple[hg.SplitEstimate, ...])
        assert_type(await session.free_variable("total"), None)
        async for change in session.watch():
            assert_type(change.ended, str)


def operating() -> None:
    with admin.connect("grpc://127.0.0.1:7070") as daemon:
        assert_type(daemon.backends(), tuple[admin.BackendUse, ...])
        assert_type(daemon.unload_backend("fake"), admin.BackendInfo)
        assert_type(daemon.drain().interrupted_sessions, int)
