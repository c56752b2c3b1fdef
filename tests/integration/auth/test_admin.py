"""What an operator sees and does: sessions, drains, the level of the log."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from daemon_processes import SECONDS, X, long_graph, ready, started
from forked_daemons import running_daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc

import heliograph as hg
import heliograph.admin
from heliograph.admin import Admin, DrainState, DrainStatus
from heliograph.cli import main
from heliograph_proto.codec import decode, encode
from heliograph_proto.sessions import DeviceStatus, SessionStatus, Snapshot
from heliograph_proto.v1 import admin_pb2
from heliograph_server.runtime.status import with_rates

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A daemon that these tests have to themselves."""
    with running_daemon("--device", "cpu:threads=2,memory=2GiB") as found:
        yield found


@pytest.fixture
def admin(url: str) -> Iterator[Admin]:
    with heliograph.admin.connect(url) as found:
        yield found


def health(url: str) -> int:
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        asked = health_pb2.HealthCheckRequest()
        return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=SECONDS).status


def running(session: hg.Session, products: int = 20) -> Any:
    """A run of some seconds, or longer, that has begun."""
    future = session.compile(long_graph(products)).submit(x=session.put(X))
    session.devices[0].memory()
    return future


# Looking on


def test_a_daemon_that_never_answers_is_no_endless_wait() -> None:
    over = threading.Event()

    def never(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(over.set)
        over.wait(SECONDS)
        yield from ()

    handlers = {"Watch": grpc.unary_stream_rpc_method_handler(never)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("heliograph.v1.AdminService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with heliograph.admin.connect(f"grpc://127.0.0.1:{port}", timeout=0.3) as admin:
            for ask in (admin.snapshot, lambda: next(admin.watch())):
                over.clear()
                with pytest.raises(hg.DeadlineExceededError, match="did not report its state within 0.3 s"):
                    ask()
                assert over.wait(SECONDS), "the call goes on"
    finally:
        server.stop(None).wait(SECONDS)


def test_an_operator_sees_each_session_and_what_it_holds(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        kept = session.put(np.zeros(2**20, np.float32))
        kept.get()
        (found,) = admin.sessions()
        assert (found.client, found.attached) == (f"heliograph-python/{hg.__version__}", True)
        assert (found.tensors, found.device_bytes) == (1, 2**22)
        assert found.received_bytes == found.sent_bytes == 2**22 and found.commands >= 1
    assert admin.sessions() == ()


def test_a_snapshot_has_devices_sessions_and_runs_in_flight(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        future = running(session)
        for found in admin.watch(0.1):
            if found.sessions[0].runs_in_flight and found.devices[0].busy_share:
                break
        assert found.devices[0].memory.free_bytes < found.devices[0].memory.total_bytes == 2**31
        assert found.drain.state is DrainState.SERVING and found.drain.busy_sessions == 1
        assert found.tenants[0].runs_in_flight == 1
        future.result(timeout=SECONDS)


def test_rates_are_those_since_the_snapshot_before() -> None:
    busy = DeviceStatus("d", busy_seconds=1.0)
    before = Snapshot("s", b"one", 10.0, devices=(busy,), sessions=(SessionStatus(1, commands=5),))
    now = Snapshot(
        "s",
        b"one",
        12.0,
        devices=(DeviceStatus("d", busy_seconds=2.0),),
        sessions=(
            SessionStatus(1, age_seconds=2.0, commands=25, sent_bytes=8),
            SessionStatus(2, age_seconds=1.0, commands=7),
        ),
    )
    found = with_rates(now, before)
    assert found.devices[0].busy_share == 0.5
    assert [one.commands_per_second for one in found.sessions] == [10.0, 7.0]
    assert found.sessions[0].sent_bytes_per_second == 4.0


def test_after_a_restart_nothing_is_compared_with_the_life_before() -> None:
    before = Snapshot("s", b"one", 1000.0, sessions=(SessionStatus(1, age_seconds=900.0, commands=500),))
    now = Snapshot("s", b"two", 4.0, sessions=(SessionStatus(1, age_seconds=2.0, commands=6),))
    assert with_rates(now, before).sessions[0].commands_per_second == 3.0


def test_what_an_operator_sees_survives_the_wire(admin: Admin, url: str) -> None:
    with hg.connect(url):
        found = admin.snapshot()
    assert decode(encode(found, admin_pb2.Snapshot), Snapshot) == found


def test_a_state_of_a_later_version_is_none_that_takes_sessions() -> None:
    later = admin_pb2.DrainStatus(state=admin_pb2.DrainState.ValueType(99))
    assert decode(later, DrainStatus).state is DrainState.DRAINING


@pytest.mark.parametrize("interval", [0.001, 4000.0])
def test_an_interval_that_is_none_is_refused(admin: Admin, interval: float) -> None:
    with pytest.raises(hg.InvalidArgumentError):
        next(iter(admin.watch(interval)))


def test_only_so_many_look_on_at_once(url: str, admin: Admin) -> None:
    watches = [admin.watch(3600) for _ in range(32)]
    for one in watches:
        next(one)
    with pytest.raises(hg.LimitExceededError):
        admin.snapshot()
    for one in watches:
        one.close()  # type: ignore[attr-defined]


def test_this_process_has_no_operator() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="not a daemon"):
        heliograph.admin.connect("local:")


def test_nobody_there_is_said_with_advice() -> None:
    with (
        heliograph.admin.connect("grpc://127.0.0.1:1") as admin,
        pytest.raises(hg.UnavailableError, match="refused"),
    ):
        admin.snapshot()


# Ending sessions


def test_a_session_that_an_operator_ends_says_so_to_its_client(url: str, admin: Admin) -> None:
    with hg.connect(url) as session, hg.connect(url) as other:
        future = running(session, products=2000)
        number = min(one.number for one in admin.sessions())
        admin.end_session(number, "the machine\nis wanted")
        with pytest.raises(
            hg.SessionClosedError, match="an operator ended the session: the machine is wanted"
        ):
            future.result(timeout=SECONDS)
        with pytest.raises(hg.SessionClosedError, match="operator"):
            session.put(X).get()
        assert other.put(np.ones(3, np.float32)).get().tolist() == [1, 1, 1]
        assert [one.number for one in admin.sessions()] != [number]


def test_a_session_that_is_idle_is_told_too(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        admin.end_session(admin.sessions()[0].number)
        with pytest.raises(hg.SessionClosedError, match="no reason given"):
            session.put(X).get()


def test_what_is_no_session_cannot_be_ended(admin: Admin) -> None:
    with pytest.raises(hg.SessionClosedError, match="session 10000 does not exist"):
        admin.end_session(10000)
    with pytest.raises(hg.InvalidArgumentError):
        admin.end_session(0)


def test_a_reason_of_any_length_is_refused(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        with pytest.raises(hg.InvalidArgumentError, match="1000"):
            admin.end_session(admin.sessions()[0].number, "x" * 1001)
        session.put(X)


# Draining


def test_running_work_ends_well_while_new_sessions_are_refused_and_then_the_daemon_stops() -> None:
    with started() as (process, url), ready(url) as session, heliograph.admin.connect(url) as admin:
        future = running(session)
        status = admin.drain()
        assert (status.state, status.stay, status.busy_sessions) == (DrainState.DRAINING, False, 1)
        assert 0 < status.remaining_seconds <= 30
        assert health(url) == NOT_SERVING
        with pytest.raises(hg.DrainingError, match="elsewhere"):
            hg.connect(url)
        assert future.result(timeout=SECONDS)["y"].tolist() == [[0.0]]
        assert admin.wait_drained(SECONDS).state is DrainState.STOPPING
        assert process.wait(SECONDS) == 0


def test_health_and_refusals_are_the_same_while_a_signal_drains() -> None:
    with started() as (process, url), ready(url) as session, heliograph.admin.connect(url) as admin:
        future = running(session)
        process.terminate()
        for found in admin.watch(0.1):
            if found.drain.state is DrainState.STOPPING:
                break
        assert health(url) == NOT_SERVING
        with pytest.raises(hg.DrainingError, match="elsewhere"):
            hg.connect(url)
        with pytest.raises(hg.DrainingError, match="stopping"):
            admin.undo_drain()
        with pytest.raises(hg.DrainingError, match="stopping"):
            admin.drain()
        assert future.result(timeout=SECONDS)["y"].tolist() == [[0.0]]
        session.close()
        assert process.wait(SECONDS) == 0


def test_work_that_outlasts_the_deadline_is_cut_short() -> None:
    with started() as (process, url), ready(url) as session, heliograph.admin.connect(url) as admin:
        future = running(session, products=2000)
        admin.drain(0.1)
        with pytest.raises(hg.HeliographError):
            future.result(timeout=SECONDS)
        assert process.wait(SECONDS) == 0


def test_a_drain_can_be_undone_while_work_runs(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        future = running(session)
        admin.drain()
        assert admin.undo_drain().state is DrainState.SERVING
        assert health(url) == SERVING
        hg.connect(url).close()
        assert future.result(timeout=SECONDS)["y"].tolist() == [[0.0]]
    assert admin.undo_drain().state is DrainState.SERVING


def test_a_daemon_that_stays_ends_its_sessions_and_waits_to_be_undone(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        admin.drain(stay=True)
        assert admin.wait_drained(SECONDS).state is DrainState.DRAINED
        assert admin.sessions() == ()
        with pytest.raises(hg.DrainingError, match="operator"):
            session.put(X).get()
        with pytest.raises(hg.DrainingError):
            hg.connect(url)
    admin.undo_drain()
    with hg.connect(url) as session:
        assert session.put(np.ones(2, np.float32)).get().tolist() == [1, 1]


def test_a_drain_that_goes_on_takes_a_new_deadline(url: str, admin: Admin) -> None:
    with hg.connect(url) as session:
        future = running(session, products=2000)
        assert admin.drain(3600, stay=True).remaining_seconds > 3000
        assert admin.drain(0.1, stay=True).remaining_seconds < 1
        assert admin.wait_drained(SECONDS).state is DrainState.DRAINED
        with pytest.raises(hg.HeliographError):
            future.result(timeout=SECONDS)
    admin.undo_drain()


def test_a_client_of_short_runs_does_not_hold_a_drain_up(url: str, admin: Admin) -> None:
    """It is quiet between two runs, and never for long."""
    with hg.connect(url) as session:
        plan = plan_of_short_runs(session)
        x = np.zeros(2, np.float32)
        admin.drain(0.5, stay=True)
        ended = time.monotonic() + SECONDS
        with pytest.raises(hg.DrainingError, match="drained by its operator") as caught:
            while time.monotonic() < ended:
                plan.run(x=x)
        assert "connect again" in caught.value.advice
        assert admin.wait_drained(SECONDS).state is DrainState.DRAINED
    admin.undo_drain()


def has_ended(process: int) -> bool:
    """Whether it is gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def plan_of_short_runs(session: hg.Session) -> hg.Plan:
    graph = hg.Graph()
    graph.output("y", graph.input("x", (2,), "f32") + 1.0)
    return session.compile(graph)


def test_a_session_of_short_runs_counts_as_at_work_and_its_interruption_is_said(
    url: str, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(url) as session, ThreadPoolExecutor(1) as threads:
        plan = plan_of_short_runs(session)

        def run_until_ended() -> None:
            with pytest.raises(hg.DrainingError):
                while True:
                    plan.run(x=np.zeros(2, np.float32))

        running = threads.submit(run_until_ended)
        assert main(["drain", "--stay", "--wait", "--seconds", "1", "--server", url]) == 0
        running.result(SECONDS)
    said = capsys.readouterr().out
    assert "draining: 1 session at work" in said
    assert "drained, waiting for --undo; the work of 1 session did not end in time" in said
    admin.undo_drain()
    assert admin.snapshot().drain.interrupted_sessions == 0


def test_a_stopped_daemon_says_that_it_interrupted_work_and_its_process_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with started() as (process, url), ready(url) as session:
        future = running(session, products=2000)
        assert main(["drain", "--wait", "--seconds", "0.2", "--server", url]) == 0
        assert has_ended(process.pid) and process.wait(SECONDS) == 0
        said = capsys.readouterr().out
        assert "drained and stopped; the work of 1 session did not end in time and was interrupted" in said
        with pytest.raises(hg.HeliographError):
            future.result(timeout=SECONDS)


@pytest.mark.parametrize("seconds", [0, -1, 100_000])
def test_a_deadline_that_is_none_is_refused(admin: Admin, seconds: float) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="drain"):
        admin.drain(seconds)
    assert admin.snapshot().drain.state is DrainState.SERVING


# The log


def test_the_level_of_the_log_changes_while_the_daemon_runs(admin: Admin) -> None:
    assert admin.set_log_level("warning") == "info"
    assert admin.snapshot().log_level == "warning"
    assert admin.set_log_level("info") == "warning"
    with pytest.raises(hg.InvalidArgumentError, match="debug, info"):
        admin.set_log_level("loud")


# On the command line


def test_sessions_are_listed_and_ended_on_the_command_line(
    url: str, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(url):
        assert main(["sessions", "ls", "--server", url, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["sessions"]
        assert main(["sessions", "ls", "--server", url]) == 0
        assert found["client"] in capsys.readouterr().out
        assert main(["sessions", "end", str(found["number"]), "--reason", "why not", "--server", url]) == 0
        assert "has ended" in capsys.readouterr().out
    assert main(["sessions", "end", str(found["number"]), "--server", url]) == 1
    assert "sessions ls" in capsys.readouterr().err


def test_a_drain_on_the_command_line_says_how_it_goes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--stay", "--wait", "--seconds", "60", "--server", url]) == 0
    said = capsys.readouterr().out
    assert "the daemon will stay" in said and "drained, waiting for --undo" in said
    assert main(["drain", "--undo", "--server", url]) == 0
    assert main(["drain", "--undo", "--wait", "--server", url]) == 1
    assert "--undo starts no drain" in capsys.readouterr().err


def test_a_drain_that_stops_the_daemon_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with started() as (process, url):
        ready(url).close()
        assert main(["drain", "--wait", "--server", url]) == 0
        assert capsys.readouterr().out.endswith("drained and stopped\n")
        assert has_ended(process.pid) and process.wait(SECONDS) == 0


def test_the_level_of_the_log_is_set_on_the_command_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log-level", "debug", "--server", url]) == 0
    assert main(["log-level", "info", "--server", url]) == 0
    assert "it was debug" in capsys.readouterr().out
