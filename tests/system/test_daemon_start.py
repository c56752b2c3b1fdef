"""The daemon as a process, at moments when it is not serving yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", "grpc://127.0.0.1:0"]
#: Far below what the kernels take to compile.
SECONDS = 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_daemon_that_compiles_its_kernels(tmp_path: Path, number: int) -> None:
    pytest.importorskip("numba")
    environment = os.environ | {"HELIOGRAPH_KERNEL_CACHE": str(tmp_path / "cold")}
    with subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as daemon:
        assert daemon.stderr is not None and daemon.stdout is not None
        try:
            assert any("compiling" in line for line in daemon.stderr)
            daemon.send_signal(number)
            assert daemon.wait(SECONDS) == 0
            assert "before the devices are ready" in daemon.stderr.read()
            assert daemon.stdout.read() == ""
        finally:
            daemon.kill()


def test_what_is_wrong_at_the_start_is_said_without_a_traceback(tmp_path: Path) -> None:
    listen = f"unix://{tmp_path}/none/socket"
    found = subprocess.run(
        [*SERVE[:-1], listen], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert found.returncode == 1
    assert "mkdir -p" in found.stderr and "Traceback" not in found.stderr
