"""Type checkers know what operators and runs give, and see all names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("mypy")


@pytest.mark.timeout(600)
def test_checkers_know_what_the_public_api_gives() -> None:
    file = Path(__file__).with_name("typed_use.py")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
