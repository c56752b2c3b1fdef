"""Durable sessions over kills of their daemon: the program goes on by itself, with the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_daemons import running_daemon
from killed_programs import SIZE, compared, doubling, summing
from surviving_daemons import SurvivingDaemon
from waiting import until

import heliograph as hg
import heliograph.admin
from heliograph.admin import DrainState

SECONDS = 60.0
X = np.arange(4, dtype=np.float32) + 1


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SurvivingDaemon]:
    with SurvivingDaemon(tmp_path / "state", "--snapshot-seconds", "0") as made:
        yield made


def adder() -> hg.Graph:
    """total += x, and total is returned."""
    g = hg.Graph()
    x, total = g.input("x", (4,), "f32"), g.variable("small", (4,), "f32")
    g.output("y", hg.assign(total, total + x))
    return g


def test_variables_tensors_and_plans_go_on_after_a_kill(daemon: SurvivingDaemon) -> None:
    with daemon.connect() as session:
        plan = session.compile(adder())
        tensor = session.put(X)
        assert plan.run(x=X)["y"].tolist() == X.tolist()
        session.snapshot()
        plan.run(x=X)
        tensor.set(3 * X)
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (3 * X).tolist()
        assert tensor.get().tolist() == (3 * X).tolist()


@pytest.mark.parametrize(("seed", "seconds"), [(0, "0.05"), (3, "0")])
def test_a_program_sees_the_same_when_its_daemon_is_killed_at_random(
    tmp_path: Path, seed: int, seconds: str
) -> None:
    assert compared(tmp_path, seed, seconds) >= 2


def test_an_upgrade_loses_nothing_and_a_session_that_was_closed_leaves_nothing(
    daemon: SurvivingDaemon,
) -> None:
    with daemon.connect() as session:
        plan = session.compile(adder())
        plan.run(x=X)
        assert daemon.stop() == 0
        daemon.start()
        assert plan.run(x=X)["y"].tolist() == (2 * X).tolist()
    assert not list((daemon.folder / "sessions").iterdir())


def kept(daemon: SurvivingDaemon) -> int:
    """The sessions in the daemon's folder."""
    return len(list((daemon.folder / "sessions").iterdir()))


def test_an_undone_drain_brings_durable_sessions_back_and_later_ones_leave_nothing(
    daemon: SurvivingDaemon,
) -> None:
    with daemon.connect() as session, heliograph.admin.connect(daemon.url) as admin:
        plan = session.compile(adder())
        plan.run(x=X)
        admin.drain(stay=True)
        assert admin.wait_drained(SECONDS).state is DrainState.DRAINED
        assert admin.sessions() == () and kept(daemon) == 1
        admin.undo_drain()
        assert plan.run(x=X, timeout=SECONDS)["y"].tolist() == (2 * X).tolist()
        with daemon.connect():
            assert kept(daemon) == 2
        until(lambda: kept(daemon) == 1)
    until(lambda: kept(daemon) == 0)


@pytest.fixture
def url() -> Iterator[str]:
    """A daemon without a folder."""
    with running_daemon() as found:
        yield found


def test_a_daemon_without_a_folder_says_how_to_give_it_one(url: str) -> None:
    with pytest.raises(hg.UnsupportedError, match="--state DIR"):
        hg.connect(url, durable=True)
    with hg.connect(url) as session, pytest.raises(hg.UnsupportedError, match="durable=True"):
        session.snapshot()
    with pytest.raises(hg.UnsupportedError, match="ends with it"):
        hg.connect("local:", durable=True)
    for wrong in (-1.0, 0.01, "yes", float("nan")):
        with pytest.raises(hg.InvalidArgumentError, match="durable="):
            hg.connect(url, durable=wrong)  # type: ignore[arg-type]
    with pytest.raises(hg.InvalidArgumentError, match="leave reconnect"):
        hg.connect(url, durable=True, reconnect=False)


def test_a_full_disk_is_a_typed_error_and_runs_go_on(daemon: SurvivingDaemon) -> None:
    with daemon.connect() as session:
        plan = session.compile(adder())
        plan.run(x=X)
        before = session.snapshot()
        # A disk that takes nothing, also from root.
        (daemon.folder / "parts").rename(daemon.folder / "away")
        session.put(np.arange(1000, dtype=np.float32))
        with pytest.raises(hg.SnapshotFailedError, match="to the state folder failed"):
            session.snapshot()
        assert plan.run(x=X)["y"].tolist() == (2 * X).tolist()
        (daemon.folder / "away").rename(daemon.folder / "parts")
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (3 * X).tolist()
        assert session.snapshot().sequence > before.sequence


def test_an_asyncio_program_goes_on_after_a_kill(daemon: SurvivingDaemon) -> None:
    async def main() -> None:
        async with hg.aio.connect(daemon.url, durable=True) as session:
            plan = await session.compile(adder())
            weighted = await session.compile(summing())
            x = np.ones(SIZE, np.float32)
            await weighted.run(x=x)
            await session.snapshot()
            await plan.run(x=X)
            tensor = await session.put(X)
            later = await session.compile(doubling())
            await asyncio.to_thread(daemon.restart)
            assert (await plan.run(x=X))["y"].tolist() == (2 * X).tolist()
            assert (await tensor.get()).tolist() == X.tolist()
            assert (await later.run(x=x))["y"].tolist() == (2 * x).tolist()
            loop = plan.loop(x=X, steps=50, taps=["y"])
            await asyncio.to_thread(daemon.restart)
            found = [tap.value[0] async for tap in loop.taps()]
            assert found == [float(n) for n in range(3, 53)]
            found_again = (await weighted.run(x=x))["y"]
            assert found_again.tolist() == (2 * np.linspace(0.5, 2, SIZE, dtype=np.float32)).tolist()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
