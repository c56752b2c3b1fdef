"""`heliograph bench`: the card of a daemon, saved cards beside each other, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon

import heliograph as hg
import heliograph.admin
from heliograph.cli import main
from heliograph.cli.bench.card import Card, Row, as_json, compared, figure, from_json

SECONDS = 60.0
CARD = Card(
    "heliograph/0.1.0", "cpu0", "A processor", "on its host", (Row("round trip", "s", 1e-4, "a run"),)
)


def test_the_card_has_every_measure_and_nothing_stays(
    daemon: DaemonUrls, capsys: pytest.CaptureFixture[str]
) -> None:
    with hg.connect(daemon.tcp) as session:
        free = session.devices[0].memory().free_bytes
    assert main(["bench", "--server", daemon.tcp, "--seconds", "0.05", "--json"]) == 0
    card = from_json(capsys.readouterr().out, "it")
    measured = {row.name for row in card.rows if row.value > 0}
    assert {"round trip", "runs ahead", "memory", "transformer block"} <= measured
    assert {f"matmul {one}" for one in ("f32", "f16", "q4_0")} <= measured
    assert {f"{way} by gRPC" for way in ("upload", "download")} <= measured
    with hg.connect(daemon.tcp) as session, heliograph.admin.connect(daemon.tcp) as admin:
        assert len(admin.sessions()) == 1
        assert session.devices[0].memory().free_bytes == free


def test_a_small_quota_makes_transfers_smaller_and_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon("--device", "cpu:threads=1,memory=24MiB") as url:
        assert main(["bench", "--server", url, "--seconds", "0.05", "--json"]) == 0
    rows = {row.name: row for row in from_json(capsys.readouterr().out, "it").rows}
    assert "16.0 MiB" in rows["upload by gRPC"].note and rows["upload by gRPC"].value > 0
    for row in rows.values():
        assert row.value or row.note


def test_cards_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faster = Card(*("b", "cpu0", "B", "elsewhere"), (Row("round trip", "s", 5e-5), Row("new", "B/s", 1.0)))
    for name, card in (("a", CARD), ("b", faster)):
        (tmp_path / f"{name}.json").write_text(as_json(card))
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "2.00x" in printed and "100 us" in printed and "50 us" in printed
    assert compared([("a", faster), ("b", CARD)])[2][-1] == "-"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 9}',
        as_json(CARD).replace("0.0001", "-1"),
        as_json(CARD).replace("0.0001", "NaN"),
        as_json(CARD).replace('"unit": "s"', '"unit": "miles"'),
        "[" * 100_000,
    ],
)
def test_what_is_no_card_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "card.json").write_text(text)
    assert main(["bench", "--compare", str(tmp_path / "card.json")]) == 1
    assert "is no report card" in capsys.readouterr().err


def test_figures_have_units() -> None:
    shown = [figure(Row("x", unit, 2e9)) for unit in ("runs/s", "B/s", "flop/s", "tokens/s")]
    assert shown == ["2e+09 runs/s", "1.9 GiB/s", "2 Gflop/s", "2e+09 tokens/s"]
    assert figure(Row("x", "s")) == "-" and json.loads(as_json(CARD))["format"] == 1


def test_ctrl_c_ends_it_quietly_and_leaves_no_session(daemon: DaemonUrls) -> None:
    command = [sys.executable, "-m", "heliograph.cli", "bench", "--server", daemon.tcp, "--seconds", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process, heliograph.admin.connect(daemon.tcp) as admin:
        try:
            until(admin, has_sessions=True)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert (process.returncode, out, err) == (130, b"", b"")
        until(admin, has_sessions=False)


def until(admin: heliograph.admin.Admin, *, has_sessions: bool) -> None:
    """Wait until a daemon has sessions, or none."""
    end = time.monotonic() + SECONDS
    while bool(admin.sessions()) != has_sessions:
        assert time.monotonic() < end
        time.sleep(0.05)
