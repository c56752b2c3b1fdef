"""The kernels' modules as libraries of this host."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from heliograph_backends.cuda.sources import MODULES, module_of, text_of

_FOLDER = Path(__file__).parent
_HEADER = _FOLDER / "device.hpp"
_OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC")


def why_not() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    if shutil.which("g++") is None:
        return "there is no g++ to compile the kernels for this host with"
    return "" if platform.machine() == "x86_64" else "_Float16 and fibres are tried on x86-64 alone"


@cache
def compiled() -> dict[str, ctypes.CDLL]:
    """A library for each module, from a folder that only this user writes, made anew when a source
    changes."""
    texts = {name: f'#include "{_HEADER}"\n{text_of(name)}' for name in MODULES}
    headers = (path.read_text() for path in sorted(_FOLDER.glob("*.hpp")))
    key = hashlib.sha256("".join((*headers, *texts.values())).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"heliograph-cuda-emulation-{os.getuid()}", key)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {name: _library(folder, name, text) for name, text in texts.items()}


def _library(folder: Path, name: str, text: str) -> ctypes.CDLL:
    path = folder / f"{name}.so"
    if not path.exists():
        source = folder / f"{name}-{os.getpid()}.cpp"
        source.write_text(text)
        made = source.with_suffix(".so")
        subprocess.run(["g++", *_OPTIONS, source, "-o", made], check=True, timeout=300)
        made.rename(path)
        source.unlink()
    return ctypes.CDLL(str(path))


def kernel(name: str) -> ctypes._CFuncPtr:
    """A kernel's entry: (parameters, grid, block, shared bytes) -> 0, or what was wrong."""
    function = compiled()[module_of()[name]][name]
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint]
    return function


def parameter_bytes(name: str) -> int:
    """What a kernel takes its parameters to be."""
    return int(getattr(compiled()[module_of()[name]], f"{name}_size")())
