"""Loops over every transport: their results, how they end, and which are refused."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asyncio_tests import run_with_plan
from daemon_urls import DaemonUrls
from loop_graphs import CARRY, LARGE, LoopCase, counting, large, random_case, state_of, step_by_step

import heliograph as hg
from heliograph_backends.registry import open_registry
from heliograph_proto.commands import MAX_LOOP_STEPS

SECONDS = 20.0
X = np.random.default_rng(11).standard_normal((4, 8)).astype(np.float32)
ZERO = np.int32(0)


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(counting())


def halves(steps: int, x: np.ndarray[Any, Any] = X) -> np.ndarray[Any, Any]:
    """About what x is after so many steps."""
    for _ in range(steps):
        x = np.tanh(x * 0.5 + 1.0)
    return x


# Results


def test_a_loop_is_the_plan_run_so_often_in_one_message(session: hg.Session, plan: hg.Plan) -> None:
    x, n = X, ZERO
    for _ in range(5):
        found = plan.run(x=x, n=n)
        x, n = found["y"], found["count"]
    before = session.statistics().sent_commands
    run = plan.loop(x=X, n=ZERO, steps=5, carry=CARRY)
    looped = run.result(SECONDS)
    assert session.statistics().sent_commands == before + 1
    assert run.steps == 5 and looped["count"] == 5
    assert looped["y"].tobytes() == found["y"].tobytes() and np.allclose(looped["y"], halves(5))


def test_a_loop_ends_after_the_step_that_says_so(plan: hg.Plan) -> None:
    run = plan.loop(x=X, n=ZERO, steps=1000, carry=CARRY, until="done")
    assert run.result(SECONDS)["count"] == 7 and run.steps == 7
    # In its first step, and not at all.
    assert plan.loop(x=X, n=np.int32(50), steps=9, carry=CARRY, until="done").result(SECONDS)["count"] == 51
    run = plan.loop(x=X, n=ZERO, steps=np.int64(3), carry=CARRY, until="done")
    assert run.result(SECONDS)["done"].tolist() is False and run.steps == 3


@pytest.mark.parametrize("dtype", ["i8", "u16", "i64", "bool"])
def test_any_integer_or_truth_value_that_is_not_zero_ends_it(session: hg.Session, dtype: str) -> None:
    g = hg.Graph()
    n = g.input("n", (), "i32")
    g.output("m", n + 1)
    # 256 has no bits in its last byte.
    g.output("over", hg.astype(hg.where(n + 1 >= 4, 256 if dtype in ("u16", "i64") else 1, 0), dtype))
    found = session.compile(g).loop(n=ZERO, steps=99, carry={"m": "n"}, until="over")
    assert found.result(SECONDS)["m"] == 4


def test_outputs_may_change_places_and_feed_several_inputs(session: hg.Session) -> None:
    g = hg.Graph()
    a, b = g.input("a", (4, 8), "f32"), g.input("b", (4, 8), "f32")
    c = g.input("c", (4, 8), "f32")
    g.output("a_out", a + 1.0)
    g.output("b_out", b - c)
    g.output("same", a)
    plan = session.compile(g)
    for carry in (
        {"a_out": "b", "b_out": "a"},
        {"a_out": ["a", "b", "c"]},
        {"same": "b", "a_out": ("a",)},
        {"same": ["a", "c"], "b_out": "b"},
        {},
    ):
        for steps in (1, 2, 3, 6):
            case = LoopCase({"a": X, "b": X * 2, "c": X * 3}, carry, steps)
            found = plan.loop(case.inputs, steps=steps, carry=carry).result(SECONDS)
            assert state_of(found) == state_of(step_by_step(plan, case)), (carry, steps)


def test_variables_keep_what_each_step_assigned(session: hg.Session) -> None:
    """Keys of a cache: a row for each step, at the place that the step's number says."""
    g = hg.Graph()
    cache, row = g.variable("cache", (16, 8), "f32"), g.input("row", (1, 8), "f32")
    place = g.input("place", (1,), "i64")
    written = hg.ops.set_rows(cache, row, place)
    g.output("cache", hg.assign(cache, written))
    g.output("next_row", row * 2.0)
    g.output("next_place", place + 1)
    plan = session.compile(g)
    given = {"row": np.ones((1, 8), np.float32), "place": np.zeros(1, np.int64)}
    carry = {"next_row": "row", "next_place": "place"}
    found = plan.loop(given, steps=10, carry=carry, fetch=["cache"]).result(SECONDS)["cache"]
    expected = np.zeros((16, 8), np.float32)
    expected[:10] = 2.0 ** np.arange(10)[:, None]
    assert np.array_equal(found, expected) and np.array_equal(plan.checkpoint()["cache"], expected)
    # A run beside it goes on where it was.
    plan.loop(given, steps=1, carry=carry, fetch=False).result(SECONDS)
    assert np.array_equal(plan.checkpoint()["cache"], expected)


