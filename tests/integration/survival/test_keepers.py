"""Durable sessions whose state lies in the memory of another daemon: kills of either, and of both in turn."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from access_daemons import Tokens
from certificates import Authority
from cutting import cut_proxy
from forked_daemons import serve
from killed_programs import compared
from metric_figures import figures
from pool_daemons import DEVICE, Daemon, daemons, wait_for_devices
from surviving_daemons import SurvivingDaemon, free_port
from waiting import until

import heliograph as hg
from heliograph.admin import connect as connect_admin
from heliograph_server.resources.principals import Right

SECONDS = 60.0
KEEPS = ("--device", DEVICE, "--kept-state-size", "1GiB")
CALM = ("--device", DEVICE, "--snapshot-seconds", "0", "--log-level", "warning")
X = np.arange(4, dtype=np.float32) + 1


def adder() -> hg.Graph:
    """total += x, and total is returned."""
    g = hg.Graph()
    x, total = g.input("x", (4,), "f32"), g.variable("total", (4,), "f32")
    g.output("y", hg.assign(total, total + x))
    return g


@pytest.fixture
def keeper() -> Iterator[Daemon]:
    with daemons(1, *KEEPS) as made:
        yield made[0]


@contextmanager
def owner(keeper: Daemon, *arguments: str, name: str = "owner") -> Iterator[SurvivingDaemon]:
    with SurvivingDaemon(f"{keeper.url}/{name}", *CALM, *arguments) as made:
        yield made


def refusal(*arguments: str) -> str:
    """The last words of a daemon that does not start."""
    process = serve("--listen", "grpc://127.0.0.1:0", *CALM, *arguments, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said: str = process.stderr.read()
    process.stderr.close()
    assert process.wait(SECONDS) == 1
    return said


def test_a_session_goes_on_after_its_daemon_was_killed(keeper: Daemon) -> None:
    with owner(keeper) as daemon, daemon.connect() as session:
        plan, tensor = session.compile(adder()), session.put(X)
        plan.run(x=X)
        first = session.snapshot()
        assert first.written_bytes > 0
        again = session.snapshot()
        assert again.written_bytes == 0 and again.size_bytes == first.size_bytes
        plan.run(x=X)
        tensor.set(3 * X)
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (3 * X).tolist()
        assert tensor.get().tolist() == (3 * X).tolist()


@pytest.mark.parametrize(("seed", "seconds"), [(1, "0.05")])
def test_a_program_sees_the_same_when_its_daemon_is_killed_at_random(
    keeper: Daemon, tmp_path: Path, seed: int, seconds: str
) -> None:
    assert compared(tmp_path, seed, seconds, f"{keeper.url}/random") >= 2


def test_a_keeper_that_is_restarted_gets_a_whole_snapshot_by_itself(keeper: Daemon) -> None:
    port = free_port()
    with owner(keeper, "--metrics-listen", f"127.0.0.1:{port}") as daemon, daemon.connect() as session:
        plan = session.compile(adder())
        plan.run(x=X)
        session.snapshot()
        before = figures(port)
        assert before["heliograph_state_reachable"] == 1 and before["heliograph_state_losses_total"] == 0
        keeper.restart()
        # No client asks for it, and no command came since the last one.
        taken = "heliograph_snapshots_total ok"
        until(lambda: figures(port)[taken] > before[taken], seconds=SECONDS)
        assert figures(port)["heliograph_state_losses_total"] == 1
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (2 * X).tolist()


def test_while_its_keeper_is_away_snapshots_fail_and_runs_go_on(keeper: Daemon) -> None:
    port = free_port()
    with owner(keeper, "--metrics-listen", f"127.0.0.1:{port}") as daemon, daemon.connect() as session:
        plan = session.compile(adder())
        plan.run(x=X)
        session.snapshot()
        # Silent, as a host that is down.
        keeper.stop()
        plan.run(x=X)
        with pytest.raises(hg.SnapshotFailedError, match=r"cannot be reached") as caught:
            session.snapshot()
        assert "runs go on" in caught.value.advice
        until(lambda: figures(port)["heliograph_state_reachable"] == 0, seconds=SECONDS)
        assert plan.run(x=X)["y"].tolist() == (3 * X).tolist()
        keeper.resume()
        until(lambda: figures(port)["heliograph_state_reachable"] == 1, seconds=SECONDS)
        assert session.snapshot().sequence > 0
        assert figures(port)["heliograph_state_losses_total"] == 0
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (4 * X).tolist()


def test_a_session_that_was_closed_while_the_keeper_and_then_its_owner_were_away_ends_with_its_lease(
    keeper: Daemon,
) -> None:
    with owner(keeper, "--lease", "1") as daemon, connect_admin(keeper.url) as admin:

        def files() -> int:
            (state,) = admin.snapshot().kept_states
            return state.files

        with daemon.connect() as session:
            tensor = session.put(X)
            session.snapshot()
            assert files() > 0
            keeper.stop()
        del tensor
        daemon.kill()
        keeper.resume()
        assert files() > 0
        daemon.start()
        # It is empty, and its owner holds it.
        until(lambda: not files(), seconds=SECONDS)


def test_another_daemon_takes_over_under_the_same_name_and_never_beside_the_first(keeper: Daemon) -> None:
    with (
        owner(keeper) as daemon,
        cut_proxy(daemon.url) as way,
        hg.connect(way.url, durable=True) as session,
    ):
        plan = session.compile(adder())
        plan.run(x=X)
        session.snapshot()
        said = refusal("--state", f"{keeper.url}/owner")
        assert "another daemon keeps the state of its sessions" in said and "--state URL/NAME" in said
        plan.run(x=X)
        daemon.kill()
        with owner(keeper) as other:
            way.lead_to(other.url)
            way.cut()
            assert plan.run(x=X, timeout=SECONDS)["y"].tolist() == (3 * X).tolist()


def test_a_full_keeper_is_a_typed_error_and_the_last_snapshot_stays() -> None:
    port = free_port()
    figures_at = ("--metrics-listen", f"127.0.0.1:{port}")
    with (
        daemons(1, "--device", DEVICE, "--kept-state-size", "100KiB", *figures_at) as made,
        owner(made[0]) as daemon,
        daemon.connect() as session,
    ):
        plan = session.compile(adder())
        plan.run(x=X)
        session.snapshot()
        tensor = session.put(np.zeros(50_000, np.float32))
        with pytest.raises(hg.SnapshotFailedError, match="no room for") as caught:
            session.snapshot()
        assert "--kept-state-size" in caught.value.advice
        found = figures(port)
        assert 0 < found["heliograph_kept_state_bytes"] < found["heliograph_kept_state_limit_bytes"]
        assert found["heliograph_kept_state_refused_total"] >= 1
        assert found["heliograph_kept_states held"] == 1
        assert "heliograph_kept_state_spare_bytes" in found
        daemon.restart()
        assert plan.run(x=X)["y"].tolist() == (2 * X).tolist()
        assert tensor.get().sum() == 0


@pytest.mark.parametrize("named", [True, False], ids=["tenants", "all"])
def test_a_quota_bounds_the_states_of_each_tenant(tmp_path: Path, named: bool) -> None:
    tokens = Tokens(tmp_path / "tokens", dict.fromkeys(("one", "other"), (Right.USE, Right.POOL)))
    shown: dict[str, tuple[str, ...]] = {}
    for name, token in tokens.of.items():
        (tmp_path / name).write_text(token)
        shown[name] = ("--pool-token", str(tmp_path / name)) if named else ()
    port = free_port()
    options = ["--quota", "kept_state_bytes=100KiB", "--metrics-listen", f"127.0.0.1:{port}"]
    if named:
        options += ["--tokens", str(tokens.path)]
    with (
        daemons(1, *KEEPS, *options) as made,
        owner(made[0], *shown["one"], name="one") as one,
        owner(made[0], *shown["other"], name="other") as other,
        one.connect() as session,
        other.connect() as beside,
    ):
        large = session.put(np.zeros(50_000, np.float32))
        with pytest.raises(hg.SnapshotFailedError, match="the quota of .* is 102,400 bytes") as caught:
            session.snapshot()
        assert "kept_state_bytes" in caught.value.advice
        if named:
            # It left the room of the other tenant.
            kept = beside.put(np.zeros(10_000, np.float32))
            beside.snapshot()
            found = figures(port)
            assert 40_000 < found["heliograph_tenant_kept_state_bytes other"] < 102_400
            assert found["heliograph_tenant_kept_state_bytes one"] < 102_400
            kept.free()
        large.free()
        assert session.snapshot().sequence > 0


def test_two_daemons_that_keep_each_others_state_start_together() -> None:
    ports = [free_port(), free_port()]
    urls = [f"grpc://127.0.0.1:{one}" for one in ports]

    def start(place: int) -> Any:
        state = ("--state", f"{urls[1 - place]}/{place}", "--kept-state-size", "1GiB")
        return serve("--listen", urls[place], *CALM, *state, stdout=subprocess.PIPE)

    both = [start(0), start(1)]
    try:
        for url in urls:
            hg.testing.wait_until_serving(url)
        with hg.connect(urls[0], durable=True) as one, hg.connect(urls[1], durable=True) as other:
            plans = [session.compile(adder()) for session in (one, other)]
            for session, plan in zip((one, other), plans, strict=True):
                plan.run(x=X)
                session.snapshot()
            both[0].kill()
            both[0].wait(SECONDS)
            both[0].stdout.close()
            both[0] = start(0)
            # The one that lived keeps its session whole in the new one, and the other's goes on.
            assert plans[0].run(x=X, timeout=SECONDS)["y"].tolist() == (2 * X).tolist()
            until(lambda: other.snapshot().written_bytes == 0, seconds=SECONDS)
            assert plans[1].run(x=X)["y"].tolist() == (2 * X).tolist()
    finally:
        for process in both:
            process.kill()
            process.wait(SECONDS)
            process.stdout.close()


def test_a_daemon_that_is_its_own_keeper_or_whose_keeper_keeps_nothing_does_not_start(keeper: Daemon) -> None:
    url = f"grpc://127.0.0.1:{free_port()}"
    said = refusal("--listen", url, "--kept-state-size", "1GiB", "--state", url)
    assert "cannot keep its own state" in said
    with daemons(1, "--device", DEVICE) as made:
        said = refusal("--state", made[0].url)
    assert "keeps no state of other daemons" in said and "--kept-state-size" in said


def test_a_state_belongs_to_its_tenant_and_takes_the_right_of_pools(tmp_path: Path) -> None:
    rights = (Right.USE, Right.POOL)
    tokens = Tokens(tmp_path / "tokens", {"one": rights, "other": rights, "user": (Right.USE,)})
    shown = {}
    for name, token in tokens.of.items():
        shown[name] = tmp_path / name
        shown[name].write_text(token)
    with daemons(1, *KEEPS, "--tokens", str(tokens.path)) as made:
        (keeper,) = made
        for name in ("user", ""):
            how = ("--pool-token", str(shown[name])) if name else ()
            said = refusal("--state", f"{keeper.url}/mine", *how)
            assert "does not keep the state" in said and "--pool-token FILE" in said
        with owner(keeper, "--pool-token", str(shown["one"]), name="mine") as one, one.connect() as session:
            plan = session.compile(adder())
            plan.run(x=X)
            session.snapshot()
            one.kill()
            # The same name of another tenant is another state.
            with owner(keeper, "--pool-token", str(shown["other"]), name="mine") as other, other.connect():
                one.start()
                assert plan.run(x=X, timeout=SECONDS)["y"].tolist() == (2 * X).tolist()


def test_bytes_travel_by_tls_where_the_keeper_asks_for_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    url = f"grpcs://127.0.0.1:{free_port()}"
    secured = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
    process = serve("--listen", url, *KEEPS, *secured, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on ")
        owning = SurvivingDaemon(f"{url}/secret", *CALM, "--pool-ca", authority.ca)
        with owning as daemon, daemon.connect() as session:
            plan = session.compile(adder())
            plan.run(x=X)
            session.snapshot()
            daemon.restart()
            assert plan.run(x=X)["y"].tolist() == (2 * X).tolist()
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


def test_a_head_keeps_its_sessions_in_a_member_and_another_head_goes_on() -> None:
    with daemons(2, *KEEPS) as members:
        listed = ",".join(f"m{number}={one.host}" for number, one in enumerate(members))
        pool = ("--pool", f"static:{listed}")
        with (
            owner(members[1], *pool, name="head") as head,
            cut_proxy(head.url) as way,
            hg.connect(way.url, durable=True) as session,
        ):
            wait_for_devices(session, "cpu0", "m0/cpu0", "m1/cpu0")
            plan = session.compile(adder(), ["m0/cpu0"])
            kept = session.put(X, "m1/cpu0")
            plan.run(x=X)
            session.snapshot()
            plan.run(x=X)
            head.restart()
            assert plan.run(x=X, timeout=SECONDS)["y"].tolist() == (3 * X).tolist()
            head.kill()
            with owner(members[1], *pool, name="head") as other:
                way.lead_to(other.url)
                way.cut()
                assert plan.run(x=X, timeout=SECONDS)["y"].tolist() == (4 * X).tolist()
                assert kept.get(timeout=SECONDS).tolist() == X.tolist()
