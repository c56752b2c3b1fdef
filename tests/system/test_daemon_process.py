"""The daemon as a process: signals, exits, addresses, and what a client sees when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon_processes import SECONDS, SERVE, X, command_started, long_graph, ready
from paths import SUPPORT

import heliograph as hg
from heliograph.testing import running_daemon

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls


def test_sigterm_ends_an_idle_daemon_with_exit_0() -> None:
    with command_started() as (process, url):
        ready(url).close()
        process.terminate()
        assert process.wait(SECONDS) == 0


def test_sigterm_lets_running_work_end_and_refuses_new_sessions() -> None:
    with command_started() as (process, url), ready(url) as session:
        plan = session.compile(long_graph())
        x = session.put(X)
        future = plan.submit(x=x)
        session.devices[0].memory()
        process.terminate()
        assert future.result(timeout=SECONDS)["y"].tolist() == [[0.0]]
        session.close()
        assert process.wait(SECONDS) == 0


def test_a_result_that_takes_a_call_of_its_own_arrives_while_the_daemon_drains() -> None:
    g = hg.Graph()
    x = g.input("x", (1024, 1024), "f32")
    g.output("y", x @ x)
    with command_started() as (process, url), ready(url) as session:
        plan = session.compile(g)
        loop = plan.loop(x=X[:1024, :1024], steps=100, carry={"y": "x"}, taps=["y"])
        next(loop.taps())
        process.terminate()
        assert not loop.result(timeout=SECONDS)["y"].any()
        assert process.wait(SECONDS) == 0


def test_work_that_outlasts_the_drain_is_cancelled_and_the_daemon_still_exits_0() -> None:
    with command_started("--drain-seconds", "0.1") as (process, url), ready(url) as session:
        plan = session.compile(long_graph(products=2000))
        future = plan.submit(x=session.put(X))
        session.devices[0].memory()
        process.terminate()
        with pytest.raises(hg.HeliographError):
            future.result(timeout=SECONDS)
        assert process.wait(SECONDS) == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux's unshare"
)
def test_sigterm_ends_the_daemon_as_pid_1() -> None:
    """As in a container: the kernel gives PID 1 no default handlers."""
    with command_started(prefix=("unshare", "--pid", "--fork", "--kill-child")) as (process, url):
        ready(url).close()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert "NSpid" in (status := Path(f"/proc/{child}/status").read_text())
        assert status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def test_a_daemon_that_dies_in_mid_run_fails_everything_that_is_pending() -> None:
    with command_started() as (process, url), ready(url) as session:
        plan = session.compile(long_graph())
        x = session.put(X)
        futures = [plan.submit(x=x) for _ in range(5)]
        process.kill()
        for future in futures:
            with pytest.raises(hg.ConnectionError):
                future.result(timeout=SECONDS)
        with pytest.raises(hg.ConnectionError):
            plan.run(x=x)
        with pytest.raises(hg.ConnectionError):
            session.put(X)


def test_a_server_that_is_not_there_is_a_typed_error_with_advice() -> None:
    with command_started() as (process, url):
        process.kill()
        process.wait(SECONDS)
        with pytest.raises(hg.UnavailableError, match="heliograph serve"):
            hg.connect(url, timeout=5)


def test_a_daemon_that_starts_as_it_was_asked_to_warns_of_nothing() -> None:
    with command_started() as (process, url):
        ready(url).close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=SECONDS)
    assert "device cpu" in log and "WARNING" not in log
    # The addresses are on stdout, once.
    assert "listening on" not in log


def test_a_port_that_is_taken_is_said_in_one_line(daemon: DaemonUrls) -> None:
    found = subprocess.run(
        [*SERVE, "--listen", daemon.tcp], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert found.returncode == 1
    assert daemon.tcp.removeprefix("grpc://") in found.stderr
    assert "Traceback" not in found.stderr


def test_an_address_that_others_can_reach_needs_insecure() -> None:
    found = subprocess.run(
        [*SERVE, "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert found.returncode == 1
    assert "--insecure" in found.stderr


CLIENT = """
    import sys
    import numpy as np
    import heliograph as hg
    sys.path.insert(0, {tests!r})
    from daemon_processes import X, long_graph
    with hg.connect({url!r}) as session:
        plan = session.compile(long_graph(products=2000))
        x = session.put(X)
        future = plan.submit(x=x)
        session.devices[0].memory()
        print("running", flush=True)
        future.result()
"""


def test_ctrl_c_in_the_client_leaves_the_daemon_clean(daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory()
        code = textwrap.dedent(CLIENT.format(tests=str(SUPPORT), url=daemon.tcp))
        client = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        client.send_signal(signal.SIGINT)
        assert client.wait(SECONDS) != 0
        client.stdout.close()
        assert any(watcher.devices[0].memory() == before for _ in range(5_000))


def test_a_daemon_stops_when_its_context_ends() -> None:
    with running_daemon() as url, hg.connect(url) as session:
        assert session.devices[0].name == "cpu0"
    with pytest.raises(hg.UnavailableError):
        hg.connect(url, timeout=5)