def test_a_loop_may_carry_nothing_but_its_variables(session: hg.Session) -> None:
    g = hg.Graph()
    count = g.variable("count", (), "i32")
    now = hg.assign(count, count + 1)
    g.output("count", now)
    g.output("done", hg.equal(now, 12))
    run = session.compile(g).loop(steps=MAX_LOOP_STEPS, until="done")
    assert run.result(SECONDS)["count"] == 12 and run.steps == 12


def test_tensors_that_are_given_are_not_written(session: hg.Session, plan: hg.Plan) -> None:
    x, n = session.put(X), session.put(ZERO)
    expected = plan.loop(x=X, n=ZERO, steps=6, carry=CARRY).result(SECONDS)["y"]
    for _ in range(2):
        assert np.array_equal(plan.loop(x=x, n=n, steps=6, carry=CARRY).result(SECONDS)["y"], expected)
    assert x.get().tobytes() == X.tobytes() and n.get() == 0


@pytest.mark.parametrize("until", [None, "done"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7])
def test_outputs_stay_on_the_server_or_go_into_tensors(
    session: hg.Session, plan: hg.Plan, steps: int, until: str | None
) -> None:
    expected = plan.loop(x=X, n=ZERO, steps=steps, carry=CARRY, until=until).result(SECONDS)
    loop = plan.loop(x=X, n=ZERO, steps=steps, carry=CARRY, until=until, fetch=False)
    kept = loop.result(SECONDS)
    assert all(isinstance(one, hg.Tensor) for one in kept.values())
    assert state_of({name: one.get() for name, one in kept.items()}) == state_of(expected)
    wide = session.empty((4, 16), "f32")
    for y in (session.empty((4, 8), "f32"), wide[:, ::2]):
        out = {"y": y, "count": session.empty((), "i32")}
        loop = plan.loop(x=X, n=ZERO, steps=steps, carry=CARRY, until=until, out=out)
        found = loop.result(SECONDS)
        assert found["y"] is y and y.get().tobytes() == expected["y"].tobytes()
        assert found["count"].get() == expected["count"]
        assert found["done"] == expected["done"]


def test_an_output_that_is_a_variable_is_what_the_step_left(session: hg.Session) -> None:
    g = hg.Graph()
    v, x = g.variable("v", (4, 8), "f32"), g.input("x", (4, 8), "f32")
    hg.assign(v, x + 1.0)
    g.output("v", v)
    plan = session.compile(g)
    expected = X
    for _ in range(4):
        expected = expected + np.float32(1)
    t = session.empty((4, 8), "f32")
    for out in ({}, {"v": t}):
        found = plan.loop(x=X, steps=4, carry={"v": "x"}, out=out).result(SECONDS)["v"]
        assert np.array_equal(found if not out else t.get(), expected)
        assert np.array_equal(plan.checkpoint()["v"], expected)
    # The variable itself as an input: each step sees what the one before assigned.
    plan.variables["v"].set(X)
    found = plan.loop(x=plan.variables["v"], steps=4).result(SECONDS)["v"]
    assert np.array_equal(found, expected)


