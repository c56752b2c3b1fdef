"""A plan on another session: the same graph, the weights, and what the variables hold."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

import heliograph as hg

SEED = 20251121
WIDTH = 4


def accumulator() -> hg.Graph:
    """Adds the input, times a weight, to two variables; returns one of them."""
    g = hg.Graph()
    x = g.input("x", (WIDTH,), "f32") * g.weight("w", np.arange(WIDTH, dtype=np.float32))
    count, total = g.variable("count", (), "i64"), g.variable("total", (WIDTH,), "f32")
    hg.assign(count, count + 1)
    g.output("total", hg.assign(total, total + x))
    return g


ONES = np.ones(WIDTH, np.float32)


def test_a_copy_goes_on_where_the_plan_was_and_leaves_it_alone(url: str) -> None:
    with hg.connect(url) as one, hg.connect("local:") as other:
        plan = one.compile(accumulator(), fusion=False)
        for _ in range(3):
            plan.run(x=ONES)
        copy = hg.copy_plan(plan, other)
        assert copy.device == "cpu0" and (copy.inputs, copy.outputs) == (plan.inputs, plan.outputs)
        np.testing.assert_array_equal(copy.run(x=ONES)["total"], 4 * np.arange(WIDTH))
        assert copy.checkpoint()["count"] == 4 and plan.checkpoint()["count"] == 3
        plan.free()
        np.testing.assert_array_equal(copy.run(x=ONES)["total"], 5 * np.arange(WIDTH))


def test_a_copy_is_of_the_graph_as_it_was_compiled(url: str) -> None:
    graph = accumulator()
    with hg.connect(url) as one, hg.connect(url) as other:
        plan = one.compile(graph)
        graph.output("more", graph.outputs["total"] * graph.weight("late", ONES))
        assert list(hg.copy_plan(plan, other).outputs) == ["total"]


def test_in_its_own_session_a_copy_shares_the_variables(url: str) -> None:
    with hg.connect(url) as session:
        plan = session.compile(accumulator())
        plan.run(x=ONES)
        copy = hg.copy_plan(plan, session)
        copy.run(x=ONES)
        assert plan.checkpoint()["count"] == 2


def test_large_variables_go_piece_by_piece(url: str) -> None:
    """Never is more than a piece of one in this process."""
    size = 2**24
    g = hg.Graph()
    v = g.variable("v", (size,), "f32")
    g.output("least", hg.min(v))
    with hg.connect(url) as one, hg.connect(url) as other:
        piece = one.info.limits.piece_bytes
        assert 4 * size >= 2 * piece
        plan = one.compile(g)
        contents = np.random.default_rng(SEED).random(size, np.float32) + 1
        plan.variables["v"].set(contents)
        least = contents.min()
        del contents
        gc.collect()
        tracemalloc.start()
        try:
            copy = hg.copy_plan(plan, other)
            # In process, what the server stages counts too.
            assert url == "local:" or tracemalloc.get_traced_memory()[1] < 1.5 * piece
        finally:
            tracemalloc.stop()
        assert copy.run()["least"] == least == plan.run()["least"]


def test_errors_name_the_line_that_built_the_node() -> None:
    with hg.connect("local:") as one, hg.connect("local:") as other:
        g = hg.Graph()
        g.output("y", hg.ops.get_rows(g.input("x", (3, 2), "f32"), g.input("ids", (1,), "i32")))
        copy = hg.copy_plan(one.compile(g), other)
        with pytest.raises(hg.OutOfRangeError) as caught:
            copy.run(x=np.ones((3, 2), np.float32), ids=np.array([7], np.int32))
        assert "hg.ops.get_rows" in caught.value.origin.source


def test_what_cannot_be_copied_is_refused() -> None:
    with hg.connect("local:") as one, hg.connect("local:") as other:
        plan = one.compile(accumulator())
        with pytest.raises(hg.UnknownDeviceError):
            hg.copy_plan(plan, other, "gpu7")
        with pytest.raises(hg.InvalidArgumentError, match="copied to a session"):
            hg.copy_plan(plan, "local:")  # type: ignore[arg-type]
        total = one.put(ONES)
        one.synchronize(10)
        bound = one.compile(accumulator(), variables={"total": total})
        with pytest.raises(hg.InvalidArgumentError, match="tensors of its session"):
            hg.copy_plan(bound, other)
        plan.free()
        with pytest.raises(hg.UnknownHandleError, match="freed"):
            hg.copy_plan(plan, other)


def test_a_copy_that_fails_leaves_nothing(daemon: Any) -> None:
    with hg.connect(daemon.unix) as watcher:
        before = watcher.devices[0].memory().free_bytes
        with hg.connect("local:") as one:
            plan = one.compile(accumulator())
            other = hg.connect(daemon.unix)
            with pytest.raises(hg.DeadlineExceededError):
                hg.copy_plan(plan, other, timeout=0.0)
            other.close()
            with pytest.raises(hg.SessionClosedError):
                hg.copy_plan(plan, other)
        assert watcher.devices[0].memory().free_bytes == before


def test_asyncio_has_it_too(url: str) -> None:
    async def main() -> None:
        async with hg.aio.connect(url) as one, hg.aio.connect(url) as other:
            plan = await one.compile(accumulator())
            await plan.run(x=ONES)
            copy = await hg.aio.copy_plan(plan, other)
            outputs = await copy.run(x=ONES)
            np.testing.assert_array_equal(outputs["total"], 2 * np.arange(WIDTH))
            assert (await copy.checkpoint())["count"] == 2 and (await plan.checkpoint())["count"] == 1

    asyncio.run(main())
