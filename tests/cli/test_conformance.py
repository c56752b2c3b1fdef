"""`heliograph conformance`: devices of this process, tables, JSON, lists, exit statuses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SUPPORT
from rich.console import Console

from heliograph.cli import main
from heliograph_backends.conformance import CaseOutcome, Result
from heliograph_server.commands import conformance


@pytest.mark.parametrize("device", ["cpu:threads=1", "local:#cpu:threads=1", "fake"])
def test_a_device_of_this_process_passes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", device, "--op", "soft_max", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "soft_max" in printed and "0 failed" in printed and "seed" in printed


def test_a_daemon_s_device_passes_over_the_wire(daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (daemon.tcp, daemon.unix):
        assert main(["conformance", "--device", f"{url}#cpu0", "--op", "soft_max", "--quick"]) == 0
        assert "/cpu0: " in capsys.readouterr().out


def test_a_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--match", "mul_mat(q4_0[64, 256]", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 5 and found["counts"] == {"passed": 2, "not supported": 0, "failed": 0}


def test_the_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--op", "event"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("event(") for line in lines)


def test_a_failure_of_a_plugins_device_is_exit_status_1_with_its_details(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugin = tmp_path / "wrong_backend.py"
    plugin.write_text((SUPPORT / "wrong_backend.py").read_text())
    plugin.chmod(0o600)
    assert (
        main(["conformance", "--backend", str(plugin), "--device", "wrong", "--op", "tanh", "--quick"]) == 1
    )
    printed = capsys.readouterr().out
    assert "tanh(f32[7, 33]): failed: output 0: NMSE" in printed


@pytest.mark.parametrize("verbose", [False, True])
def test_cases_that_a_plugin_cannot_run_are_summed_up_or_listed(
    verbose: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugin = tmp_path / "backend.py"
    code = (ROOT / "examples/backend.py").read_text()
    plugin.write_text(code.replace('    "scale":', '    "scale elsewhere":'))
    plugin.chmod(0o600)
    command = ["conformance", "--backend", str(plugin), "--device", "numpy", "--op", "plan"]
    assert main([*command, *(["-v"] if verbose else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ of \d+ plan cases were not run: they need scale", lines[-2])
    listed = [line for line in lines if line.startswith("plan(") and ": not supported: numpy has" in line]
    assert bool(listed) is verbose
    assert any(line.startswith("not supported (") for line in lines) is not verbose


@pytest.mark.parametrize(
    ("text", "is_remote"),
    [
        ("grpc://box:7070#cpu0", True),
        ("grpcs://box:7070?token=hgt_x#cpu0", True),
        ("box:7070#cpu0", True),
        ("127.0.0.1:7070", True),
        ("[::1]:7070#cpu0", True),
        ("unix:///run/x#cpu0", True),
        ("cpu", False),
        ("cpu:threads=2", False),
        ("cpu:0", False),
        ("local:#cpu:threads=2", False),
    ],
)
def test_a_device_of_another_process_is_named_by_an_address(text: str, is_remote: bool) -> None:
    assert bool(conformance.REMOTE.match(text)) is is_remote


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "exo"], "did you mean 'exp'"),
        (["--device", "cpo"], "cpo"),
        (["--match", "nothing like this"], "--list"),
    ],
)
def test_what_cannot_be_run_is_an_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and words in printed.err and printed.out == ""


def test_progress_counts_cases_and_failures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with conformance.case_progress(3, console) as show:
        assert show is not None
        show(Result("exp(f32[])", "exp", CaseOutcome.PASSED))
        show(Result("log(f32[])", "log", CaseOutcome.FAILED))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "log, 1 failed" in printed and "2/3" in printed


def test_nobody_watches_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with conformance.case_progress(3) as show:
        assert show is None
