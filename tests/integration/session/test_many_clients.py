"""Many clients at once, each with its own handles, names and failures."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import heliograph as hg

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

CLIENTS = 8
RUNS = 40


def accumulate(url: str, client: int, everybody: threading.Barrier) -> float:
    """Adds up its own number in a variable whose name all clients use."""
    g = hg.Graph()
    total = g.variable("total", (3,), "f32")
    x = g.input("x", (3,), "f32")
    g.output("total", hg.assign(total, total + x))
    with hg.connect(url) as session:
        plan = session.compile(g)
        everybody.wait(30)
        futures = [plan.submit(x=np.full(3, client, np.float32)) for _ in range(RUNS)]
        for future in futures:
            future.result(timeout=30)
        return float(plan.checkpoint()["total"][0])


def test_clients_do_not_see_one_another(daemon: DaemonUrls) -> None:
    everybody = threading.Barrier(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda n: accumulate(daemon.tcp, n, everybody), range(CLIENTS)))
    assert found == [float(n * RUNS) for n in range(CLIENTS)]


def test_one_clients_error_is_nobody_elses(daemon: DaemonUrls) -> None:
    g = hg.Graph()
    rows, index = g.input("rows", (3, 2), "f32"), g.input("index", (1,), "i32")
    g.output("y", hg.take(rows, index, axis=0))
    data = np.ones((3, 2), np.float32)
    with hg.connect(daemon.tcp) as unlucky, hg.connect(daemon.tcp) as lucky:
        bad, good = unlucky.compile(g), lucky.compile(g)
        failing = bad.submit(rows=data, index=np.array([9], np.int32))
        working = good.submit(rows=data, index=np.array([1], np.int32))
        assert working.result(timeout=30)["y"].tolist() == [[1.0, 1.0]]
        with pytest.raises(hg.OutOfRangeError):
            failing.result(timeout=30)
        assert bad.run(rows=data, index=np.array([2], np.int32))["y"].tolist() == [[1.0, 1.0]]


def test_a_hundred_sessions_in_a_row_leave_nothing(daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory()
        for _ in range(100):
            with hg.connect(daemon.tcp) as session:
                session.put(np.zeros(1000, np.float32))
        assert watcher.devices[0].memory() == before


def test_one_session_serves_many_threads(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2,), "f32")
    g.output("y", x * 2.0)
    plan = session.compile(g)

    def runs(client: int) -> bool:
        given = np.full(2, client, np.float32)
        return all(np.array_equal(plan.run(x=given)["y"], given * 2) for _ in range(RUNS))

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(runs, range(CLIENTS)))
