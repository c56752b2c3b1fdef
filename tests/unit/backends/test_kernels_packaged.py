"""The compiled kernels that a distribution contains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heliograph_backends.cpu.kernels import available, cache_state, find_cache, warmup
from heliograph_backends.cpu.kernels.runtime import levels, shipping
from heliograph_backends.cpu.kernels.runtime.levels import LEVELS, level_of_machine, packaged_objects
from heliograph_backends.cpu.kernels.runtime.native import source_digest
from heliograph_backends.cpu.kernels.runtime.objects import MODULES, ObjectFolder, machine_digest

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

#: A sum of rows in a process whose distribution has the objects in a folder: the sum, and where the
#: kernels came from.
SUM = """
import json, sys
from pathlib import Path
import numpy as np
from heliograph_backends.cpu import kernels
from heliograph_backends.cpu.kernels.runtime import levels
levels.PACKAGED = Path(sys.argv[1])
source, target = np.arange(300, dtype=np.float32).reshape(3, 100), np.zeros(3, np.float32)
made = kernels.ProgramBuilder()
made.sum_rows((3, 100), kernels.Operand(0, 0, (400, 4)), kernels.Operand(1, 0, (4,)))
bound = kernels.BoundProgram(made.build(), [source.ctypes.data, target.ctypes.data])
assert bound.run() is kernels.Status.OK
state = kernels.cache_state()
print(json.dumps([target.tolist(), state.compiled, str(state.folder), "numba" in sys.modules]))
"""
SUMS = [4950.0, 14950.0, 24950.0]


def summed(packaged: Path, cache: Path, **settings: str) -> Any:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SUM, str(packaged)],
        env={**os.environ, **paths, "HELIOGRAPH_KERNEL_CACHE": str(cache), **settings},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def own() -> Path:
    """The cache of this machine, which has all kernels."""
    held = cache_state().folder or warmup().folder
    assert held is not None
    return held.parent


@pytest.fixture
def packaged(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """The objects of a distribution, which are this machine's own."""
    level = level_of_machine()
    if level is None:
        pytest.skip("this machine is of no level")
    folder = tmp_path / "objects"
    (folder / source_digest()).mkdir(parents=True)
    made = ObjectFolder(folder / source_digest(), level.machine, packaged=True)
    kept = ObjectFolder(own / source_digest(), machine_digest())
    for entry in MODULES:
        code = kept.read(entry)
        assert code is not None
        made.write(entry, code)
    monkeypatch.setattr(levels, "PACKAGED", folder)
    return made


def test_a_process_with_packaged_kernels_compiles_nothing_and_writes_nothing(
    packaged: ObjectFolder, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert summed(packaged.path.parent, cache) == [SUMS, 0, str(packaged.path), False]
    assert not cache.exists()


def test_packaged_kernels_may_be_writable_as_the_package_is(packaged: ObjectFolder) -> None:
    for entry in MODULES:
        packaged.file(entry).chmod(0o664)
    assert packaged_objects(source_digest()) == packaged


def test_kernels_of_other_sources_are_not_used(packaged: ObjectFolder, own: Path) -> None:
    packaged.path.rename(packaged.path.with_name("0" * 16))
    assert summed(packaged.path.parent, own) == [SUMS, 0, str(own / source_digest()), False]


def _lost(file: Path) -> None:
    file.unlink()


def _changed(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])


@pytest.mark.parametrize("spoil", [_lost, _changed])
def test_a_set_that_is_not_whole_is_not_used(
    spoil: Callable[[Path], None], packaged: ObjectFolder, own: Path
) -> None:
    spoil(packaged.file("rows_block"))
    assert summed(packaged.path.parent, own) == [SUMS, 0, str(own / source_digest()), False]


@pytest.mark.parametrize("setting", levels.TARGET_SETTINGS)
def test_a_processor_that_numba_is_told_goes_before_packaged_kernels(
    setting: str, packaged: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cache().packaged == packaged
    monkeypatch.setenv(setting, "generic")
    assert find_cache().packaged is None


def _with(features: str) -> dict[str, bool]:
    return {name[1:]: name[0] == "+" for name in features.split(",")}


def test_a_machine_gets_the_best_level_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in levels.TARGET_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    best, second, arm = LEVELS

    def level_of(triple: str, features: dict[str, bool]) -> object:
        monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: triple)
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
        return level_of_machine()

    whole = _with(best.features)
    assert level_of("x86_64-unknown-linux-gnu", whole) is best
    assert level_of("x86_64-alpine-linux-musl", whole | {"avx512vl": False}) is second
    assert level_of("x86_64-unknown-linux-gnu", whole | {"avx2": False}) is None
    assert level_of("aarch64-unknown-linux-gnu", _with(arm.features)) is arm
    monkeypatch.setattr(sys, "platform", "darwin")
    assert level_of("x86_64-apple-darwin", whole) is None


def test_files_of_a_level_with_other_settings_have_other_names() -> None:
    first = LEVELS[0]
    again = levels.Level(first.name, first.triple, first.processor, first.features + ",+avx512vnni")
    assert again.machine != first.machine and again.machine.startswith(f"{first.name}-")


def test_shipping_compiles_what_a_folder_lacks_and_removes_other_sources(
    packaged: ObjectFolder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packaged.path.parent
    (folder / "stale").mkdir()
    level = level_of_machine()
    assert level is not None
    # The one that compiles fastest.
    packaged.file("open_program").unlink()
    monkeypatch.setattr(sys, "argv", ["shipping", "--folder", str(folder), level.name])
    shipping.main()
    assert packaged.missing() == [] and [one.name for one in folder.iterdir()] == [source_digest()]
    assert summed(folder, folder / "cache")[:2] == [SUMS, 0]


def test_an_unknown_level_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shipping", "x86-64-v9"])
    with pytest.raises(SystemExit):
        shipping.main()
    assert "no such level: x86-64-v9" in capsys.readouterr().err