def test_large_values_are_carried_and_fetched(session: hg.Session) -> None:
    given = np.random.default_rng(3).random(LARGE).astype(np.float32)
    run = large(session).loop(x=given, steps=4, carry={"y": "x"})
    expected = given
    for _ in range(4):
        expected = expected + np.float32(1)
    assert np.array_equal(run.result(SECONDS)["y"], expected)


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_have_the_bits_of_runs_one_by_one(seed: int) -> None:
    print(f"seed {seed}")
    with hg.connect("local:") as session:
        random_loops_agree(session, seed)


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_have_the_same_bits_over_several_devices(seed: int, several: hg.Session) -> None:
    print(f"seed {seed}")
    random_loops_agree(several, seed, ["cpu0", "cpu1", "far"])


def random_loops_agree(session: hg.Session, seed: int, devices: list[str] | None = None) -> None:
    graph, case, pins = random_case(seed, devices)
    plan = session.compile(graph, devices, pins=pins)
    if seed % 3 == 0:
        # A variable as an input: what a step assigns the next one sees, unless a value is carried there.
        case = replace(case, inputs={**case.inputs, "x2": plan.variables["v1"]})
    expected = step_by_step(plan, case)
    variables = plan.checkpoint()
    for taps, fetch in ((None, True), ([*plan.outputs], seed % 2 == 0)):
        for tensor in plan.variables.values():
            tensor.memset(0)
        loop = {"steps": case.steps, "carry": case.carry, "taps": taps, "fetch": fetch}
        run = plan.loop(case.inputs, **loop)
        found = {name: one if fetch else one.get() for name, one in run.result(SECONDS).items()}
        assert state_of(found) == state_of(expected), f"seed {seed}"
        assert state_of(plan.checkpoint()) == state_of(variables), f"seed {seed}: a variable"
    last = {tap.name: tap.value for tap in run.taps() if tap.step == case.steps - 1}
    assert state_of(last) == state_of(expected), f"seed {seed}: what was streamed"


def test_a_plan_over_several_devices_loops_and_is_observed(several: hg.Session) -> None:
    plan = several.compile(
        counting(), ["cpu0", "cpu1", "far"], pins={"layer/mul*": "far", "layer/tanh*": "cpu1"}
    )
    assert plan.splits > 1
    alone = several.compile(counting())
    for _ in range(2):
        runs = [one.loop(x=X, n=ZERO, steps=9, carry=CARRY, until="done", taps=["layer/*", "y"])
                for one in (plan, alone)]  # fmt: skip
        told = [[(tap.step, tap.name, tap.value.tobytes()) for tap in run.taps(SECONDS)] for run in runs]
        # Nodes side by side come in any order, but no step's values before those of an earlier one.
        assert [step for step, *_ in told[0]] == sorted(step for step, *_ in told[0])
        assert sorted(told[0]) == sorted(told[1]) and {step for step, *_ in told[0]} == set(range(7))
        assert state_of(runs[0].result()) == state_of(runs[1].result())


def test_a_pipelined_plan_loops_beside_its_runs(several: hg.Session) -> None:
    plan = several.compile(counting(), ["cpu0", "cpu1"], pins={"layer/mul*": "cpu1"}, pipeline=3)
    loops = [plan.loop(x=X * k, n=ZERO, steps=20, carry=CARRY) for k in range(5)]
    runs = [plan.submit(x=X * k, n=ZERO) for k in range(5)]
    alone = several.compile(counting())
    for k in range(5):
        expected = alone.loop(x=X * k, n=ZERO, steps=20, carry=CARRY).result(SECONDS)
        assert state_of(loops[k].result(SECONDS)) == state_of(expected)
        assert state_of(runs[k].result(SECONDS)) == state_of(alone.run(x=X * k, n=ZERO))


