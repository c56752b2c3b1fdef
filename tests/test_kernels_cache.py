"""Where compiled CPU kernels are kept."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from heliograph_backends.cpu.kernels import (
    Refusal,
    available,
)
from heliograph_backends.cpu.kernels.native import open_cache

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

SEED = 20240521


def test_the_package_imports_no_numba() -> None:
    code = (
        "import sys, heliograph_backends.cpu.kernels as k;"
        "k.ProgramBuilder().build(); sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=_environment(), check=False).returncode == 0


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_missing_cache_folder_is_made_private(tmp_path: Path) -> None:
    state = open_cache(tmp_path / "deep" / "kernels")
    assert state.refusal is None and state.folder is not None
    assert stat.S_IMODE(state.folder.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert open_cache(shared).refusal is Refusal.WRITABLE_BY_OTHERS


def test_a_folder_below_one_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared" / "ours").mkdir(parents=True, mode=0o700)
    (tmp_path / "shared").chmod(0o777)
    assert open_cache(tmp_path / "shared" / "ours").refusal is Refusal.UNSAFE_PARENT


def test_what_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    assert open_cache(file).refusal is Refusal.NOT_A_DIRECTORY
    assert open_cache(link).refusal is Refusal.NOT_A_DIRECTORY
