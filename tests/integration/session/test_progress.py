"""What people see of long work: bars after a second, on a terminal alone; and programs: a callback."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from rich.console import Console

import heliograph as hg
from heliograph.core.progress.bars import Meter, ProgressBars, Waiting, checked_progress
from heliograph.core.progress.displays import _Notebook, _NotebookBar
from heliograph.tracking import Track

TOTAL = 100 * 2**20


class Screen:
    """A terminal that is a text, and a clock that is set."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.now = 0.0
        console = Console(file=self.text, force_terminal=True, width=120)
        self.bars = ProgressBars(console, lambda: self.now)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    # Of a terminal that cannot move its cursor, bars keep away.
    monkeypatch.setenv("TERM", "xterm-256color")
    return Screen()


def test_an_upload_of_less_than_a_second_shows_nothing(screen: Screen) -> None:
    meter = Meter("uploading weights", TOTAL, screen.bars)
    screen.now = 0.9
    meter(TOTAL)
    meter.end()
    assert screen.text.getvalue() == ""


def test_a_longer_one_shows_bytes_rate_and_remaining_time(screen: Screen) -> None:
    meter = Meter("uploading weights", TOTAL, screen.bars)
    for part in range(4):
        screen.now += 0.6
        meter(TOTAL // 4)
        assert (screen.bars._display is not None) == (part > 0)
    meter.end()
    shown = screen.text.getvalue()
    assert "uploading weights" in shown and "MB" in shown and "0:00:00" in shown


def test_several_uploads_have_a_bar_each_and_leave_nothing(screen: Screen) -> None:
    meters = [Meter(f"upload {number}", TOTAL, screen.bars) for number in range(3)]
    screen.now = 2.0
    for meter in meters:
        meter(1000)
    for meter in meters:
        meter.end()
        meter.end()
        meter(1000)
    assert all(f"upload {number}" in screen.text.getvalue() for number in range(3))
    assert screen.bars._display is None


def test_where_stderr_is_no_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    meter = Meter("uploading weights", TOTAL, ProgressBars(clock=lambda: now))
    now = 5.0
    meter(TOTAL)
    meter.end()
    assert capsys.readouterr() == ("", "")


def test_without_rich_nothing_is_shown_and_nothing_fails(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    meter = Meter("uploading weights", TOTAL, screen.bars)
    screen.now = 5.0
    meter(1000)
    meter(1000)
    meter.end()
    assert screen.text.getvalue() == ""


def test_a_session_shows_weights_and_tensors(url: str, screen: Screen) -> None:
    clock = iter(np.arange(0.0, 1e6, 2.0))
    screen.bars.clock = lambda: float(next(clock))
    with hg.connect(url, progress=screen.bars) as session:  # type: ignore[arg-type]
        g = hg.Graph()
        weight = np.random.default_rng(31).random(2**21, np.float32)
        g.output("y", g.weight("w", weight) + 1.0)
        session.compile(g)
        tensor = session.put(np.ones(2**22, np.float32))
        assert tensor.get()[0] == 1
    shown = screen.text.getvalue()
    assert (
        all(f"{what} a tensor" in shown for what in ("sending", "receiving")) and "uploading weights" in shown
    )
    assert screen.bars._display is None


def test_an_upload_that_fails_takes_its_bar_with_it(screen: Screen) -> None:
    clock = iter(np.arange(0.0, 1e6, 2.0))
    screen.bars.clock = lambda: float(next(clock))
    with hg.connect("local:#cpu:memory=1MiB", progress=screen.bars) as session:  # type: ignore[arg-type]
        g = hg.Graph()
        g.output("y", g.weight("w", np.random.default_rng(32).random(2**20, np.float32)) + 1.0)
        with pytest.raises(hg.OutOfMemoryError):
            session.compile(g)
    assert screen.bars._display is None


def test_what_is_no_progress_is_refused() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="progress"):
        hg.connect("local:", progress="yes")  # type: ignore[arg-type]
    assert checked_progress(None) is None


def test_work_without_a_count_shows_its_time_until_it_ends(screen: Screen) -> None:
    waiting = Waiting("compiling 3 nodes", screen.bars, seconds=0.0)
    assert waiting._timer is not None
    waiting._timer.join(30)
    waiting.end()
    waiting.end()
    assert "compiling 3 nodes" in screen.text.getvalue()
    assert screen.bars._display is None


def test_short_work_without_a_count_shows_nothing(screen: Screen) -> None:
    waiting = Waiting("compiling 3 nodes", screen.bars)
    waiting.end()
    assert waiting._timer is not None
    waiting._timer.join(30)
    assert screen.text.getvalue() == ""


def test_work_that_is_counted_later_gets_a_bar_of_steps(screen: Screen) -> None:
    waiting = Waiting("a loop of up to 40 steps", screen.bars, seconds=0.0, total=40)
    assert waiting._timer is not None
    waiting._timer.join(30)
    for done in (7, 31):
        waiting.count(done)
    waiting.end()
    waiting.count(40)
    shown = screen.text.getvalue()
    assert "31/40" in shown and "40/40" not in shown
    assert screen.bars._display is None


def test_work_that_was_counted_before_its_bar_begins_with_that(screen: Screen) -> None:
    waiting = Waiting("a loop of up to 40 steps", screen.bars, seconds=3600.0, total=40)
    waiting.count(12)
    assert screen.text.getvalue() == ""
    waiting._show()
    waiting.end()
    assert "12/40" in screen.text.getvalue()


def test_the_rate_in_a_notebook_leaves_out_the_steps_before_the_bar() -> None:
    now = 100.0
    bar = _NotebookBar("a loop", 1000, "steps", lambda: now)
    display = _Notebook(lambda: now)
    bar.handle = _Handle()
    display.update(bar, 500, "")
    now += 10.0
    display.update(bar, 600, "")
    assert bar.handle.text == "a loop: 600 of 1,000, 10/s, 40 s left"


def test_a_bar_in_a_notebook_becomes_one_of_steps_in_its_place() -> None:
    now = 100.0
    display = _Notebook(lambda: now)
    bar = _NotebookBar("a loop", 0, "bytes", lambda: now)
    bar.handle = _Handle()
    assert bar.told(ended=False) == "a loop …"
    now += 5.0
    display.measure(bar, 20, "steps")
    display.update(bar, 4, "")
    assert bar.handle.text == "a loop: 4 of 20, 0/s"


class _Handle:
    """The output of a cell."""

    text = ""

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.text = bundle["text/plain"]


def test_items_are_counted_and_values_are_beside_the_bar(screen: Screen) -> None:
    steps = Track(range(4), "training", 4, screen.bars)
    for one in steps:
        screen.now += 1.0
        steps.show(loss=np.float32(1 / (1 + one)), epoch=one)
    shown = screen.text.getvalue()
    assert "training" in shown and "4/4" in shown and "loss 0.25, epoch 3" in shown
    assert screen.bars._display is None


def test_a_loop_that_is_left_early_takes_its_bar_with_it(screen: Screen) -> None:
    for one in Track(range(100), "training", 100, screen.bars):
        screen.now += 1.0
        if one == 3:
            break
    assert "training" in screen.text.getvalue() and screen.bars._display is None


async def items() -> AsyncIterator[int]:
    for number in range(3):
        yield number


def test_asynchronous_items_are_counted_too(screen: Screen) -> None:
    async def collect() -> list[int]:
        found = []
        async for one in Track(items(), "streaming", 3, screen.bars):
            screen.now += 1.0
            found.append(one)
        return found

    assert asyncio.run(collect()) == [0, 1, 2] and "3/3" in screen.text.getvalue()
    with pytest.raises(hg.InvalidArgumentError, match="async for"):
        iter(hg.track(items())).__next__()


@pytest.mark.parametrize("wrong", [{"items": 3}, {"items": [], "total": -1}, {"items": [], "what": 7}])
def test_what_cannot_be_tracked_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(hg.InvalidArgumentError):
        hg.track(**wrong)  # type: ignore[arg-type]
