"""Values that loops stream while they go on, and loops that wait for their readers."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asyncio_tests import run_with_plan
from loop_graphs import CARRY, LARGE, counting, large

import heliograph as hg
from heliograph_proto.commands import MAX_LOOP_STEPS

SECONDS = 20.0
X = np.random.default_rng(11).standard_normal((4, 8)).astype(np.float32)
ZERO = np.int32(0)


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(counting())


def test_outputs_and_nodes_are_streamed_with_their_steps(plan: hg.Plan) -> None:
    run = plan.loop(x=X, n=ZERO, steps=50, carry=CARRY, until="done", taps=["count", "layer/tanh*", "y"])
    taps = list(run.taps(SECONDS))
    assert [tap.step for tap in taps] == [step for step in range(7) for _ in range(3)]
    nodes, outputs = taps[::3], [taps[1::3], taps[2::3]]
    assert {(tap.name.split("_")[0], tap.op, tap.is_output) for tap in nodes} == {
        ("layer/tanh", "tanh", False)
    }
    # Outputs in the plan's order, behind the nodes.
    assert [{(tap.name, tap.is_output) for tap in found} for found in outputs] == [
        {("y", True)},
        {("count", True)},
    ]
    assert [int(tap.value) for tap in outputs[1]] == list(range(1, 8))
    for node, y in zip(nodes, outputs[0], strict=True):
        assert node.value.tobytes() == y.value.tobytes() and node.number == y.number and node.op == y.op
        assert y.value.flags.owndata and y.value.flags.writeable
    assert run.result()["y"].tobytes() == outputs[0][-1].value.tobytes() and run.steps == 7


def test_an_output_that_is_a_leaf_is_streamed(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2,), "f32")
    g.output("before", x)
    g.output("after", x + 1.0)
    run = session.compile(g).loop(x=np.zeros(2, np.float32), steps=3, carry={"after": "x"}, taps="before")
    taps = list(run.taps(SECONDS))
    assert [tap.value.tolist() for tap in taps] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert {(tap.name, tap.op, tap.number) for tap in taps} == {("before", "input", -1)}


def test_values_of_every_type_and_of_no_elements_are_streamed(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2, 32), "f32")
    for dtype in ("f64", "f16", "bf16", "i8", "u16", "bool"):
        g.output(dtype, hg.astype(x, dtype))
    g.output("none", g.input("none", (0, 3), "f32") + 1.0)
    plan = session.compile(g)
    given = {"x": np.arange(64, dtype=np.float32).reshape(2, 32), "none": np.empty((0, 3), np.float32)}
    run = plan.loop(given, steps=2, carry={"none": "none"}, taps=[*plan.outputs])
    taps, expected = list(run.taps(SECONDS)), run.result()
    assert len(taps) == 14
    for tap in taps:
        assert tap.value.dtype == expected[tap.name].dtype and np.array_equal(tap.value, expected[tap.name])


def test_many_small_values_all_come(plan: hg.Plan) -> None:
    run = plan.loop(x=X, n=ZERO, steps=20_000, carry=CARRY, taps="count")
    assert [int(tap.value) for tap in run.taps(60)] == list(range(1, 20_001))
    assert run.steps == 20_000


def test_values_that_gather_for_long_all_come_and_at_the_latest_with_the_result(plan: hg.Plan) -> None:
    run = plan.loop(x=X, n=ZERO, steps=300, carry=CARRY, taps="count", gather=1.0)
    begun = time.perf_counter()
    assert [int(tap.value) for tap in run.taps(SECONDS)] == list(range(1, 301))
    assert time.perf_counter() - begun < 0.9 and run.steps == 300


def test_loops_beside_each_other_wait_for_their_own_readers(
    session: hg.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A handful of values may be unread, so each loop waits again and again.
    monkeypatch.setattr("heliograph.procedures.run.UNREAD_PART", 100_000)
    found: dict[int, list[int]] = {}

    def read(number: int) -> None:
        plan, stream = session.compile(counting(number)), session.stream()
        run = plan.loop(
            x=X, n=ZERO, steps=5_000, carry=CARRY, until="done", taps=["count", "y"], stream=stream
        )
        found[number] = [int(tap.value) for tap in run.taps(SECONDS) if tap.name == "count"]

    threads = [threading.Thread(target=read, args=(number,)) for number in (300, 400, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == {number: list(range(1, number + 1)) for number in (300, 400, 500)}


def test_a_loop_waits_for_who_reads_slowly(session: hg.Session) -> None:
    other, stream = session.compile(counting()), session.stream()
    run = large(session).loop(x=np.zeros(LARGE, np.float32), steps=60, carry={"y": "x"}, taps="y")
    taps = run.taps(SECONDS)
    for step in range(30):
        tap = next(taps)
        assert tap.step == step and tap.value[0] == step + 1
        # More is to come than may be on its way.
        assert not run.done()
    # Another stream's work goes on meanwhile.
    assert other.run(x=X, n=ZERO, stream=stream, timeout=SECONDS)["count"] == 1
    assert [tap.step for tap in taps] == list(range(30, 60))
    assert run.result(SECONDS)["y"][0] == 60


def test_many_loops_of_one_thread_wait_for_their_readers_and_hold_nobody_up(
    session: hg.Session, plan: hg.Plan
) -> None:
    loop: dict[str, Any] = {"x": X, "n": ZERO, "steps": MAX_LOOP_STEPS, "carry": CARRY, "timeout": SECONDS}
    other, beside = large(session), session.stream()
    runs = [plan.loop(taps=["count", "y"], **loop) for _ in range(40)]
    # Commands that are sent meanwhile find room for their bytes, and those of other streams are done.
    given = np.arange(2**24, dtype=np.float32)
    put = session.put(given, timeout=SECONDS)
    found = other.run(x=given[: LARGE[0]], stream=beside, timeout=SECONDS)["y"]
    assert found[-1] == LARGE[0]
    assert next(runs[0].taps(SECONDS)).step == 0
    for run in runs:
        assert run.cancel() and isinstance(run.exception(SECONDS), hg.CancelledError)
    assert np.array_equal(put.get(timeout=SECONDS), given)
    assert session.statistics().in_flight_bytes == 0


def test_loops_whose_values_have_no_room_are_refused_and_wait_for_nobody(session: hg.Session) -> None:
    g = hg.Graph()
    shape = (36 * 2**18,)
    g.output("y", g.input("x", shape, "f32") + 1.0)
    plan, x = session.compile(g), session.put(np.zeros(shape, np.float32))
    loop: dict[str, Any] = {"x": x, "steps": 3, "carry": {"y": "x"}, "taps": "y", "fetch": False}
    first, second = (plan.loop(**loop, timeout=60) for _ in range(2))
    with pytest.raises(
        hg.LimitExceededError, match="loops in progress hold(.|\n)*read their taps, or cancel them"
    ):
        plan.loop(**loop, timeout=SECONDS)
    assert [(tap.step, tap.value[0]) for tap in first.taps(SECONDS)] == [(0, 1), (1, 2), (2, 3)]
    third = plan.loop(**loop, timeout=60)
    assert second.cancel()
    assert [tap.step for tap in third.taps(SECONDS)] == [0, 1, 2]


def test_waiting_for_the_result_lets_a_loop_go_on_and_loses_nothing(session: hg.Session) -> None:
    run = large(session).loop(x=np.zeros(LARGE, np.float32), steps=40, carry={"y": "x"}, taps="y")
    taps = run.taps(SECONDS)
    assert next(taps).step == 0
    assert run.result(SECONDS)["y"][0] == 40
    assert [tap.step for tap in taps] == list(range(1, 40))


def test_leaving_the_loop_over_taps_or_dropping_the_future_lets_it_go_on(session: hg.Session) -> None:
    plan = large(session)
    loop: dict[str, Any] = {"steps": 40, "carry": {"y": "x"}, "taps": "y"}
    run = plan.loop(x=np.zeros(LARGE, np.float32), **loop)
    for _ in run.taps(SECONDS):
        break
    gc.collect()
    ended = threading.Event()
    run.add_done_callback(lambda _: ended.set())
    assert ended.wait(SECONDS) and run.exception() is None
    run = plan.loop(x=np.zeros(LARGE, np.float32), **loop)
    next(run.taps(SECONDS))
    del run
    gc.collect()
    session.synchronize(SECONDS)


def test_what_cannot_be_kept_is_told(session: hg.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(session.info.limits, in_flight_bytes=8 * 2**20)
    monkeypatch.setattr(session._shell, "info", replace(session.info, limits=limits))
    run = large(session).loop(x=np.zeros(LARGE, np.float32), steps=60, carry={"y": "x"}, taps="y")
    assert run.result(60)["y"][0] == 60
    steps = []
    with pytest.raises(hg.LimitExceededError, match="were dropped(.|\n)*before waiting for run.result"):
        for tap in run.taps(SECONDS):
            steps.append(tap.step)
    # Those before the first that is missing.
    assert steps == list(range(len(steps))) and 8 <= len(steps) < 60


def test_a_loop_waits_for_its_reader_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, _: hg.aio.Plan) -> None:
        g = hg.Graph()
        g.output("y", g.input("x", LARGE, "f32") + 1.0)
        plan = await session.compile(g)
        run = plan.loop(x=np.zeros(LARGE, np.float32), steps=40, carry={"y": "x"}, taps="y")
        steps = []
        async for tap in run.taps(SECONDS):
            steps.append(tap.step)
            if len(steps) == 20:
                assert not run.done()
        assert steps == list(range(40))
        run = plan.loop(x=np.zeros(LARGE, np.float32), steps=40, carry={"y": "x"}, taps="y")
        async for _tap in run.taps(SECONDS):
            break
        gc.collect()
        assert await run.exception(SECONDS) is None

    run_with_plan(url, counting(), test)
