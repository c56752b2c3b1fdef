"""Snapshots as operators see them: figures for Prometheus, and the list of sessions."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from metric_figures import figures
from surviving_daemons import SurvivingDaemon, free_port

import heliograph as hg
from heliograph import admin
from heliograph.cli.common.status_view import session_rows

#: A variable of this many bytes is written by each snapshot after a run.
SIZE_BYTES = 4000


def counting() -> hg.Graph:
    g = hg.Graph()
    total = g.variable("total", (SIZE_BYTES // 4,), "f32")
    g.output("total", hg.assign(total, total + 1.0))
    return g


def test_snapshots_are_counted_with_their_bytes_their_time_and_their_failures(tmp_path: Path) -> None:
    port = free_port()
    serve = ("--metrics-listen", f"127.0.0.1:{port}", "--snapshot-seconds", "0")
    with SurvivingDaemon(tmp_path / "state", *serve) as daemon, daemon.connect(progress=None) as session:
        plan = session.compile(counting())
        plan.run()
        before = figures(port)
        session.snapshot()
        after = figures(port)
        assert after["heliograph_snapshots_total ok"] == before["heliograph_snapshots_total ok"] + 1
        written = after["heliograph_snapshot_bytes_total"] - before["heliograph_snapshot_bytes_total"]
        assert written >= SIZE_BYTES
        still, whole = (after[f"heliograph_snapshot_seconds_total {one}"] for one in ("still", "whole"))
        assert 0 < still <= whole and after["heliograph_snapshots_total failed"] == 0
        assert after["heliograph_snapshot_age_seconds"] >= 0

        plan.run()
        (daemon.folder / "parts").rename(daemon.folder / "away")
        with pytest.raises(hg.SnapshotFailedError):
            session.snapshot()
        (daemon.folder / "away").rename(daemon.folder / "parts")
        failed = figures(port)
        assert failed["heliograph_snapshots_total failed"] == 1
        assert failed["heliograph_snapshots_total ok"] == after["heliograph_snapshots_total ok"]
        assert failed["heliograph_snapshot_age_seconds"] > after["heliograph_snapshot_age_seconds"]

        daemon.restart()
        assert np.array_equal(plan.run()["total"], np.full(SIZE_BYTES // 4, 3, np.float32))
        assert figures(port)["heliograph_sessions_restored_total ok"] == 1


def test_the_list_of_sessions_tells_the_age_of_snapshots(tmp_path: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(SurvivingDaemon(tmp_path / "state"))
        stack.enter_context(daemon.connect(progress=None))
        stack.enter_context(hg.connect(daemon.url, progress=None))
        with admin.connect(daemon.url) as operator:
            durable, other = operator.sessions()
        assert durable.snapshot_age_seconds is not None and durable.snapshot_age_seconds >= 0
        assert other.snapshot_age_seconds is None
        header, *rows = session_rows([durable, other])
        shown = [row[header.index("snapshot")] for row in rows]
        assert shown[0].endswith(" ago") and shown[1] == ""
