"""Where compiled CPU kernels are kept."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heliograph_backends.cpu.kernels import Refusal, available
from heliograph_backends.cpu.kernels.runtime.native import open_cache, source_digest

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


READ_ONLY = """
import json, os, sys
from pathlib import Path
from heliograph_backends.cpu.kernels.runtime import native
# Of files that others may not be able to read.
digest = native.source_digest()
native.source_digest = lambda: digest
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
state = native.open_cache(Path(sys.argv[1]))
with native._writable(state) as place:
    held = sorted(one.name for one in place.iterdir()) if place else None
    alone = place is not None and place != state.folder and os.access(place, os.W_OK)
print(json.dumps([str(state.folder), state.read_only, held, alone, bool(place and place.exists())]))
"""


@pytest.fixture
def filled() -> Iterator[Path]:
    """A folder below which the kernels of these sources lie, and that nobody but root can write to."""
    folder = Path(tempfile.mkdtemp())
    inner = folder / "kernels" / source_digest()
    inner.mkdir(parents=True)
    (inner / "a kernel").touch()
    for one in (inner, inner.parent):
        one.chmod(0o555)
    folder.chmod(0o755)
    yield folder / "kernels"
    for one in (inner.parent, inner):
        one.chmod(0o755)
    shutil.rmtree(folder)


def _as_a_user(folder: Path) -> Any:
    """What a process that is not root finds."""
    command = [sys.executable, "-c", READ_ONLY, str(folder)]
    done = subprocess.run(command, env=_environment(), check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_folder_that_can_only_be_read_is_read_by_way_of_a_copy_which_goes(filled: Path) -> None:
    found, read_only, held, alone, left = _as_a_user(filled)
    assert (found, read_only) == (str(filled / source_digest()), True)
    assert held == ["a kernel"] and alone and not left


def test_a_folder_that_can_only_be_read_but_others_can_write_to_is_refused(filled: Path) -> None:
    filled.chmod(0o575 if os.getuid() else 0o757)
    found, read_only, *_ = _as_a_user(filled)
    assert (found, read_only) == ("None", False)
