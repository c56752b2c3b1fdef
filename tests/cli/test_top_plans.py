"""`heliograph top` with plans: a table of a session's, and one alone with what is slow in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens
from waiting import until

import heliograph as hg
import heliograph.admin
from heliograph.cli import main
from heliograph.cli.common.plan_view import PlanLooks, plan_rows, plan_view
from heliograph.cli.common.status_view import Shown, frame
from heliograph.cli.top import Top, Watcher
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.plans import (
    CopyReport,
    DeviceShare,
    PlanList,
    PlanReport,
    PlanStatus,
    Route,
    RunTime,
    SplitReport,
)
from heliograph_proto.sessions import SessionStatus, Snapshot
from heliograph_server.resources.principals import Right

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

MIB = 2**20
REPORT = PlanReport(
    (),
    (
        SplitReport(0, (), 1, 0, compute_us=100.0, predicted_compute_us=90.0),
        SplitReport(
            1,
            (CopyReport(1, 0, MIB, route=Route.DIRECT),),
            1,
            0,
            copy_us=600.0,
            compute_us=300.0,
            began_us=100.0,
        ),
    ),
    (DeviceShare("cpu0", 2 * MIB, 0, 10), DeviceShare("left/cpu0", 0, 3 * MIB, 20)),
)
PLAN = PlanStatus(
    7, 12, ("cpu0", "left/cpu0"), 40, 2, 1000, (RunTime(900.0, 1000),), 1000.0, 950.0, 2e5, report=REPORT
)
#: Of a later moment, with faster runs and a loop.
LATER = replace(
    PLAN,
    runs=1300,
    times=(RunTime(500.0, 295), RunTime(900.0, 1005)),
    waited_us=2.6e5,
    waiting=2,
    running=1,
    loop_step=299,
    loop_steps=5000,
)


def looks(*seen: PlanStatus) -> PlanLooks:
    """Looks at plans, each a second after the one before."""
    found = PlanLooks()
    for second, one in enumerate(seen):
        found.add((7, 12), PlanList("heliograph", b"one", float(second), (one,)))
    return found


def view(found: PlanLooks, width: int = 200, room: int | None = None) -> str:
    return "\n".join(line for line, _ in plan_view(found, 7, 12, width, room))


def test_a_plan_shows_the_runs_between_the_last_looks() -> None:
    shown = view(looks(PLAN, LATER))
    for part in (
        "plan 12 of session 7",
        "loop at step 299 of 5,000, 2 wait",
        "1,300, 300 a second",
        "p50 500 us, p99 900 us, the last 1 ms, predicted 950 us",
        "200 us a run",
        "2.0 MiB of weights, 3.0 MiB of variables",
        "1.0 MiB a run, 300.0 MiB/s",
    ):
        assert part in shown, part


def test_the_slowest_part_of_a_run_comes_first() -> None:
    lines = view(looks(PLAN)).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("slowest parts"))
    assert [line[:18].strip() for line in lines[first + 1 :]] == [
        "copies to split 1",
        "split 1 on left/cp",
        "split 0 on cpu0",
    ]
    assert "██████░░░░" in lines[first + 1] and "1.0 MiB from cpu0" in lines[first + 1]
    assert any(line.startswith("left/cpu0") and "█████████░" in line for line in lines)


def test_a_low_screen_keeps_the_slowest_parts() -> None:
    many = replace(REPORT, splits=tuple(replace(REPORT.splits[0], compute_us=float(n)) for n in range(1, 40)))
    shown = view(looks(replace(PLAN, report=many)), room=25).splitlines()
    assert len(shown) <= 26 and "that are faster" in shown[-1] and any("split 38 on" in one for one in shown)


@pytest.mark.parametrize("width", [1, 20, 60, 120])
def test_no_line_of_a_plan_is_wider_than_the_screen(width: int) -> None:
    how = Shown(session=7, plan=12, looks=looks(PLAN, LATER))
    lines = frame(Snapshot("heliograph"), "grpc://there", width, shown=how)
    assert max(len(line) for line, _ in lines) <= width


def test_an_idle_plan_shows_all_its_runs_and_a_lost_one_why() -> None:
    assert "p50 900 us" in view(looks(PLAN, PLAN)) and "idle" in view(looks(PLAN))
    lost = replace(PLAN, lost="left says\x1b nothing", report=None)
    assert "lost: left says? nothing" in view(looks(lost))
    assert "never" not in view(looks(PlanStatus(7, 12)))


def test_a_plan_that_is_gone_says_so_and_one_of_another_daemon_has_no_history() -> None:
    found = looks(PLAN)
    found.add((7, 12), PlanList("", b"", 0.0))
    assert "plan 12 of session 7 is gone" in view(found)
    found.add((7, 0), PlanList("heliograph", b"one", 5.0))
    assert "is looked up" in view(found)
    found = looks(LATER)
    found.add((7, 12), PlanList("heliograph", b"two", 1.0, (PLAN,)))
    assert len(found.plans[7, 12]) == 1


def test_a_table_of_plans_fits_its_room_and_keeps_the_marked_one() -> None:
    found = PlanLooks()
    plans = tuple(replace(PLAN, plan=number, report=None) for number in range(1, 31))
    found.add((7, 0), PlanList("heliograph", b"one", 0.0, plans, left_out=5))
    for number in range(1, 31):
        lines = plan_rows(found, (7, number), 120, 6)
        (marked,) = [line for line, style in lines if style == "marked"]
        assert marked.startswith(f"{number} ") and lines[-1][0] == "and 30 more"


def test_keys_choose_a_plan_of_a_session_and_lead_back() -> None:
    top = Top(None, 1.0)  # type: ignore[arg-type]
    found = Snapshot("heliograph", sessions=(SessionStatus(7, client="one"),))
    assert top.press(b"j\r", found) and top.shown.asks == (7, 0)
    plans = PlanList("heliograph", b"one", 0.0, (replace(PLAN, plan=5), PLAN))
    assert top.heed(((7, 0), plans), found) is found
    assert top.press(b"jj\r", found) and top.shown.asks == (7, 12)
    assert top.heed(((7, 0), PlanList("", b"", 0.0)), found) is found and (7, 12) in top.shown.looks.plans
    assert top.press(b"\x1b", found) and top.shown.asks == (7, 0)
    assert top.press(b"\x1b", found) and top.shown.asks is None


class NoPlans(heliograph.admin.Admin):
    """A daemon whose plans nobody tells."""

    def __init__(self, error: hg.HeliographError) -> None:
        super().__init__(parse_address("grpc://127.0.0.1:1"), 1.0, Credentials())
        self._error = error

    def watch(self, interval: float = 1.0) -> Iterator[Snapshot]:
        yield Snapshot("heliograph")

    def plans(self, session: int = 0, plan: int = 0) -> PlanList:
        raise self._error


@pytest.mark.parametrize(
    "error", [hg.ProtocolError("it is older"), hg.DeadlineExceededError("a host is slow")]
)
def test_plans_that_cannot_be_told_are_a_note_beside_the_rest(error: hg.HeliographError) -> None:
    how = Shown(session=7, plan=12)
    top = Top(None, 1.0, how)  # type: ignore[arg-type]
    with Watcher(NoPlans(error), 0.1, how) as watcher:
        snapshot = top.heed(watcher.found.get(timeout=30), Snapshot(""))
        snapshot = top.heed(watcher.found.get(timeout=30), snapshot)
    assert snapshot.server == "heliograph" and error.message in top.note
    top.heed(((7, 12), PlanList("heliograph", b"one", 1.0, (PLAN,))), snapshot)
    assert not top.note


# With a daemon


def doubling() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    g.output("y", x + x)
    return g


def test_a_plan_of_a_daemon_is_seen_with_its_runs(
    daemon: DaemonUrls, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(daemon.tcp) as session, heliograph.admin.connect(daemon.tcp) as admin:
        plan = session.compile(doubling())
        for _ in range(20):
            plan.run(x=np.ones(4, np.float32))
        number = max(one.number for one in admin.sessions())
        (found,) = admin.plans(number).plans
        assert (found.runs, found.running, found.devices) == (20, 0, ("cpu0",)) and found.report is None
        assert sum(one.runs for one in found.times) == 20 and found.took_us > 0

        plan.loop(x=np.ones(4, np.float32), steps=30, carry={"y": "x"}).result()
        (found,) = admin.plans(number, found.plan).plans
        assert found.runs == 50 and found.report is not None and found.report.devices[0].name == "cpu0"

        how = ["--server", daemon.tcp, "--interval", "0.1", "--session", str(number)]
        assert main(["top", "--once", *how, "--plan", str(found.plan)]) == 0
        shown = capsys.readouterr().out
        assert f"plan {found.plan} of session {number}" in shown and "50, 0 a second" in shown
        assert main(["top", "--once", *how]) == 0
        assert "a second" in capsys.readouterr().out
        assert main(["top", "--json", *how]) == 0
        assert json.loads(capsys.readouterr().out)["plans"][0]["runs"] == 50
        assert main(["top", "--once", *how, "--plan", "999"]) == 1
        assert f"session {number} has no plan 999" in capsys.readouterr().err
    assert main(["top", "--plan", "1", "--server", daemon.tcp]) == 1
    assert "needs a session" in capsys.readouterr().err


def test_a_loop_under_way_tells_its_step(daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as session, heliograph.admin.connect(daemon.tcp) as admin:
        plan = session.compile(doubling())
        loop = plan.loop(x=np.zeros(4, np.float32), steps=10**9, carry={"y": "x"})
        number = max(one.number for one in admin.sessions())
        until(lambda: admin.plans(number).plans[0].loop_step > 0)
        (found,) = admin.plans(number).plans
        assert found.loop_steps == 10**9 and found.running == 1 and found.runs > 0
        assert plan.submit(x=np.zeros(4, np.float32)) is not None
        until(lambda: admin.plans(number).plans[0].waiting == 1)
        loop.stop()
        loop.result()


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Tokens]:
    rights = {"alice": (Right.USE,), "bob": (Right.USE,), "olga": (Right.ADMIN,)}
    yield Tokens(tmp_path / "tokens", rights)


def test_a_tenant_sees_its_own_plans_alone(
    tokens: Tokens, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        daemon_with_tokens(tokens) as daemon,
        hg.connect(daemon.url, token=tokens.of["alice"]) as session,
    ):
        plan = session.compile(doubling())
        seen = {}
        for name in ("alice", "bob", "olga"):
            with heliograph.admin.connect(daemon.url, token=tokens.of[name]) as admin:
                seen[name] = admin.plans().plans
        assert len(seen["alice"]) == len(seen["olga"]) == 1 and seen["bob"] == ()
        assert plan.devices == seen["alice"][0].devices
        (own,) = seen["alice"]
        with (
            heliograph.admin.connect(daemon.url, token=tokens.of["bob"]) as admin,
            pytest.raises(hg.SessionClosedError, match=f"no session {own.session_number}"),
        ):
            admin.plans(own.session_number, own.plan)
        monkeypatch.setenv("HELIOGRAPH_TOKEN", tokens.of["alice"])
        assert main(["top", "--once", "--interval", "0.1", "--server", daemon.url]) == 0
        shown = capsys.readouterr().out
        assert "the plans of your tenant" in shown and "cpu0" in shown
        how = ["--session", str(own.session_number), "--plan", str(own.plan), "--interval", "0.1"]
        assert main(["top", "--once", "--server", daemon.url, *how]) == 0
        assert f"plan {own.plan} of session" in capsys.readouterr().out
