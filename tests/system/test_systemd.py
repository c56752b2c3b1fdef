"""The daemon as a service of systemd: its unit and drop-ins, by systemd's own tools. They look at files; no
systemd need run."""

from __future__ import annotations

import configparser
import ctypes.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from paths import DEPLOY, SUPPORT

import heliograph as hg
from heliograph.testing import wait_until_serving
from heliograph_server.config.config import load_config

FOLDER = DEPLOY / "systemd"
UNIT = FOLDER / "heliograph.service"
PROGRAM = "/opt/heliograph/bin/heliograph"
SECONDS = 60

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def installed(folder: Path, drop_ins: Sequence[str]) -> str:
    """The unit as it would be installed with these drop-ins, for a program that is there; its path."""
    unit = folder / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    for name in drop_ins:
        (folder / f"{UNIT.name}.d").mkdir(exist_ok=True)
        shutil.copy(FOLDER / name, folder / f"{UNIT.name}.d" / name)
    return str(unit)


def setting(name: str) -> str:
    """What the unit says of [Service] last."""
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"][name]


DROP_INS = [[], ["access.conf"], ["gpu.conf"], ["access.conf", "gpu.conf"]]


@needs_analyze
@pytest.mark.parametrize("drop_ins", DROP_INS, ids=lambda names: "+".join(names) or "alone")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, drop_ins: list[str]) -> None:
    found = analyze("verify", installed(tmp_path, drop_ins))
    # For keys that it does not know the exit status is 0.
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_analyze
def test_what_systemd_does_not_know_would_be_found(tmp_path: Path) -> None:
    unit = Path(installed(tmp_path, []))
    unit.write_text(unit.read_text().replace("PrivateTmp=", "PrivateTemp="))
    assert "PrivateTemp" in analyze("verify", str(unit)).stderr


@needs_analyze
@pytest.mark.parametrize(("drop_ins", "most"), [([], 1.5), (["access.conf"], 1.5), (["gpu.conf"], 1.7)])
def test_systemd_holds_the_service_for_little_exposed(
    tmp_path: Path, drop_ins: list[str], most: float
) -> None:
    unit = installed(tmp_path, drop_ins)
    found = analyze("security", "--offline=true", "--no-pager", f"--threshold={most * 10:.0f}", unit)
    assert found.returncode == 0, found.stdout


def test_stopping_may_take_longer_than_draining() -> None:
    assert int(setting("TimeoutStopSec").removesuffix("s")) >= load_config().drain_seconds + 30


def test_the_sample_of_a_configuration_is_accepted() -> None:
    config = load_config(FOLDER / "heliograph.toml")
    assert config.cache.startswith("/var/cache/heliograph/") and config.health_listen


def test_the_sample_of_an_environment_is_accepted() -> None:
    for line in (FOLDER / "environment").read_text().splitlines():
        assert not line or re.fullmatch(r"#.*|[A-Z_][A-Z0-9_]*=\S*", line), line


def calls_of(filters: Sequence[str]) -> list[str]:
    """The system calls that SystemCallFilter= lines leave."""
    allowed: set[str] = set()
    for line in filters:
        names = line.removeprefix("~").split()
        if line.startswith("~"):
            allowed -= set(expanded(names))
        else:
            allowed |= set(expanded([*names, "@default"]))
    return sorted(allowed)


def expanded(names: Sequence[str]) -> list[str]:
    """System calls of names and groups, in which there may be groups."""
    found = []
    for name in names:
        if not name.startswith("@"):
            found.append(name)
            continue
        lines = [
            line.strip() for line in analyze("syscall-filter", "--no-pager", name).stdout.splitlines()[1:]
        ]
        found += expanded([line for line in lines if line and not line.startswith("#")])
    return found


@needs_analyze
@pytest.mark.skipif(ctypes.util.find_library("seccomp") is None, reason="libseccomp is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="filters of system calls are Linux's")
def test_a_daemon_serves_under_the_units_filter_of_system_calls(tmp_path: Path) -> None:
    filters = re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M)
    assert len(filters) == 2
    calls = calls_of(filters)
    assert "read" in calls and not {"mount", "ptrace", "reboot", "keyctl"} & set(calls)
    (tmp_path / "calls").write_text("\n".join(calls))
    socket = f"unix://{tmp_path}/socket"
    serve = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", socket]
    command = [
        sys.executable,
        str(SUPPORT / "under_filter.py"),
        str(tmp_path / "calls"),
        *serve,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            listening = daemon.stdout.readline()
            assert listening.startswith("listening on"), daemon.communicate(timeout=SECONDS)
            assert "Seccomp:\t2" in Path(f"/proc/{daemon.pid}/status").read_text()
            wait_until_serving(f"unix:{tmp_path}/socket")
            with hg.connect(socket) as session:
                graph = hg.Graph()
                graph.output(
                    "y", graph.input("x", (64, 64), "f32") @ graph.weight("w", np.eye(64, dtype="f4"))
                )
                x = np.ones((64, 64), np.float32)
                np.testing.assert_array_equal(session.compile(graph).run(x=x)["y"], x)
        finally:
            daemon.terminate()
            daemon.communicate(timeout=SECONDS)
    assert daemon.returncode == 0
