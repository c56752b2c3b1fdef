"""The example of training runs as it is, in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from paths import ROOT  # noqa: E402

SECONDS = 300.0


def test_the_example_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "torch_training.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    *_, right, centre = done.stdout.splitlines()
    assert int(right.partition("%")[0]) > 85, done.stdout
    assert centre == "the centre is inside"
