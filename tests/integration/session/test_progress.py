"""What people see of uploads: bars after a second, on a terminal alone; and programs: a callback."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from rich.console import Console

import heliograph as hg
from heliograph.core.progress import Meter, UploadBars, checked_progress

TOTAL = 100 * 2**20


class Screen:
    """A terminal that is a text, and a clock that is set."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.now = 0.0
        console = Console(file=self.text, force_terminal=True, width=120)
        self.bars = UploadBars(console, lambda: self.now)


@pytest.fixture
def screen() -> Screen:
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
        assert bool(screen.bars._bars) == (part > 0)
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
    assert screen.bars._bars is None


def test_where_stderr_is_no_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    meter = Meter("uploading weights", TOTAL, UploadBars(clock=lambda: now))
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
    assert "uploading weights" in shown and "sending a tensor" in shown
    assert screen.bars._bars is None


def test_an_upload_that_fails_takes_its_bar_with_it(screen: Screen) -> None:
    clock = iter(np.arange(0.0, 1e6, 2.0))
    screen.bars.clock = lambda: float(next(clock))
    with hg.connect("local:#cpu:memory=1MiB", progress=screen.bars) as session:  # type: ignore[arg-type]
        g = hg.Graph()
        g.output("y", g.weight("w", np.random.default_rng(32).random(2**20, np.float32)) + 1.0)
        with pytest.raises(hg.OutOfMemoryError):
            session.compile(g)
    assert screen.bars._bars is None


def test_what_is_no_progress_is_refused() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="progress"):
        hg.connect("local:", progress="yes")  # type: ignore[arg-type]
    assert checked_progress(None) is None
