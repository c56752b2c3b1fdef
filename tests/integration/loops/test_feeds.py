"""Feeds of running loops over every transport: the steps that take them, and those that are late."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
from asyncio_tests import run_with_plan
from daemon_processes import started
from fed_loops import ROWS, WIDTH, N, Replay, X, adding, check_random_feeds, endless, random_feed

import heliograph as hg
from heliograph.aio.run_future import RunFuture
from heliograph_proto.commands import MAX_LOOP_STEPS

SECONDS = 20.0


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(adding())


# Steps that take feeds


def test_a_loop_with_feeds_is_what_numpy_computes_with_the_steps_that_were_told(plan: hg.Plan) -> None:
    check_random_feeds(plan, 10_000, 1_000, 1)


@pytest.mark.parametrize("seed", range(6))
def test_short_loops_may_end_before_their_feeds(seed: int) -> None:
    with hg.connect("local:") as session:
        check_random_feeds(session.compile(adding()), 40, 60, seed)


def test_a_feed_tells_its_step_and_taps_show_it(plan: hg.Plan) -> None:
    loop = endless(plan, steps=400, taps=["same", "y"])
    feed = loop.feed({"x": X[:1] + 64.0, "b": X[:1] + 2.0}, rows=[3])
    step = feed.result(SECONDS)
    same = {tap.step: tap.value for tap in loop.taps(SECONDS) if tap.name == "same"}
    assert feed.done() and loop.result(SECONDS)["m"] == 400
    assert same[step][3].tolist() == [64.0] * WIDTH
    # The carry goes on from there, with what the other input keeps.
    assert same[step + 1][3].tolist() == [34.0] * WIDTH
    assert all(not value[:3].any() for value in same.values())
    assert same[399][3].tolist() == [4.0] * WIDTH


def test_an_input_that_is_not_carried_keeps_what_was_fed(plan: hg.Plan) -> None:
    loop = endless(plan)
    loop.feed({"b": X + 1.0}).result(SECONDS)
    last = loop.feed({"b": X[:1] + 3.0}, rows=[1]).result(SECONDS)
    while loop.feed({"x": X}).result(SECONDS) < last + 64:
        pass
    assert loop.stop()
    found = loop.result(SECONDS)["y"]
    # 1 + 1/2 + 1/4 + ... of whatever was fed to x.
    assert (found[1] / found[0]).tolist() == [3.0] * WIDTH


def test_feeds_of_the_same_rows_go_to_steps_of_their_own_and_others_together(
    session: hg.Session,
) -> None:
    """All were sent before the first step could begin."""
    plan = session.compile(adding())
    blocker = endless(session.compile(adding(1)), timeout=SECONDS)
    loop = endless(plan, steps=100, taps="same")
    given = [
        ({"x": X[:1] + 1.0}, [0]),
        ({"x": X[:2] + 2.0}, [2, 1]),
        ({"b": X[:1]}, [0]),
        ({"x": X[:1] + 3.0}, [1]),
        ({"b": X}, None),
        ({"x": X[:1] + 4.0}, [1]),
    ]
    fed = [loop.feed(values, rows=rows) for values, rows in given]
    assert blocker.stop()
    steps = [one.result(SECONDS) for one in fed]
    assert steps == sorted(steps) and loop.result(SECONDS)["m"] == 100
    same = {tap.step: tap.value[:, 0] for tap in loop.taps(SECONDS)}
    # Each of the three values of row 1 was the input of a step.
    assert len({steps[1], steps[3], steps[5]}) == 3
    assert same[steps[1]][1:3].tolist() == [2.0, 2.0]
    assert same[steps[3]][1] == 3.0 and same[steps[5]][1] == 4.0


def test_an_output_that_feeds_two_inputs_may_be_replaced_in_one(session: hg.Session) -> None:
    g = hg.Graph()
    a, b = g.input("a", (2,), "i32"), g.input("b", (2,), "i32")
    g.output("c", a + 1)
    g.output("difference", b - a)
    zeros = np.zeros(2, np.int32)
    given = {"a": zeros, "b": zeros}
    loop = session.compile(g).loop(
        given, steps=300, carry={"c": ["a", "b"]}, feed="b", taps=["difference", "c"]
    )
    step = loop.feed({"b": [1000]}, rows=[1]).result(SECONDS)
    taps = {(tap.name, tap.step): tap.value for tap in loop.taps(SECONDS)}
    assert taps["difference", step].tolist() == [0, 1000 - step]
    assert all(not taps["difference", other].any() for other in range(300) if other != step)
    # The streamed outputs are those of the steps.
    assert all(taps["c", one].tolist() == [one + 1] * 2 for one in range(300))


def test_given_tensors_and_results_into_tensors_are_not_changed_by_feeds(
    session: hg.Session, plan: hg.Plan
) -> None:
    x, b, y = session.put(X + 1.0), session.put(X + 2.0), session.empty((ROWS, WIDTH), "f32")
    loop = endless(plan, x=x, b=b, steps=200, out={"y": y})
    for _ in range(20):
        loop.feed({"x": X + 5.0, "b": X + 6.0})
    loop.result(SECONDS)
    assert np.array_equal(x.get(), X + 1.0) and np.array_equal(b.get(), X + 2.0)
    assert np.array_equal(y.get(), X + 12.0) or (y.get() < 12.0).all()


def test_rows_of_one_number_and_of_matrices_and_whole_scalars(session: hg.Session) -> None:
    g = hg.Graph()
    v, m = g.input("v", (5,), "i64"), g.input("m", (3, 2, 2), "f16")
    s = g.input("s", (), "i32")
    for name, value in (("v", v), ("m", m), ("s", s)):
        g.output(f"{name}_out", value * 1)
    plan = session.compile(g)
    given = {"v": np.arange(5), "m": np.zeros((3, 2, 2), np.float16), "s": np.int32(0)}
    loop = plan.loop(given, steps=MAX_LOOP_STEPS, feed=["v", "m", "s"])
    loop.feed({"v": [40, 10], "m": np.ones((2, 2, 2), np.float16)}, rows=[2, 0])
    loop.feed({"s": np.int32(7)}).result(SECONDS)
    assert loop.stop()
    found = loop.result(SECONDS)
    assert found["v_out"].tolist() == [10, 1, 40, 3, 4] and found["s_out"] == 7
    assert found["m_out"][:, 0, 0].tolist() == [1.0, 0.0, 1.0]


# Several feeders


def test_two_sessions_feed_their_own_loops(url: str) -> None:
    with hg.connect(url) as one, hg.connect(url) as other:
        loops = [endless(session.compile(adding())) for session in (one, other)]
        for number in range(50):
            for place, loop in enumerate(loops):
                loop.feed({"b": X + np.float32(10 * place + number)}).result(SECONDS)
        for place, loop in enumerate(loops):
            last = loop.feed({"x": X}).result(SECONDS)
            while loop.feed({"x": X}).result(SECONDS) < last + 64:
                pass
            loop.stop()
            assert (loop.result(SECONDS)["y"] >= 10 * place + 49).all()


def test_several_threads_feed_one_loop(plan: hg.Plan) -> None:
    loop = endless(plan)
    steps: list[list[int]] = [[] for _ in range(4)]

    def feed(row: int) -> None:
        made = [loop.feed({"x": X[:1] + k}, rows=[row]) for k in range(100)]
        steps[row].extend(one.result(SECONDS) for one in made)

    threads = [threading.Thread(target=feed, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert loop.stop() and loop.result(SECONDS)
    # Each thread's feeds of its row are in steps of their own, in their order.
    assert all(len(one) == 100 and one == sorted(set(one)) for one in steps)


def test_other_commands_that_wait_for_the_loop_hold_no_feed_up(session: hg.Session, plan: hg.Plan) -> None:
    b = session.put(X)
    loop = endless(plan, b=b, feed="x")
    # They come after the loop on its stream, and so does the write of what it reads.
    waiting = [plan.submit(x=X, b=b, n=N) for _ in range(100)]
    b.memset(0)
    assert loop.feed({"x": X + 1.0}).result(SECONDS) >= 0
    assert not waiting[0].done() and loop.stop()
    assert waiting[-1].result(SECONDS)["m"] == 1


def test_more_feeds_than_have_room_wait_for_their_turn(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2**13,), "f32")
    g.output("y", x + 1.0)
    g.output("sum", hg.sum(x))
    plan = session.compile(g)
    loop = plan.loop(x=np.zeros(2**13, np.float32), steps=5_000_000, carry={"y": "x"}, feed="x")
    fed = [loop.feed({"x": np.full(2**13, k, np.float32)}) for k in range(40)]
    steps = [one.result(SECONDS) for one in fed]
    assert steps == sorted(set(steps))
    assert loop.cancel() and isinstance(loop.exception(SECONDS), hg.CancelledError)


# How it ends


def test_a_feed_after_the_last_step_is_told_that_it_is_too_late(plan: hg.Plan) -> None:
    loop = endless(plan, steps=3)
    loop.result(SECONDS)
    late = loop.feed({"x": X})
    with pytest.raises(hg.LoopEndedError, match="before a step took the feed(.|\n)*start another loop"):
        late.result(SECONDS)
    assert late.done() and isinstance(late.exception(), hg.LoopEndedError)


@pytest.mark.parametrize("how", ["stop", "cancel", "until"])
def test_each_feed_reaches_a_step_or_says_that_it_did_not(session: hg.Session, how: str) -> None:
    plan = session.compile(adding(3_000))
    loop = endless(plan, until="done" if how == "until" else None)
    fed = []
    ended = threading.Event()
    loop.add_done_callback(lambda _: ended.set())
    for number in range(1_000):
        fed.append(loop.feed({"x": X}))
        if number == 200 and how != "until":
            fed[100].result(SECONDS)
            assert loop.stop() if how == "stop" else loop.cancel()
    errors = [one.exception(SECONDS) for one in fed]
    if how == "until":
        assert isinstance(loop.feed({"x": X}).exception(SECONDS), hg.LoopEndedError | None)
        assert ended.wait(SECONDS)
    assert ended.wait(SECONDS) and loop.steps is not None
    taken = [one.result() for one, error in zip(fed, errors, strict=True) if error is None]
    assert len(set(taken)) == len(taken) and errors == sorted(errors, key=lambda error: error is not None)
    assert all(isinstance(error, hg.LoopEndedError) for error in errors if error is not None)
    # A step that took one may have been cancelled.
    assert not taken or taken[-1] <= loop.steps
    assert plan.run(x=X, b=X, n=N, timeout=SECONDS)["m"] == 1


def test_a_loop_that_fails_takes_no_more_feeds(session: hg.Session) -> None:
    g = hg.Graph()
    place = g.input("place", (1,), "i64")
    table = g.weight("table", np.arange(8, dtype=np.float32).reshape(4, 2))
    g.output("row", hg.ops.get_rows(table, place))
    plan = session.compile(g)
    loop = plan.loop(place=np.zeros(1, np.int64), steps=MAX_LOOP_STEPS, feed="place")
    loop.feed({"place": [3]}).result(SECONDS)
    step = loop.feed({"place": [4]}).result(SECONDS)
    late = loop.feed({"place": [1]})
    with pytest.raises(hg.OutOfRangeError, match=f"in step {step} of the loop"):
        loop.result(SECONDS)
    assert loop.steps == step
    for fed in (late, loop.feed({"place": [1]})):
        # It says why the loop ended.
        with pytest.raises(hg.LoopEndedError, match="took the feed: in step .* index 4 is not one of"):
            fed.result(SECONDS)


def test_a_feed_that_no_step_takes_in_its_time_fails_alone(session: hg.Session, plan: hg.Plan) -> None:
    blocker = endless(session.compile(adding(1)), feed="b")
    # It comes after the other on the stream.
    loop = endless(plan, steps=50)
    late, kept = loop.feed({"b": X + 7.0}, timeout=0.05), loop.feed({"x": X + 64.0})
    with pytest.raises(hg.DeadlineExceededError, match=r"a feed of a loop was not done within 0\.05 s"):
        late.result(SECONDS)
    assert blocker.stop()
    # 64, halved fifty times, and nothing that grows by 7.
    assert (loop.result(SECONDS)["y"] == np.float32(64.0) / 2**50).all() and kept.result() == 0


def test_waiting_for_a_feed_may_take_no_longer_than_is_said(session: hg.Session, plan: hg.Plan) -> None:
    blocker = endless(session.compile(adding(1)), feed="b")
    loop = endless(plan, steps=50)
    fed = loop.feed({"x": X})
    with pytest.raises(hg.DeadlineExceededError):
        fed.result(0.01)
    assert not fed.done() and "pending" in repr(fed)
    assert blocker.stop() and fed.result(SECONDS) == 0 and "done" in repr(fed)


def test_closing_the_session_ends_its_feeds(url: str) -> None:
    with hg.connect(url) as session:
        blocker = endless(session.compile(adding()))
        loop = endless(session.compile(adding(1)))
        fed = [one.feed({"b": X}) for one in (blocker, loop) for _ in range(3)]
    for one in fed:
        assert isinstance(one.exception(SECONDS), hg.SessionClosedError | hg.LoopEndedError | None)
    assert fed[-1].exception() is not None
    with pytest.raises(hg.SessionClosedError):
        loop.feed({"b": X})


def test_a_daemon_that_dies_ends_the_feeds_of_its_loops() -> None:
    with started("--device", "cpu:threads=1") as (process, url), hg.connect(url) as session:
        blocker = endless(session.compile(adding()))
        loop = endless(session.compile(adding(1)))
        assert blocker.feed({"x": X}).result(SECONDS) >= 0
        waiting = [loop.feed({"x": X}) for _ in range(3)]
        process.kill()
        for one in waiting:
            with pytest.raises(hg.ConnectionError):
                one.result(SECONDS)
        with pytest.raises(hg.ConnectionError):
            blocker.feed({"x": X})


def test_nothing_is_kept_of_a_loop_that_was_fed(session: hg.Session, plan: hg.Plan) -> None:
    for _ in range(3):
        loop = endless(plan, steps=100)
        for _ in range(20):
            loop.feed({"x": X, "b": X})
        loop.result(SECONDS)
    del loop
    gc.collect()
    session.synchronize(SECONDS)
    assert session.statistics().in_flight_bytes == 0
    assert not session._shell.core.feeds.known and not session._shell.core.feeds.unsent


# Refusals


@pytest.mark.parametrize(
    ("values", "rows", "error", "words"),
    [
        (
            {"n": 3},
            None,
            hg.InvalidInputError,
            "'n' of the loop may not be fed(.|\n)*those that may are: x, b",
        ),
        ({"z": X}, None, hg.InvalidInputError, "'z' of the loop may not be fed"),
        ({"x": X[:2]}, None, hg.InvalidInputError, r"'x' has shape \(2, 3\); the plan needs \(4, 3\)"),
        ({"x": X}, [1], hg.InvalidInputError, r"'x' has shape \(4, 3\); the plan needs \(1, 3\)"),
        ({"x": X.astype(np.int32)}, None, hg.InvalidInputError, "input 'x'"),
        ({"x": X[:1]}, [4], hg.InvalidInputError, "row 4 of input 'x', which has 4 rows"),
        ({"x": X[:1]}, [-1], hg.InvalidArgumentError, "each once, counted from 0"),
        ({"x": X[:2]}, [1, 1], hg.InvalidArgumentError, "each once"),
        ({"x": X[:0]}, [], hg.InvalidArgumentError, "one row or more"),
        ({"x": X[:1]}, 1, hg.InvalidArgumentError, "rows is 1(.|\n)*numbers of rows"),
        ({}, None, hg.InvalidArgumentError, "a feed is {}"),
        ([X], None, hg.InvalidArgumentError, "by the names of inputs"),
    ],
)
def test_feeds_that_do_not_fit_are_refused_before_anything_is_sent(
    session: hg.Session, values: Any, rows: Any, error: type[Exception], words: str
) -> None:
    loop = endless(session.compile(adding()))
    with pytest.raises(error, match=words):
        loop.feed(values, rows=rows)
    assert loop.feed({"x": X}).result(SECONDS) >= 0 and loop.stop()


def test_what_may_be_fed_is_named_when_the_loop_starts(session: hg.Session, plan: hg.Plan) -> None:
    for feed, words in (("z", "no input 'z'"), ({"x": 1}, "feed is dict"), (3, "feed is int")):
        with pytest.raises(hg.InvalidArgumentError, match=words):
            endless(plan, feed=feed)
    loop = endless(plan, steps=2, feed=None)
    for run in (loop, plan.submit(x=X, b=X, n=N)):
        with pytest.raises(hg.InvalidArgumentError, match=r"may be fed(.|\n)*plan\.loop\(\.\.\., feed="):
            run.feed({"x": X})
    tensor = session.put(X)
    with pytest.raises(hg.InvalidInputError, match="a tensor of the session cannot be fed"):
        endless(plan, steps=2).feed({"x": tensor})


def test_values_larger_than_a_message_takes_are_fed_by_rows(session: hg.Session) -> None:
    g = hg.Graph()
    rows = session.info.limits.inline_bytes // 1024 + 1
    x = g.input("x", (rows, 256), "f32")
    g.output("y", x * 1.0)
    g.output("last", x[-1, -1])
    plan, given = session.compile(g), np.zeros((rows, 256), np.float32)
    loop = plan.loop(x=given, steps=MAX_LOOP_STEPS, feed="x", fetch=["last"])
    with pytest.raises(hg.LimitExceededError, match=r"one input may have(.|\n)*rows="):
        loop.feed({"x": given})
    loop.feed({"x": given[:1] + 5.0}, rows=[rows - 1]).result(SECONDS)
    assert loop.stop() and loop.result(SECONDS)["last"] == 5.0


# Several devices


@pytest.mark.parametrize("device", ["cpu0", "cpu1", "far"])
def test_feeds_reach_plans_over_several_devices(several: hg.Session, device: str) -> None:
    plan = several.compile(adding(), ["cpu0", "cpu1", "far"], pins={"half/*": device})
    check_random_feeds(plan, 300, 100, 5)


# asyncio


def test_feeds_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        random = np.random.default_rng(3)
        loop = endless(plan, steps=2_000)
        sent = []
        for _ in range(200):
            values, rows = random_feed(random)
            sent.append((values, rows, loop.feed(values, rows=rows)))
            if random.random() < 0.3:
                await sent[-1][2].exception(SECONDS)
        found, replay = await loop, Replay()
        for values, rows, fed in sent:
            if await fed.exception(SECONDS) is None:
                replay.run(await fed)
                replay.feed(values, rows)
        replay.run(2_000)
        assert np.array_equal(found["y"], replay.x)
        late = loop.feed({"x": X})
        assert isinstance(await late.exception(SECONDS), hg.LoopEndedError) and late.done()

    run_with_plan(url, adding(), test)


def test_too_many_unsent_feeds_are_refused_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        loop = endless(plan)
        fed = []
        with pytest.raises(hg.LimitExceededError, match="1,024 feeds of the loop wait to be sent"):
            for _ in range(100_000):
                fed.append(loop.feed({"x": X}))
        assert await fed[-1] >= len(fed) - 1
        assert loop.stop()
        await loop

    run_with_plan(url, adding(), test)


def test_a_loop_may_be_fed_before_it_is_sent(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        # Its taps need another plan, which a task compiles.
        loop = endless(plan, taps="y", fetch=["m"])
        other = endless(plan, taps="add*")
        fed = [one.feed({"x": X[:1] + 8.0}, rows=[row]) for one in (loop, other) for row in range(ROWS)]
        steps = [await one for one in fed[:ROWS]]
        assert steps == sorted(steps) and loop.stop()
        assert (await loop)["m"] > steps[-1] and await fed[-1] >= await fed[ROWS]
        # It was never sent.
        gone = endless(plan, taps="mul*")
        late = gone.feed({"x": X})
        assert gone.cancel() and other.stop()
        assert isinstance(await late.exception(SECONDS), hg.LoopEndedError)
        await other

    run_with_plan(url, adding(), test)


def test_feeds_of_a_loop_whose_session_ends_as_it_is_sent_fail(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        first = endless(plan)
        await first.feed({"x": X})
        sent = asyncio.get_running_loop().create_future()
        loop = RunFuture(session._shell, sent, {}, "a loop")
        loop._fed = first._fed
        fed = [loop.feed({"x": X}) for _ in range(2)]
        await session.close()
        # Its end comes before the callbacks of its sending.
        sent.set_result(first._sent.result())
        for one in fed:
            assert isinstance(await one.exception(SECONDS), hg.SessionClosedError)

    run_with_plan(url, adding(), test)
