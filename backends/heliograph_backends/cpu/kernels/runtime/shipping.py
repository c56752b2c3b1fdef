"""Compiles the kernels for the levels of processors that a distribution supports.

    python -m heliograph_backends.cpu.kernels.runtime.shipping [--folder FOLDER] [LEVEL ...]

Each level is compiled by a process of its own, all at the same time, for its processor and not for
the one of this machine; so aarch64 is compiled on x86-64 too. `make wheel` puts the folder into the
wheel. The build of the container image fills the folder of the installed package.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heliograph_backends.cpu.kernels.runtime.levels import LEVELS, PACKAGED, Level
from heliograph_backends.cpu.kernels.runtime.native import source_digest
from heliograph_backends.cpu.kernels.runtime.objects import ObjectFolder

_COMPILER = "from heliograph_backends.cpu.kernels.runtime import shipping as it; it.compile_level()"


def fill(folder: Path, levels: Sequence[Level]) -> None:
    """Compile what `folder` lacks of these levels. Raises CalledProcessError."""
    inner = folder / source_digest()
    for old in folder.glob("*"):
        if old != inner:
            shutil.rmtree(old)
    inner.mkdir(parents=True, exist_ok=True)
    folders = [ObjectFolder(inner, level.machine) for level in levels]
    compiling = [
        (objects, _started(inner, level))
        for objects, level in zip(folders, levels, strict=True)
        if objects.missing()
    ]
    for objects, process in compiling:
        status = process.wait()
        if status or objects.missing():
            raise subprocess.CalledProcessError(status, process.args)


def _started(folder: Path, level: Level) -> subprocess.Popen[bytes]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NUMBA_CPU_NAME": level.processor,
        "NUMBA_CPU_FEATURES": level.features,
    }
    command = [sys.executable, "-P", "-c", _COMPILER, str(folder), level.name]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def compile_level() -> None:
    """Compile into the folder for the level in `sys.argv`; in a process of its own."""
    folder, name = sys.argv[1:]
    level = next(one for one in LEVELS if one.name == name)
    _aim(level.triple)
    emitting = importlib.import_module("heliograph_backends.cpu.kernels.runtime.emitting")
    objects = ObjectFolder(Path(folder), level.machine)
    emitting.compile_into(objects, objects.missing())


def _aim(triple: str) -> None:
    """Let numba compile for `triple`. It has settings for the processor and its features, but takes
    the triple of this process."""
    binding: Any = importlib.import_module("llvmlite.binding")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple)
    binding.get_process_triple = lambda: triple
    binding.Target.from_default_triple = classmethod(lambda cls: target)


def main() -> None:
    """Fill the folder for the levels that are named, or for those of this architecture."""
    here = [level.name for level in LEVELS if level.triple.startswith(f"{platform.machine()}-")]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=PACKAGED, help="default: of the installed package")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"default: {', '.join(here)}")
    arguments = parser.parse_args()
    unknown = set(arguments.levels) - {level.name for level in LEVELS}
    if unknown:
        parser.error(f"no such level: {', '.join(sorted(unknown))}")
    fill(arguments.folder, [level for level in LEVELS if level.name in (arguments.levels or here)])


if __name__ == "__main__":
    main()
