"""A device of the daemon's own host that is lost: it stays listed, with the reason."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg
import heliograph.admin
from heliograph.cli import main

SECONDS = 30.0
DEVICES = ("--device", "fake:lost_after=1", "--device", "fake")
X = np.zeros(4, np.float32)
WHY = "its script"


def graph() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", X.shape, "f32") + 1.0)
    return g


def test_every_session_hears_of_a_lost_device_and_lists_it_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_daemon(*DEVICES) as url, hg.connect(url) as session, hg.connect(url) as other:
        with other.watch() as watch, session.watch() as own:
            plan = session.compile(graph(), "fake0")
            plan.run(x=X)
            with pytest.raises(hg.DeviceLostError, match=WHY):
                plan.run(x=X)
            for events in (watch, own):
                event = events.next(timeout=SECONDS)
                assert event is not None and (event.device, event.member) == ("fake0", "")
                assert WHY in event.lost
        with hg.connect(url) as late:
            for one in (session, other, late):
                lost, left = one.devices
                assert (lost.name, left.name, left.lost) == ("fake0", "fake1", "") and WHY in lost.lost
            assert late.compile(graph(), "fake1").run(x=X)["y"].tolist() == [1.0] * 4
        assert main(["devices", "--server", url]) == 0
        first, _ = capsys.readouterr().out.splitlines()[1:3]
        assert first.split()[0] == "fake0" and "lost: device fake0 is lost" in first
        assert main(["devices", "--server", url, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["devices"]
        assert WHY in shown[0]["lost"] and not shown[1]["lost"]
        with heliograph.admin.connect(url) as admin:
            assert [bool(one.lost) for one in admin.snapshot().devices] == [True, False]


def test_asyncio_hears_of_it_too_and_waiting_runs_fail_with_the_first() -> None:
    async def lose(url: str) -> list[object]:
        async with hg.aio.connect(url) as session:
            watch, plan = session.watch(), await session.compile(graph(), "fake0")
            runs = [plan.submit(x=X) for _ in range(20)]
            ended = await asyncio.gather(*(run.result(SECONDS) for run in runs), return_exceptions=True)
            async for event in watch:
                assert event.device == "fake0" and session.devices[0].lost == event.lost
                break
            return [type(one) for one in ended]

    with running_daemon(*DEVICES) as url:
        found = asyncio.run(lose(url))
    assert found[1:] == [hg.DeviceLostError] * 19