def test_a_plan_on_another_daemons_device_loops(daemon: DaemonUrls, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (f"remote:url={daemon.tcp}", "cpu:threads=1")
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))
    with hg.connect("local:") as session:
        far, near = (one.name for one in session.devices)
        plan, alone = session.compile(counting(), far), session.compile(counting(), near)
        here = session.put(X, near)
        run = plan.loop(x=here, n=ZERO, steps=30, carry=CARRY, until="done", taps=["y", "layer/mul*"])
        other = alone.loop(x=X, n=ZERO, steps=30, carry=CARRY, until="done", taps=["y", "layer/mul*"])
        told = [[(tap.step, tap.name, tap.value.tobytes()) for tap in one.taps(SECONDS)]
                for one in (run, other)]  # fmt: skip
        assert told[0] == told[1] and len(told[0]) == 14
        assert state_of(run.result()) == state_of(other.result())
        # Values that are the same in all steps lie elsewhere.
        kept = plan.loop(x=here, n=ZERO, steps=4, carry={"count": "n"}, fetch=["y"]).result(SECONDS)
        assert np.array_equal(kept["y"], plan.run(x=X, n=ZERO)["y"])


# How they end


def failing(session: hg.Session) -> hg.Plan:
    """A row of four is read at a place that grows."""
    g = hg.Graph()
    place = g.input("place", (1,), "i64")
    table = g.weight("table", np.arange(8, dtype=np.float32).reshape(4, 2))
    g.output("row", hg.ops.get_rows(table, place))
    g.output("next", place + 1)
    return session.compile(g)


def test_the_error_of_a_step_says_which(session: hg.Session) -> None:
    plan = failing(session)
    run = plan.loop(place=np.zeros(1, np.int64), steps=99, carry={"next": "place"}, taps="row")
    told = []
    with pytest.raises(hg.OutOfRangeError, match=r"in step 4 of the loop: .*4"):
        for tap in run.taps(SECONDS):
            told.append(tap.step)
    assert told == [0, 1, 2, 3] and run.steps == 4
    error = run.exception()
    assert isinstance(error, hg.OutOfRangeError) and "get_rows" in str(error)
    # Its results are spoilt by the same error.
    kept = plan.loop(place=np.zeros(1, np.int64), steps=99, carry={"next": "place"}, fetch=False)
    assert isinstance(kept.exception(SECONDS), hg.OutOfRangeError)
    with pytest.raises(hg.OutOfRangeError, match="in step 4"):
        kept._tensors["row"].get()
    # The plan is as good as before.
    found = plan.loop(place=np.zeros(1, np.int64), steps=4, carry={"next": "place"}).result(SECONDS)
    assert found["row"].tolist() == [[6.0, 7.0]]


def test_a_loop_can_be_cancelled(session: hg.Session, plan: hg.Plan) -> None:
    for taps in (None, "count"):
        run = plan.loop(x=X, n=ZERO, steps=MAX_LOOP_STEPS, carry=CARRY, taps=taps)
        if taps:
            values = run.taps(SECONDS)
            assert [next(values).step for _ in range(3)] == [0, 1, 2]
        assert not run.done() and run.steps is None and run.cancel()
        with pytest.raises(hg.CancelledError, match="was cancelled"):
            run.result(SECONDS)
        assert run.steps is not None and run.steps >= (2 if taps else 0)
    assert plan.run(x=X, n=ZERO, timeout=SECONDS)["count"] == 1


def test_a_loop_that_waits_for_its_reader_can_be_cancelled(session: hg.Session) -> None:
    plan = large(session)
    run = plan.loop(x=np.zeros(LARGE, np.float32), steps=10_000, carry={"y": "x"}, taps="y")
    taps = run.taps(SECONDS)
    next(taps)
    assert run.cancel()
    with pytest.raises(hg.CancelledError):
        list(taps)
    assert plan.run(x=np.zeros(LARGE, np.float32), timeout=SECONDS)["y"][0] == 1


