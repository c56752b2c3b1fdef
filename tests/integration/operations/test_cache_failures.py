"""A daemon whose cache cannot be written, from the start or later: a warning, no cache, and right results."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from daemon_processes import SECONDS, SERVE, command_started, ready, started

import heliograph as hg

WEIGHTS = np.arange(2**18, dtype=np.float32).reshape(512, 512) % 7


def product(session: hg.Session) -> float:
    """Of a weight of a MiB, which the daemon would keep."""
    g = hg.Graph()
    g.output("y", g.input("x", (1, 512), "f32") @ g.weight("w", WEIGHTS))
    return float(session.compile(g).run(x=np.ones((1, 512), np.float32))["y"].sum())


def log_of(process: subprocess.Popen[str]) -> str:
    """All that a daemon logged, once it has ended well."""
    process.terminate()
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return said


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= WEIGHTS.nbytes]


def test_a_cache_that_can_be_written_keeps_the_weights(tmp_path: Path) -> None:
    with started("--cache", str(tmp_path / "cache")) as (process, url):
        with ready(url) as session:
            assert product(session) == WEIGHTS.sum()
        assert "nothing is kept" not in log_of(process)
    assert kept(tmp_path / "cache")


def test_a_folder_that_cannot_be_made_is_said_at_the_start_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [*SERVE, "--listen", "grpc://127.0.0.1:0", "--cache", str(tmp_path / "file" / "cache")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 1
    assert "cannot keep contents" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux's prlimit")
def test_files_that_may_not_grow_are_a_warning_and_no_cache(tmp_path: Path) -> None:
    limit = ("prlimit", f"--fsize={2**16}")
    with command_started("--cache", str(tmp_path), prefix=limit) as (process, url):
        for _ in range(2):
            with ready(url) as session:
                assert product(session) == WEIGHTS.sum()
        said = log_of(process)
    assert said.count("nothing is kept for") == 1 and "Traceback" not in said
    assert not kept(tmp_path)


def test_a_folder_that_goes_while_the_daemon_runs_is_a_warning_and_no_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with started("--cache", str(folder)) as (process, url):
        with ready(url) as session:
            shutil.rmtree(folder)
            folder.write_text("something else is here now")
            assert product(session) == WEIGHTS.sum()
        with ready(url) as session:
            assert product(session) == WEIGHTS.sum()
        said = log_of(process)
    assert "nothing is kept for" in said and "Traceback" not in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 256 KiB, where one may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    return folder


def test_a_full_disk_is_a_warning_and_no_cache(small_disk: Path) -> None:
    try:
        with started("--cache", str(small_disk / "cache")) as (process, url):
            for _ in range(2):
                with ready(url) as session:
                    assert product(session) == WEIGHTS.sum()
            said = log_of(process)
        assert said.count("the disk is full") == 1 and "Traceback" not in said
        assert not kept(small_disk)
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)
