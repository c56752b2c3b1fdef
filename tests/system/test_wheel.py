"""The wheel of `make wheel`, in an environment of its own: it compiles no kernel, and its bits are
those of this checkout. `make test-wheel` makes the wheel and names it in $WHEEL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from heliograph_backends.cpu.kernels.runtime.levels import LEVELS, Level, level_of_machine
from heliograph_backends.cpu.kernels.runtime.native import source_digest
from heliograph_backends.cpu.kernels.runtime.objects import MODULES, ObjectFolder, machine_digest

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

OBJECTS = "heliograph_backends/cpu/kernels/objects"
COUNT_BITS = ROOT / "tests" / "support" / "kernel_bits.py"


@pytest.fixture(scope="module")
def wheel() -> Path:
    if not os.environ.get("WHEEL"):
        pytest.skip("$WHEEL names no wheel: run `make test-wheel`")
    return Path(os.environ["WHEEL"]).resolve()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    uv = os.environ.get("UV", "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{wheel}[server]"], check=True)
    return python


def bits(python: Path | str, home: Path, **settings: str) -> Any:
    """Return what an installation computes, with this home."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(python), "-P", str(COUNT_BITS)],
        env={**kept, "HOME": str(home), **settings},
        cwd=home,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def expected() -> Any:
    """The bits of this checkout, whose kernels this machine compiled."""
    return bits(sys.executable, Path.home())["bits"]


def _objects(wheel: Path, folder: Path) -> Path:
    """The objects in the wheel, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{OBJECTS}/")]
        archive.extractall(folder, names)
    return folder / OBJECTS


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_wheel_has_every_kernel_for_each_level(level: Level, wheel: Path, tmp_path: Path) -> None:
    held = _objects(wheel, tmp_path)
    assert [one.name for one in held.iterdir()] == [source_digest()]
    assert ObjectFolder(held / source_digest(), level.machine, packaged=True).missing() == []


def test_an_installed_wheel_compiles_nothing_and_has_the_same_bits(
    python: Path, expected: Any, tmp_path: Path
) -> None:
    if level_of_machine() is None:
        pytest.skip("this machine is of no level")
    home = tmp_path / "home"
    found = bits(python, home)
    assert found["compiled"] == 0 and not found["numba"] and found["folder"].endswith(source_digest())
    assert found["bits"] == expected
    assert list(home.iterdir()) == []


def test_every_level_that_this_machine_runs_has_the_same_bits(
    wheel: Path, expected: Any, tmp_path: Path
) -> None:
    best = level_of_machine()
    if best is None:
        pytest.skip("this machine is of no level")
    held = _objects(wheel, tmp_path)
    same = [one for one in LEVELS[LEVELS.index(best) + 1 :] if one.triple == best.triple]
    for level in same:
        # As if this machine had compiled them.
        cache = tmp_path / level.name
        (cache / source_digest()).mkdir(parents=True, mode=0o700)
        cache.chmod(0o700)
        packaged = ObjectFolder(held / source_digest(), level.machine, packaged=True)
        for entry in MODULES:
            code = packaged.read(entry)
            assert code is not None
            ObjectFolder(cache / source_digest(), machine_digest()).write(entry, code)
        found = bits(sys.executable, tmp_path / "home", HELIOGRAPH_KERNEL_CACHE=str(cache))
        assert found["compiled"] == 0 and found["bits"] == expected, level.name