def test_its_time_ends_a_loop(session: hg.Session, plan: hg.Plan) -> None:
    ended = threading.Event()
    run = plan.loop(x=X, n=ZERO, steps=MAX_LOOP_STEPS, carry=CARRY, timeout=0.1)
    run.add_done_callback(lambda _: ended.set())
    assert ended.wait(SECONDS)
    with pytest.raises(hg.DeadlineExceededError, match=r"was not done within 0\.1 s"):
        run.result()
    run = large(session).loop(
        x=np.zeros(LARGE, np.float32), steps=10_000, carry={"y": "x"}, taps="y", timeout=0.3
    )
    taps = run.taps()
    next(taps)
    run.add_done_callback(lambda _: ended.set())
    with pytest.raises(hg.DeadlineExceededError):
        list(taps)
    assert plan.run(x=X, n=ZERO, timeout=SECONDS)["count"] == 1


def test_closing_the_session_ends_a_loop(url: str) -> None:
    with hg.connect(url) as session:
        plan = session.compile(counting())
        run = plan.loop(x=X, n=ZERO, steps=MAX_LOOP_STEPS, carry=CARRY, taps="count")
        next(run.taps(SECONDS))
        waiting = large(session).loop(
            x=np.zeros(LARGE, np.float32), steps=10_000, carry={"y": "x"}, taps="y", stream=session.stream()
        )
    for one in (run, waiting):
        with pytest.raises(hg.SessionClosedError):
            list(one.taps(SECONDS))


def test_commands_behind_a_loop_see_what_it_wrote(session: hg.Session, plan: hg.Plan) -> None:
    y = session.empty((4, 8), "f32")
    loops = [plan.loop(x=X * k, n=ZERO, steps=50, carry=CARRY, out={"y": y}) for k in range(3)]
    found = y.get()
    assert np.array_equal(found, plan.loop(x=X * 2, n=ZERO, steps=50, carry=CARRY).result(SECONDS)["y"])
    assert all(one.exception(SECONDS) is None for one in loops)


def test_what_a_plan_is_said_to_take_is_one_step_of_a_loop(session: hg.Session, plan: hg.Plan) -> None:
    begun = time.perf_counter()
    plan.loop(x=X, n=ZERO, steps=3_000, carry=CARRY).result(SECONDS)
    took_us = (time.perf_counter() - begun) * 1e6
    (split,) = plan.explain().splits
    assert 0 < 2 * split.compute_us < took_us


# Refusals


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ({"steps": 0}, "steps is 0(.|\n)*from 1 to 1,000,000,000"),
        ({"steps": -3}, "steps is -3"),
        ({"steps": MAX_LOOP_STEPS + 1}, "steps is 1000000001"),
        ({"steps": True}, "steps is True"),
        ({"taps": "count", "gather": 2}, "gather is 2(.|\n)*from 0.001 to 1"),
        ({"taps": "count", "gather": 0.0}, "gather is 0.0"),
        ({"taps": "count", "gather": "short"}, "gather is 'short'"),
        ({"steps": 2.0}, "steps is 2.0"),
        ({"carry": ["y"]}, "carry is list(.|\n)*by the names of outputs"),
        ({"carry": {"yy": "x"}}, "no output 'yy'(.|\n)*did you mean 'y'"),
        ({"carry": {"y": "xx"}}, "no input 'xx'(.|\n)*did you mean 'x'"),
        ({"carry": {"y": 3}}, "no input '?3"),
        ({"carry": {"count": "x"}}, r"'count' is i32\[\], but .*'x' that takes it is f32\[4, 8\]"),
        ({"carry": {"y": ["x", "x"]}}, "'x' takes its value from two outputs"),
        ({"until": "nothing"}, "no output 'nothing'(.|\n)*there are: y, count, done"),
        ({"until": "y"}, "'y' is f32.* only one bool or integer can end a loop(.|\n)*hg.any"),
        ({"until": 3}, "no output"),
        ({"taps": ["count", "laier/*"]}, "no node matches 'laier/.'"),
        ({"taps": 7}, "taps is int"),
    ],
)
def test_loops_that_mean_nothing_are_refused_before_anything_is_sent(
    session: hg.Session, plan: hg.Plan, loop: dict[str, Any], words: str
) -> None:
    before = session.statistics().sent_commands
    with pytest.raises(hg.InvalidArgumentError, match=words):
        plan.loop(x=X, n=ZERO, **{"steps": 5, **loop})
    assert session.statistics().sent_commands == before


