"""Measured steps of plans: how long each took, over every transport and on several devices."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
import several_devices_fixtures

import heliograph as hg

#: The last one has memory that no other device reaches.
DEVICES = ("cpu:threads=1", "cpu:threads=2", "fake:host=0,memory=1MiB")
X = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)

daemon_of_several = several_devices_fixtures.daemon_of_several
url = several_devices_fixtures.url
session = several_devices_fixtures.session


def layered(layers: int = 3) -> hg.Graph:
    """A product with a chain after it, and a sine, which has no kernel, in each layer."""
    g, random = hg.Graph(), np.random.default_rng(7)
    x = g.input("x", X.shape, "f32")
    for number in range(layers):
        with g.scope(f"layer{number}"):
            w = g.weight("w", random.standard_normal((64, 64)).astype(np.float32))
            x = hg.sin(hg.ops.silu(hg.ops.matmul(x, w, name="product") + 1.0))
    g.output("y", x)
    return g


def test_each_step_has_its_time(session: hg.Session) -> None:
    """Nodes that are computed together have one, also where NumPy computes them."""
    found = session.compile(layered()).profile({"x": X}, runs=3)
    assert sorted(one.ops for one in found.steps) == [("matmul", "add", "silu")] * 3 + [("sin",)] * 3
    assert all(one.took_us > 0 and one.device == "cpu0" for one in found.steps)
    assert sum(one.share for one in found.steps) == pytest.approx(1.0)
    assert [one.took_us for one in found.steps] == sorted((one.took_us for one in found.steps), reverse=True)


def test_a_step_tells_its_work(session: hg.Session) -> None:
    """A chain's results stay inside; an addend of one element counts as its bytes."""
    steps = session.compile(layered(1)).profile(x=X, runs=1).steps
    product = next(one for one in steps if "matmul" in one.ops)
    assert product.name == product.nodes[-1].name != "layer0/product"
    assert product.flops == 32 * 64 * (2 * 64 + 1 + 1)
    assert product.size_bytes == X.nbytes + 4 * 64 * 64 + X.nbytes + 4
    assert product.flops_per_s == pytest.approx(product.flops / product.took_us * 1e6)


def test_only_runs_that_were_asked_for_are_measured(session: hg.Session) -> None:
    plan = session.compile(layered())
    plan.run(x=X)
    assert plan.explain().steps == () and plan.explain().step_table() == ""
    plan.explain(measure=True)
    plan.loop(x=X, steps=4, carry={"y": "x"}).result()
    found = plan.explain(measure=False)
    assert len(found.steps) == 6 and all(one.took_us > 0 for one in found.steps)
    plan.run(x=X)
    assert plan.explain().steps == found.steps, "they stay until the next measurement"
    assert plan.explain(measure=True).steps == ()


def test_measured_runs_have_the_bits_of_others(session: hg.Session) -> None:
    plan = session.compile(layered(), "cpu1")
    expected = plan.run(x=X)["y"]
    plan.explain(measure=True)
    assert plan.run(x=X)["y"].tobytes() == expected.tobytes()


def test_every_device_is_measured(session: hg.Session) -> None:
    names = ["cpu0", "cpu1", "fake0"]
    pins = {f"layer{number}/*": name for number, name in enumerate(names)}
    found = session.compile(layered(), names, pins=pins).profile({"x": X}, runs=2)
    # The last one has no kernels: each node is a step.
    assert Counter(one.device for one in found.steps) == {"cpu0": 2, "cpu1": 2, "fake0": 4}


def test_runs_in_flight_at_once_are_measured(session: hg.Session) -> None:
    plan = session.compile(layered(2), ["cpu0", "cpu1"], pins={"layer1/*": "cpu1"}, pipeline=2)
    plan.explain(measure=True)
    for run in [plan.submit(x=X) for _ in range(6)]:
        run.result(30)
    assert len(plan.explain(measure=False).steps) == 4


def test_the_table_has_the_longest_steps_first(session: hg.Session) -> None:
    found = session.compile(layered(12)).profile({"x": X}, runs=1)
    lines = found.step_table(most=3).splitlines()
    assert lines[0].split() == ["time", "share", "op", "result", "device", "memory", "arithmetic"]
    assert len(lines) == 5 and "21 more" in lines[-1] and "GFLOP/s" in lines[1]
    assert "matmul + add + silu" in found.step_table() and found.step_table(most=20) in found.table()


def test_programs_read_the_steps(session: hg.Session) -> None:
    found = session.compile(layered(1)).profile({"x": X}, runs=1)
    steps = json.loads(found.json())["steps"]
    assert [one["took_us"] for one in steps] == [one.took_us for one in found.steps]
    assert {tuple(one["ops"]) for one in steps} == {("matmul", "add", "silu"), ("sin",)}
    assert {"nodes", "name", "device", "share", "flops", "size_bytes", "bytes_per_s"} <= steps[0].keys()


def test_a_profile_of_no_run_is_refused(session: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="a profile of 0 runs"):
        session.compile(layered(1)).profile({"x": X}, runs=0)


def test_a_profile_whose_runs_fail_ends_the_measurement(session: hg.Session) -> None:
    g = hg.Graph()
    rows, at = g.input("rows", (4, 8), "f32"), g.input("at", (1,), "i32")
    g.output("y", hg.exp(hg.ops.get_rows(rows, at)))
    plan = session.compile(g)
    rows_of, right = np.ones((4, 8), np.float32), np.zeros(1, np.int32)
    with pytest.raises(hg.OutOfRangeError):
        plan.profile(rows=rows_of, at=right + 9)
    plan.run(rows=rows_of, at=right)
    assert plan.explain().steps == ()


def test_a_freed_plan_has_no_profile(session: hg.Session) -> None:
    plan = session.compile(layered(1))
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.explain(measure=True)


def test_asyncio_has_the_same(url: str) -> None:
    async def run() -> hg.Explanation:
        async with hg.aio.connect(url) as session:
            plan = await session.compile(layered(1))
            return await plan.profile({"x": X}, runs=2)

    assert len(asyncio.run(run()).steps) == 2
