"""`heliograph warmup`: the kernels are compiled into a cache once, and found there afterwards."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from heliograph.cli import main
from heliograph_backends.cpu.kernels import CacheState, available, cache_state
from heliograph_backends.cpu.kernels import warmup as kernels_warmup
from heliograph_server.commands import warmup

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)


def heliograph(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line with a cache of its own."""
    return subprocess.run(
        [sys.executable, "-m", "heliograph.cli", *arguments],
        env=os.environ | {"HELIOGRAPH_KERNEL_CACHE": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def incomplete(tmp_path: Path) -> Path:
    """A cache that lacks the smallest kernel: all of them take a minute to compile."""
    held = cache_state().folder or kernels_warmup().folder
    assert held is not None
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    shutil.copytree(held, folder / held.name, ignore=shutil.ignore_patterns("open_program-*"))
    return folder


def test_the_first_call_compiles_and_the_second_finds_everything_warm(incomplete: Path) -> None:
    folder = incomplete
    first = heliograph(folder, "warmup")
    assert first.returncode == 0 and first.stderr == ""
    assert "1 kernels compiled in" in first.stdout and f"are in {folder}" in first.stdout
    second = heliograph(folder, "warmup")
    assert second.returncode == 0 and second.stdout.startswith("all kernels are warm, loaded in ")
    found = json.loads(heliograph(folder, "warmup", "--json").stdout)
    assert found["compiled"] == 0 and Path(found["folder"]).parent == folder and found["seconds"] > 0


def test_a_folder_that_cannot_keep_them_is_an_error_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = heliograph(file, "warmup")
    assert found.returncode == 1 and found.stdout == ""
    assert "error: the kernels cannot be kept: it is not a directory" in found.stderr
    assert "$HELIOGRAPH_KERNEL_CACHE" in found.stderr


def test_without_numba_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["warmup"]) == 1
    assert "pip install 'heliograph[server]'" in capsys.readouterr().err


def test_progress_names_what_was_compiled() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with warmup.kernel_progress(console) as show:
        assert show is not None
        show(3, 15, "rows_block")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "compiled rows_block" in printed and "3/15" in printed


def test_nobody_watches_a_pipe() -> None:
    with warmup.kernel_progress() as show:
        assert show is None


def test_words_tell_warm_from_cold() -> None:
    folder = Path("/kernels")
    assert warmup.said(CacheState(folder), 0.5) == "all kernels are warm, loaded in 0.5 s from /kernels"
    assert "15 kernels compiled in 20.0 s" in warmup.said(CacheState(folder, None, 15), 20.0)


def test_a_process_that_has_the_kernels_knows_where_they_are() -> None:
    warmup.warm(None)
    assert cache_state().folder is not None
