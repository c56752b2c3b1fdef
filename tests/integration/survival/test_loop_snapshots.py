"""Snapshots between two steps of a running loop: a restart goes on from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_daemons import DEVICE, daemons
from surviving_daemons import SurvivingDaemon

import heliograph as hg

SIZE = 1000
STEPS = 20_000
SECONDS = 60.0


def summing(last: int = -1) -> hg.Graph:
    """x turns, total is a variable that sums it up, and n counts; `done` at the step `last`."""
    g = hg.Graph()
    x, n = g.input("x", (SIZE,), "f32"), g.input("n", (), "i32")
    total = g.variable("total", (SIZE,), "f32")
    y = hg.sin(x) * 1.5 + 0.25
    g.output("y", y)
    g.output("m", n + 1)
    g.output("total", hg.sum(hg.assign(total, total + y)))
    g.output("done", hg.equal(n + 1, last))
    return g


X = np.linspace(-1, 1, SIZE, dtype=np.float32)


def looped(plan: Any, steps: int = STEPS, **how: Any) -> Any:
    given = {"x": X, "n": np.int32(0)}
    return plan.loop(given, steps=steps, carry={"y": "x", "m": "n"}, **how)


def told(loop: Any) -> list[Any]:
    """Everything that a loop tells."""
    taps = [(tap.name, tap.step, tap.value.tobytes()) for tap in loop.taps(SECONDS)]
    return [taps, loop.steps, {name: one.tobytes() for name, one in loop.result(SECONDS).items()}]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with hg.connect("local:") as session:
        return told(looped(session.compile(summing()), taps=["m", "total"], fetch=["y", "total"]))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SurvivingDaemon]:
    """It takes no snapshots by itself, so that tests know where it goes on."""
    with SurvivingDaemon(tmp_path / "state", "--snapshot-seconds", "0") as daemon:
        yield daemon


@pytest.fixture(params=["folder", "memory"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SurvivingDaemon]:
    """The same with its state in a folder, and in the memory of another daemon."""
    with ExitStack() as stack:
        place: Path | str = tmp_path / "state"
        if request.param == "memory":
            (keeper,) = stack.enter_context(daemons(1, "--device", DEVICE, "--kept-state-size", "1GiB"))
            place = f"{keeper.url}/loops"
        yield stack.enter_context(SurvivingDaemon(place, "--snapshot-seconds", "0"))


def test_a_loop_goes_on_from_the_step_of_its_snapshot(either: SurvivingDaemon, expected: list[Any]) -> None:
    daemon = either
    with daemon.connect(progress=None) as session:
        plan = session.compile(summing())
        loop = looped(plan, taps=["m", "total"], fetch=["y", "total"])
        taps, found, kills = loop.taps(SECONDS), [], 0
        for tap in taps:
            found.append((tap.name, tap.step, tap.value.tobytes()))
            if tap.name == "m" and tap.step in (100, 3000):
                made = session.snapshot()
                assert made.sequence < loop._pending.sequence
            if tap.name == "m" and tap.step in (200, 3001, 4000):
                kills += 1
                daemon.restart()
        assert kills == 3
        result = {name: one.tobytes() for name, one in loop.result(SECONDS).items()}
        assert [found, loop.steps, result] == expected
        # The variable has each step once, in later runs too.
        after = plan.run(x=X, n=np.int32(0))["total"]
        with hg.connect("local:") as calm:
            other = calm.compile(summing())
            looped(other).result(SECONDS)
            assert after.tobytes() == other.run(x=X, n=np.int32(0))["total"].tobytes()


def test_a_snapshot_of_a_loop_that_nobody_reads_and_whose_results_are_tensors(
    daemon: SurvivingDaemon,
) -> None:
    with daemon.connect(progress=None) as session:
        plan = session.compile(summing())
        into = session.empty((SIZE,), "f32")
        # Nothing holds it back, so it has more steps than any machine does meanwhile, and is stopped.
        loop = looped(plan, STEPS * 10_000, out={"y": into}, fetch=["total"])
        taken = session.snapshot()
        daemon.restart()
        again = session.snapshot()
        assert taken.sequence == again.sequence and not loop.done()
        daemon.restart()
        loop.stop()
        total = loop.result(SECONDS)["total"]
        with hg.connect("local:") as calm:
            expected = looped(calm.compile(summing()), loop.steps, fetch=["y", "total"]).result(SECONDS)
        assert total.tobytes() == expected["total"].tobytes()
        assert into.get().tobytes() == expected["y"].tobytes()


def test_a_loop_that_ends_by_itself_ends_at_the_same_step(daemon: SurvivingDaemon) -> None:
    with hg.connect("local:") as calm:
        expected = told(looped(calm.compile(summing(STEPS // 2)), until="done", taps=["m"]))
    with daemon.connect(progress=None) as session:
        plan = session.compile(summing(STEPS // 2))
        loop = looped(plan, until="done", taps=["m"])
        taps = loop.taps(SECONDS)
        first = next(taps)
        session.snapshot()
        daemon.restart()
        found = [(one.name, one.step, one.value.tobytes()) for one in [first, *taps]]
        assert [found, loop.steps] == expected[:2]


def test_a_loop_that_was_stopped_after_its_snapshot_is_done_again_to_the_same_step(
    daemon: SurvivingDaemon,
) -> None:
    with hg.connect("local:") as calm, daemon.connect(progress=None) as session:
        plan, other = session.compile(summing()), calm.compile(summing())
        loop = looped(plan, taps=["m"])
        values = loop.taps(SECONDS)
        next(values)
        session.snapshot()
        loop.stop()
        assert [int(one.value) for one in values] == list(range(2, loop.steps + 1))
        looped(other, loop.steps).result(SECONDS)
        for _ in range(2):
            expected = other.run(x=X, n=np.int32(0))["total"]
            assert plan.run(x=X, n=np.int32(0))["total"].tobytes() == expected.tobytes()
            daemon.restart()


def test_snapshots_that_come_by_themselves_do_not_wait_for_the_end_of_a_loop(
    tmp_path: Path, expected: list[Any]
) -> None:
    often = ("--snapshot-seconds", "0.1")
    with SurvivingDaemon(tmp_path / "state", *often) as daemon, daemon.connect(progress=None) as session:
        plan = session.compile(summing())
        found = []
        loop = looped(plan, taps=["m", "total"], fetch=["y", "total"])
        for tap in loop.taps(SECONDS):
            found.append((tap.name, tap.step, tap.value.tobytes()))
            if tap.name == "m" and tap.step % 4000 == 3999:
                daemon.restart()
        result = {name: one.tobytes() for name, one in loop.result(SECONDS).items()}
        assert [found, loop.steps, result] == expected


def test_a_loop_is_held_until_it_was_fed(daemon: SurvivingDaemon) -> None:
    with daemon.connect(progress=None) as session:
        plan = session.compile(summing())
        loop = looped(plan, steps=10**6, feed=["x"])
        before = session.snapshot()
        loop.feed({"x": X + 1}).result(SECONDS)
        with pytest.raises(hg.SnapshotFailedError, match="commands are under way"):
            session.snapshot(wait_seconds=0.3)
        loop.stop()
        loop.result(SECONDS)
        assert session.snapshot().sequence > before.sequence
        # A loop that is fed after its snapshot cannot be done again.
        loop = looped(plan, steps=10**6, feed=["x"])
        session.snapshot()
        loop.feed({"x": X + 1}).result(SECONDS)
        daemon.restart()
        with pytest.raises(hg.NotReplayableError, match="a loop took values"):
            loop.result(SECONDS)


def test_a_loop_goes_on_from_its_snapshot_under_asyncio(daemon: SurvivingDaemon, expected: list[Any]) -> None:
    async def run() -> None:
        async with hg.aio.connect(daemon.url, progress=None, durable=True) as session:
            plan = await session.compile(summing())
            loop = looped(plan, taps=["m", "total"], fetch=["y", "total"])
            found = []
            async for tap in loop.taps(SECONDS):
                found.append((tap.name, tap.step, tap.value.tobytes()))
                if tap.name == "m" and tap.step == 1000:
                    await session.snapshot()
                    await asyncio.to_thread(daemon.restart)
            result = {name: one.tobytes() for name, one in (await loop.result()).items()}
            assert [found, loop.steps, result] == expected

    asyncio.run(run())
