"""Completion at the Tab key, in the shells themselves where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_urls import DaemonUrls

import heliograph as hg
import heliograph.admin
from heliograph.cli import COMMANDS

pytest.importorskip("argcomplete", reason="needs argcomplete")

SECONDS = 60.0
BIN = Path(sys.executable).parent


def asked(line: str, tmp_path: Path, **environment: str) -> list[str]:
    """What `heliograph` answers a shell."""
    answers = tmp_path / "answers"
    given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    given |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answers), **environment}
    command = [str(BIN / "heliograph")]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return [one.strip() for one in answers.read_text().split("\n") if one.strip()]


def script(shell: str) -> str:
    command = [str(BIN / "heliograph"), "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout


def test_commands_options_and_choices(tmp_path: Path) -> None:
    assert set(COMMANDS) <= set(asked("heliograph ", tmp_path))
    assert asked("heliograph dev", tmp_path) == ["devices"]
    assert {"--server", "--json"} <= set(asked("heliograph devices --", tmp_path))
    assert {"bash", "zsh", "fish"} <= set(asked("heliograph completion ", tmp_path))
    assert {"ls", "end"} <= set(asked("heliograph sessions ", tmp_path))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_completes_its_options(name: str, tmp_path: Path) -> None:
    assert "--help" in asked(f"heliograph {name} --", tmp_path)


def test_files_are_offered_where_files_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.hgraph").touch()
    monkeypatch.chdir(tmp_path)
    assert "model.hgraph" in asked("heliograph run mod", tmp_path)


def test_sessions_of_the_daemon_are_offered(daemon: DaemonUrls, tmp_path: Path) -> None:
    with hg.connect(daemon.tcp) as session, heliograph.admin.connect(daemon.tcp) as admin:
        assert not session.closed
        numbers = {str(one.number) for one in admin.sessions()}
        found = asked("heliograph sessions end ", tmp_path, HELIOGRAPH_SERVER=daemon.tcp)
        assert numbers <= set(found)


def test_a_daemon_that_is_gone_makes_no_noise(tmp_path: Path) -> None:
    found = asked("heliograph sessions end ", tmp_path, HELIOGRAPH_SERVER="grpc://127.0.0.1:9")
    assert not any(one.isdecimal() for one in found)


def path_with_heliograph() -> dict[str, str]:
    return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}


def test_bash(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "script").write_text(script("bash"))
    commands = (
        f"source {tmp_path}/script; COMP_WORDS=(heliograph dev); COMP_CWORD=1; COMP_LINE='heliograph dev'; "
        "COMP_POINT=14; COMP_TYPE=9; $(complete -p heliograph | sed 's/.*-F \\([^ ]*\\).*/\\1/') heliograph; "
        'echo "found ${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", commands],
        env=path_with_heliograph(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "found devices" in done.stdout, done.stdout + done.stderr


def test_fish(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed: apt-get install fish")
    (tmp_path / "script").write_text(script("fish"))
    commands = f"source {tmp_path}/script; complete -C 'heliograph dev'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", commands],
        env=path_with_heliograph() | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.startswith("devices"), done.stdout + done.stderr


def test_zsh(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed: apt-get install zsh")
    (tmp_path / "script").write_text(script("zsh"))
    process, terminal = pty.fork()
    if not process:
        os.execvpe("zsh", ["zsh", "-f", "-i"], path_with_heliograph() | {"HOME": str(tmp_path)})
    try:
        os.write(terminal, f"autoload -Uz compinit && compinit -u -D; source {tmp_path}/script\n".encode())
        os.write(terminal, b"echo rea''dy\n")
        until(terminal, b"ready\r\n")
        os.write(terminal, b"heliograph dev\t")
        until(terminal, b"devices")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def until(terminal: int, words: bytes) -> None:
    """Read a terminal until it shows some words."""
    shown, end = b"", time.monotonic() + SECONDS
    while words not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096)
