"""The bar of a loop shows its steps: in both APIs, on members, and after a restart; and nobody else pays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fed_loops import adding, endless
from forked_daemons import running_daemon
from seen_bars import SeenBars
from surviving_daemons import SurvivingDaemon
from waiting import until

import heliograph as hg
import heliograph.admin
from heliograph_proto.codec.commands import decode_completions
from heliograph_proto.commands import MAX_LOOP_STEPS
from heliograph_proto.v1 import command_pb2
from heliograph_server.session.protocol.tap_state import TapState

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

SECONDS = 60.0


@pytest.fixture
def seen() -> SeenBars:
    return SeenBars()


@contextmanager
def waited_for(loop: hg.RunFuture) -> Iterator[None]:
    """Wait for its result in another thread, as a person does in front of a bar, and end it then."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(loop.result, SECONDS)
        try:
            yield
        finally:
            loop.stop()
            result.result(SECONDS)


def grows(seen: SeenBars) -> bool:
    """True once the bar has shown several steps, and more of them later."""
    counts = seen.counts()
    return len(counts) > 2 and 0 < counts[0] < counts[-1]


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_a_bar_shows_the_steps_of_a_loop_and_leaves(
    daemon: DaemonUrls, seen: SeenBars, transport: str
) -> None:
    with hg.connect(daemon.tcp if transport == "tcp" else "local:", progress=seen.bars) as session:
        loop = endless(session.compile(adding()))
        with waited_for(loop):
            until(lambda: grows(seen))
        bar = seen.all[-1]
        assert (bar.total, bar.unit, bar.is_there) == (MAX_LOOP_STEPS, "steps", False)
        assert "a loop of up to" in bar.what and bar.done == sorted(bar.done)
        assert loop.steps is not None and bar.done[-1] <= loop.steps


def test_a_bar_shows_the_steps_under_asyncio(daemon: DaemonUrls, seen: SeenBars) -> None:
    async def run() -> None:
        updated, on = asyncio.Event(), asyncio.get_running_loop()
        seen.on_update = lambda: on.call_soon_threadsafe(updated.set)
        async with hg.aio.connect(daemon.tcp, progress=seen.bars) as session:
            loop = endless(await session.compile(adding()))
            waiting = asyncio.create_task(_result(loop))
            async with asyncio.timeout(SECONDS):
                while not grows(seen):
                    await updated.wait()
                    updated.clear()
            loop.stop()
            await waiting

    async def _result(loop: Any) -> Any:
        return await loop

    asyncio.run(run())


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_bar_shows_the_steps_of_a_loop_on_members(seen: SeenBars, hosts: int) -> None:
    with (
        running_daemon("--device", "cpu:threads=1") as left,
        running_daemon("--device", "cpu:threads=1") as right,
        running_daemon(
            *(
                "--device",
                "cpu:threads=1",
                "--device",
                f"remote:url={left}",
                "--device",
                f"remote:url={right}",
            )
        ) as head,
        hg.connect(head, progress=seen.bars) as session,
        heliograph.admin.connect(head) as admin,
    ):
        names = [one.name for one in session.devices if "/" in one.name]
        pins = {"half/*": names[0], "[!h]*": names[hosts - 1]}
        plan = session.compile(adding(), devices=names, pins=pins)
        loop = endless(plan)
        with waited_for(loop):
            until(lambda: grows(seen))
            # Those who watch the head see the step, too.
            assert admin.plans().plans[0].loop_step > 0
        assert loop.steps is not None and seen.counts()[-1] <= loop.steps


def test_a_restored_loop_counts_on(tmp_path: Path, seen: SeenBars) -> None:
    with (
        SurvivingDaemon(tmp_path / "state", "--snapshot-seconds", "0") as daemon,
        daemon.connect(progress=seen.bars) as session,
    ):
        plan = session.compile(adding())
        loop = plan.loop(
            {"x": np.ones((4, 3), np.float32), "b": np.zeros((4, 3), np.float32), "n": np.int32(0)},
            steps=MAX_LOOP_STEPS,
            carry={"y": "x", "m": "n"},
        )
        with waited_for(loop):
            until(lambda: grows(seen))
            before = seen.counts()[0]
            session.snapshot()
            known = len(seen.counts())
            daemon.restart()
            until(lambda: len(seen.counts()) > known + 1)
            assert all(count > before for count in seen.counts()[known + 1 :])


def test_a_client_without_bars_is_told_nothing(
    daemon: DaemonUrls, monkeypatch: pytest.MonkeyPatch, seen: SeenBars
) -> None:
    told: list[int] = []
    with hg.connect("local:", progress=None) as session:
        counted = TapState.counted
        monkeypatch.setattr(
            TapState, "counted", lambda self, one, steps: (told.append(steps), counted(self, one, steps))
        )
        plan = session.compile(adding())
        loop = endless(plan)
        with hg.connect("local:", progress=seen.bars) as other:
            with waited_for(endless(other.compile(adding()))):
                until(lambda: grows(seen))
            count = len(told)
        assert count > 0
        assert loop._pending.steps == 0
        loop.stop()
        loop.result(SECONDS)
        assert len(told) == count


def test_a_server_that_tells_no_steps_leaves_the_bar_as_it_was(seen: SeenBars) -> None:
    message = command_pb2.CompletionBatch(completed_through=3)
    assert decode_completions(message).steps == ()
    assert not command_pb2.Command.FromString(b"").run.loop.counts_steps
