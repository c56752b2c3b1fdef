"""`heliograph top`: what it shows on screens of any size, live and once, and when the daemon goes away."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from daemon_processes import SERVE, started

import heliograph as hg
import heliograph.admin
from heliograph.cli import main
from heliograph.cli.common.columns import SPARKS, bar, sparks
from heliograph.cli.common.status_view import ORDERS, History, Shown, frame
from heliograph.cli.common.text import age_text
from heliograph.cli.top import Top
from heliograph.testing import wait_until_serving
from heliograph_proto.devices import MemberInfo, MemberState, Memory
from heliograph_proto.sessions import (
    DeviceStatus,
    DrainState,
    DrainStatus,
    Quota,
    SessionStatus,
    Snapshot,
    TenantUsage,
)

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

SECONDS = 60.0
#: What a terminal is told when the live view ends.
LEFT = "\x1b[?1049l"
GIB = 2**30
WHERE = "grpc://127.0.0.1:7070"
FOUND = Snapshot(
    server="heliograph/0.1.0",
    incarnation=b"one",
    uptime_seconds=7500.0,
    devices=(
        DeviceStatus("cpu0", "A processor, 8 threads", Memory(12 * GIB, 16 * GIB), 60.0, 0.42),
        DeviceStatus("left/cpu0", "Another one", lost="left says nothing"),
    ),
    sessions=tuple(
        SessionStatus(
            number,
            tenant="alice" if number % 2 else "bob",
            credential="laptop",
            client="heliograph-python/0.1.0",
            age_seconds=number * 100.0,
            attached=True,
            commands=1234 * number,
            runs_in_flight=number,
            plans=2,
            device_bytes=number * GIB,
            commands_per_second=10.0 * number,
        )
        for number in range(1, 21)
    ),
    tenants=(
        TenantUsage("alice", 10, runs_in_flight=3, quota=Quota(sessions=12)),
        TenantUsage("bob", 10),
    ),
    members=(
        MemberInfo("left", "127.0.0.1:7071", MemberState.LOST, "it says nothing"),
        MemberInfo("right", "127.0.0.1:7072", MemberState.READY, "", ("right/cpu0",)),
    ),
    log_level="info",
)


def text(width: int = 200, height: int | None = None, found: Snapshot = FOUND, note: str = "") -> str:
    return "\n".join(line for line, _ in frame(found, WHERE, width, height, note))


def test_everything_is_shown_on_a_wide_screen() -> None:
    shown = text()
    assert (
        shown.splitlines()[0]
        == f"heliograph/0.1.0 at {WHERE} · up 2 h 5 min · serving · 20 sessions · log info"
    )
    for part in (
        "left/cpu0 is lost: left says nothing",
        "██░░░░░░░░  4.0 GiB  16.0 GiB  42%",
        "A processor, 8 threads",
        "10 of 12",
        "24,680",
        "127.0.0.1:7072",
        "it says nothing",
    ):
        assert part in shown, part


def test_the_busiest_sessions_come_first() -> None:
    numbers = re.findall(r"^(\d+) +(?:alice|bob)", text(), re.M)
    assert numbers == [str(number) for number in range(20, 0, -1)]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 120])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert max(map(len, text(width).splitlines())) <= width


def test_a_narrow_screen_keeps_what_matters() -> None:
    lines = text(50).splitlines()
    header = next(line for line in lines if line.startswith("id"))
    assert "a second" in header and "holds" in header and "client" not in header
    assert any(line.startswith("cpu0") and "42%" in line for line in lines)


@pytest.mark.parametrize("height", [24, 30, 50])
def test_a_low_screen_says_how_many_sessions_it_hides(height: int) -> None:
    lines = text(120, height).splitlines()
    shown = [line for line in lines if re.match(r"\d+ +(alice|bob)", line)]
    hidden = re.search(r"and (\d+) more", "\n".join(lines))
    assert len(lines) <= max(height, 20) and len(shown) + (int(hidden[1]) if hidden else 0) == 20


def test_a_drain_and_what_is_wrong_are_said() -> None:
    draining = replace(FOUND, drain=DrainStatus(DrainState.DRAINING, 12.0, False, 3))
    assert "draining: 3 at work, 12 s left, then it stops" in text(found=draining)
    assert text(note="nobody answers").splitlines()[1] == "nobody answers"


def test_names_from_elsewhere_cannot_write_to_the_terminal() -> None:
    bad = SessionStatus(1, tenant="\x1b[2J", client="two\nlines", attached=True)
    shown = text(found=replace(FOUND, sessions=(bad,), server="\x1b]0;title\a"))
    assert "\x1b" not in shown and "\a" not in shown and "two?lines" in shown


def test_nothing_is_shown_of_what_there_is_not() -> None:
    empty = Snapshot("heliograph/0.1.0", uptime_seconds=3.0, log_level="info")
    assert text(found=empty) == f"heliograph/0.1.0 at {WHERE} · up 3 s · serving · 0 sessions · log info"


def test_times_and_shares_are_words_and_bars() -> None:
    ages = [age_text(seconds) for seconds in (0.4, 59, 61, 3600, 90_061)]
    assert ages == ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]
    assert (bar(-1), bar(0.5), bar(7)) == ("░" * 10, "█" * 5 + "░" * 5, "█" * 10)


# When the daemon goes away


@pytest.fixture
def top() -> Top:
    return Top(heliograph.admin.connect("grpc://127.0.0.1:1"), 1.0)


def test_a_daemon_that_goes_is_waited_for_and_a_restart_is_said(top: Top) -> None:
    assert top.heed(FOUND, FOUND) is FOUND and not top.note
    assert top.heed(hg.UnavailableError("connection refused"), FOUND) is FOUND
    assert "retrying" in top.note and "refused" in top.note
    other = replace(FOUND, incarnation=b"two")
    assert top.heed(other, FOUND) is other and "restarted" in top.note


def test_a_connection_that_broke_is_forgotten_once_it_is_there_again(top: Top) -> None:
    top.heed(FOUND, FOUND)
    top.heed(hg.UnavailableError("the connection broke"), FOUND)
    top.heed(FOUND, FOUND)
    assert not top.note


@pytest.mark.parametrize("error", [hg.PermissionDeniedError("no"), hg.UnauthenticatedError("who?")])
def test_what_no_waiting_heals_ends_it(top: Top, error: hg.HeliographError) -> None:
    with pytest.raises(type(error)):
        top.heed(error, FOUND)


# On the command line


def test_without_a_terminal_it_looks_once(daemon: DaemonUrls, capsys: pytest.CaptureFixture[str]) -> None:
    url = daemon.tcp
    with hg.connect(url):
        assert main(["top", "--server", url]) == 0
        shown = capsys.readouterr().out
        assert "cpu0" in shown and "serving" in shown and "heliograph-python" in shown
        assert main(["top", "--json", "--server", url]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found["drain"]["state"] == "serving" and found["devices"][0]["name"] == "cpu0"
    assert main(["top", "--interval", "0", "--server", url]) == 1


def test_nobody_there_is_an_error_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--server", "grpc://127.0.0.1:1"]) == 1
    assert "heliograph serve" in capsys.readouterr().err


class Screen:
    """What `heliograph top` writes into a terminal of its own."""

    def __init__(self, url: str, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "heliograph.cli", "top", "--interval", "0.2", "--server", url]
        command += arguments
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self._read = ""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def shows(self, words: str) -> bool:
        """Whether these words come, after all that was looked for before."""
        end = time.monotonic() + SECONDS
        while words not in self._read and time.monotonic() < end:
            if not select.select([self._ours], [], [], 1.0)[0]:
                continue
            try:
                self._read += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:
                break
        found = words in self._read
        self._read = self._read.rpartition(words)[2]
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._ours)


@pytest.mark.parametrize("keys", [b"q", b"xq", b""], ids=["q", "another key first", "Ctrl-C"])
def test_in_a_terminal_it_is_live_until_it_is_ended(daemon: DaemonUrls, keys: bytes) -> None:
    pytest.importorskip("rich")
    screen = Screen(daemon.tcp)
    try:
        assert screen.shows("cpu0") and screen.shows("cpu0")
        if keys:
            screen.press(keys)
        else:
            screen.process.send_signal(signal.SIGINT)
        assert screen.shows(LEFT)
        assert screen.process.wait(SECONDS) == (0 if keys else 130)
    finally:
        screen.close()


def test_in_a_terminal_a_plan_is_chosen_by_keys(daemon: DaemonUrls) -> None:
    pytest.importorskip("rich")
    with hg.connect(daemon.tcp) as session:
        g = hg.Graph()
        g.output("y", g.input("x", (4,), "f32") + 1.0)
        plan = session.compile(g)
        screen = Screen(daemon.tcp, "--sort", "age")
        try:
            # The youngest session is the last one.
            assert screen.shows("heliograph-python")
            screen.press(b"j" * 100 + b"\r")
            assert screen.shows("one plan") and screen.shows("idle")
            screen.press(b"j\r")
            assert screen.shows("slowest parts") and screen.shows("split 0 on cpu0")
            screen.press(b"\x1b")
            assert screen.shows("one plan")
            screen.press(b"q")
            assert screen.shows(LEFT) and screen.process.wait(SECONDS) == 0
        finally:
            screen.close()
        assert plan.steps > 0


def test_a_daemon_that_is_restarted_is_found_again() -> None:
    pytest.importorskip("rich")
    with started() as (process, url):
        wait_until_serving(url)
        screen = Screen(url)
        try:
            assert screen.shows("cpu0")
            process.kill()
            process.wait(SECONDS)
            assert screen.shows("retrying")
            again = subprocess.Popen([*SERVE, "--listen", url], stdout=subprocess.DEVNULL)
            try:
                assert screen.shows("restarted")
                screen.press(b"q")
                assert screen.shows(LEFT)
                assert screen.process.wait(SECONDS) == 0
            finally:
                again.terminate()
                again.wait(SECONDS)
        finally:
            screen.close()


# Sorting, sparklines, and one session


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_are_sorted_by_a_column(order: str) -> None:
    found = "\n".join(line for line, _ in frame(FOUND, WHERE, 200, shown=Shown(order)))
    numbers = [int(number) for number in re.findall(r"^(\d+) +(?:alice|bob)", found, re.M)]
    falling = order in ("a second", "runs", "holds", "age")
    assert numbers == sorted(numbers, reverse=falling) and len(numbers) == 20


def test_a_sparkline_is_full_at_the_most_and_empty_at_nothing() -> None:
    assert sparks([0.0, 0.5, 1.0], 1.0) == "▁▅█" and sparks([0.0, 3.0, 6.0]) == "▁▅█"
    assert sparks([]) == sparks([1.0]) == "" and sparks([0.0, 0.0]) == "▁▁"
    assert sparks([-1.0, 2.0], 1.0) == "▁█"


def test_the_last_looks_are_drawn_and_what_is_gone_is_forgotten() -> None:
    history = History()
    for number in range(2 * SPARKS):
        history.add(replace(FOUND, devices=(replace(FOUND.devices[0], busy_share=number / 100),)))
    shown = "\n".join(line for line, _ in frame(FOUND, WHERE, 200, shown=Shown(history=history)))
    assert "lately" in shown and all(len(one) == SPARKS for one in history.devices.values())
    history.add(replace(FOUND, sessions=FOUND.sessions[:1]))
    assert list(history.sessions) == [1]


def test_one_session_is_shown_alone_until_it_is_gone() -> None:
    shown = "\n".join(line for line, _ in frame(FOUND, WHERE, 80, shown=Shown(session=7)))
    assert "session 7" in shown and "700" not in shown and "70 a second" in shown and "cpu0" not in shown
    assert "session 99 is gone" in "\n".join(
        line for line, _ in frame(FOUND, WHERE, 80, shown=Shown(session=99))
    )


@pytest.mark.parametrize("height", [10, 20, 24, 40])
def test_the_marked_session_is_always_on_the_screen(height: int) -> None:
    for number in range(1, 21):
        how = Shown(marked=number, hint="q quit")
        lines = frame(FOUND, WHERE, 120, height, shown=how)
        (marked,) = [line for line, style in lines if style == "marked"]
        assert marked.startswith(f"{number} ")
        # A low screen has no room for the keys.
        assert (lines[-1][0] == "q quit") == (height > 20)


def test_keys_sort_choose_show_and_end() -> None:
    top = Top(None, 1.0)  # type: ignore[arg-type]
    assert top.press(b"", FOUND) and top.press(b"\x1b[B", FOUND)
    assert top.shown.marked == 20
    assert top.press(b"\x1b[B\x1b[B\x1b[A", FOUND) and top.shown.marked == 19
    assert top.press(b"s", FOUND) and top.shown.order == list(ORDERS)[1]
    assert top.press(b"\r", FOUND) and top.shown.session == 19
    assert top.press(b"\x1b", FOUND) and top.shown.session == 0
    assert top.press(b"kkkk\xff?", FOUND) and top.shown.marked == 20
    assert not top.press(b"q", FOUND)
    assert top.press(b"j", replace(FOUND, sessions=()))


def test_a_session_that_does_not_exist_is_an_error(
    daemon: DaemonUrls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--server", daemon.tcp, "--session", "999999"]) == 1
    assert "there is no session 999999" in capsys.readouterr().err
