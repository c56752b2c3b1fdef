"""The folder of compiled CPU kernels."""

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
from heliograph_backends.cpu.kernels.runtime.native import cache_state, open_cache, source_digest, warmup
from heliograph_backends.cpu.kernels.runtime.objects import MODULES, ObjectFolder

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
code = state.folder and native.ObjectFolder(state.folder, "here").read("serve")
print(json.dumps([str(state.folder), state.read_only, code and code.decode()]))
"""


@pytest.fixture
def filled() -> Iterator[Path]:
    """A folder below which the kernels of these sources lie, and that only root can write to."""
    folder = Path(tempfile.mkdtemp())
    inner = folder / "kernels" / source_digest()
    inner.mkdir(parents=True)
    ObjectFolder(inner, "here").write("serve", b"code")
    for one in (inner, inner.parent):
        one.chmod(0o555)
    folder.chmod(0o755)
    yield folder / "kernels"
    for one in (inner.parent, inner):
        one.chmod(0o755)
    shutil.rmtree(folder)


def _as_a_user(folder: Path) -> Any:
    """Return the findings of a process that is not root."""
    command = [sys.executable, "-c", READ_ONLY, str(folder)]
    done = subprocess.run(command, env=_environment(), check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_folder_that_can_only_be_read_is_read(filled: Path) -> None:
    assert _as_a_user(filled) == [str(filled / source_digest()), True, "code"]


def test_a_folder_that_can_only_be_read_but_others_can_write_to_is_refused(filled: Path) -> None:
    filled.chmod(0o575 if os.getuid() else 0o757)
    assert _as_a_user(filled) == ["None", False, None]


#: A sum of rows, which waits for `rows_block`, in a process whose cache lacks that: what was loaded
#: when the program was bound, whether numba was imported, and the sum's bits.
BOUND = """
import json, logging, sys
import numpy as np
from heliograph_backends.cpu import kernels
from heliograph_backends.cpu.kernels.runtime.native import _native
source = np.random.default_rng(int(sys.argv[1])).standard_normal((3, 100), dtype=np.float32)
target = np.zeros(3, np.float32)
kernels.start()
loaded = sorted(_native._loaded)
made = kernels.ProgramBuilder()
made.sum_rows((3, 100), kernels.Operand(0, 0, (400, 4)), kernels.Operand(1, 0, (4,)))
bound = kernels.BoundProgram(made.build(), [source.ctypes.data, target.ctypes.data])
assert bound.run() is kernels.Status.OK
there = "rows_block" in _native._loaded
print(json.dumps([loaded, there, "numba" in sys.modules, target.tobytes().hex()]))
"""


def _bound(folder: Path, code: str = BOUND) -> Any:
    environment = _environment() | {"HELIOGRAPH_KERNEL_CACHE": str(folder)}
    command = [sys.executable, "-c", code, str(SEED)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    """A cache without one entry that takes a second to compile."""
    held = cache_state().folder or warmup().folder
    assert held is not None
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    shutil.copytree(held, folder / held.name, ignore=shutil.ignore_patterns("rows_block-*"))
    return folder


def test_a_start_waits_for_no_compiler_and_a_program_for_its_own_entries(lacking: Path) -> None:
    loaded, there, numba, bits = _bound(lacking)
    assert loaded == sorted(set(MODULES) - {"rows_block"}) and there and not numba
    again, _, _, same = _bound(lacking)
    assert set(again) == set(MODULES) and same == bits


#: A compiler that has all object code already, in the folder of `$HELD`.
COPIER = """
from heliograph_backends.cpu.kernels.runtime import compiling
compiling._COMPILER = '''
import os, sys
from pathlib import Path
from heliograph_backends.cpu.kernels.runtime.objects import ObjectFolder, machine_digest
held, folder = (ObjectFolder(Path(path), machine_digest()) for path in (os.environ["HELD"], sys.argv[1]))
for line in sys.stdin:
    folder.write(line.strip(), held.read(line.strip()))
    print(line.strip(), flush=True)
'''
"""


def test_where_nothing_can_be_kept_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, file = cache_state().folder or warmup().folder, tmp_path / "file"
    assert held is not None
    file.touch()
    monkeypatch.setenv("HELD", str(held))
    loaded, there, numba, bits = _bound(file, COPIER + BOUND)
    assert loaded == [] and there and not numba
    assert _bound(held.parent)[-1] == bits