def test_inputs_are_checked_as_those_of_a_run(session: hg.Session, plan: hg.Plan) -> None:
    with pytest.raises(hg.InvalidInputError, match="inputs are missing: 'n'"):
        plan.loop(x=X, steps=2, carry=CARRY)
    with pytest.raises(hg.InvalidArgumentError, match="nothing of the run is observed"):
        plan.loop(x=X, n=ZERO, steps=2).taps()
    g = hg.Graph()
    g.output("y", g.input("steps", (2,), "f32") + g.input("carry", (2,), "f32"))
    ones = np.ones(2, np.float32)
    named = session.compile(g)
    found = named.loop({"steps": ones, "carry": ones}, steps=3, carry={"y": "carry"})
    assert found.result(SECONDS)["y"].tolist() == [4.0, 4.0]
    # They are options of `loop` alone.
    assert named.run(steps=ones, carry=ones)["y"].tolist() == [2.0, 2.0]
    with pytest.raises(hg.InvalidInputError, match=r"name each: plan\.run\(steps=STEPS, carry=CARRY\)"):
        named.run()
    with pytest.raises(hg.InvalidInputError, match=r"name each: plan\.submit\(steps=STEPS, "):
        named.submit(steps=ones)
    words = r"plan\.loop\(\{'steps': ARRAY, .*\}, steps=N\); as a keyword, steps= is an option of plan\.loop"
    with pytest.raises(hg.InvalidInputError, match=words):
        named.loop(steps=3)
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.loop(x=X, n=ZERO, steps=2)


def test_what_the_server_could_not_hold_is_refused(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (1,), "f32")
    g.output("y", hg.broadcast_to(x, (session.info.limits.in_flight_bytes // 4 + 1,)) * 1.0)
    with pytest.raises(hg.LimitExceededError, match="tap fewer"):
        session.compile(g).loop(x=np.ones(1, np.float32), steps=2, taps="y", fetch=False)


# asyncio


def test_loops_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        given = X.copy()
        run = plan.loop(x=given, n=ZERO, steps=90, carry=CARRY, until="done", taps=["count", "layer/tanh*"])
        assert run.steps is None
        # Compiling what observes may take longer than the caller keeps its array.
        given[:] = 0
        taps = [(tap.step, tap.is_output) async for tap in run.taps(SECONDS)]
        assert taps == [(step, is_output) for step in range(7) for is_output in (False, True)]
        found = await run
        assert found["count"] == 7 and run.steps == 7 and np.allclose(found["y"], halves(7), atol=1e-5)
        out = {"y": session.empty((4, 8), "f32")}
        await plan.loop(x=X, n=ZERO, steps=7, carry=CARRY, out=out)
        assert (await out["y"].get()).tobytes() == found["y"].tobytes()
        with pytest.raises(hg.InvalidArgumentError, match="no output 'z'"):
            plan.loop(x=X, n=ZERO, steps=7, until="z")

    run_with_plan(url, counting(), test)


def test_loops_end_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        endless: dict[str, Any] = {"steps": MAX_LOOP_STEPS, "carry": CARRY}
        run = plan.loop(x=X, n=ZERO, taps="count", **endless)
        async for _ in run.taps(SECONDS):
            assert run.cancel()
            break
        assert isinstance(await run.exception(SECONDS), hg.CancelledError) and run.steps is not None
        run = plan.loop(x=X, n=ZERO, timeout=0.1, **endless)
        assert isinstance(await run.exception(SECONDS), hg.DeadlineExceededError)
        task = asyncio.ensure_future(plan.loop(x=X, n=ZERO, **endless).result())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert (await plan.run(x=X, n=ZERO, timeout=SECONDS))["count"] == 1

    run_with_plan(url, counting(), test)
