"""The kernels' modules as libraries of this host."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from paths import kept_folder

from heliograph_backends.cuda.driver.sources import MODULES, module_of, text_of, text_of_chain

#: One launch at a time: the fibres are the process's.
LAUNCHING = threading.Lock()
_HEADERS = Path(__file__).parent
_OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC")
_SHARED = ("-shared",)


def why_not() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    if shutil.which("g++") is None:
        return "there is no g++ to compile the kernels for this host with"
    return "" if platform.machine() == "x86_64" else "_Float16 and fibres are tried on x86-64 alone"


@cache
def compiled(module: str) -> ctypes.CDLL:
    """The library of a module."""
    return library_of(text_of(module), module)


def compile_all() -> None:
    """Every module, before what waits for one has a deadline."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compiled, MODULES))


def compiled_chain(source: str) -> ctypes.CDLL:
    """The library of a chain's own module."""
    return library_of(text_of_chain(source))


def library_of(text: str, name: str = "chain") -> ctypes.CDLL:
    """The library of a module's whole source, from a folder that only this user writes, made anew when a
    source changes."""
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = _folder() / f"{name}-{key}.so"
    if not path.exists():
        with _alone(path.stem):
            _compile(text, path)
    return ctypes.CDLL(str(path))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """While no other process compiles the same."""
    with (_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(text: str, path: Path) -> None:
    if path.exists():
        # Another process was first.
        return
    made = path.with_name(f"{path.stem}-{os.getpid()}-{threading.get_ident()}")
    source = made.with_suffix(".cpp")
    source.write_text(text)
    command = ["g++", *_OPTIONS, *_SHARED, "-include", _header(), source, "-o", made]
    subprocess.run(command, check=True, timeout=300)
    made.rename(path)
    source.unlink()


@cache
def _folder() -> Path:
    """Of these headers, whichever checkout they are of."""
    texts = (path.read_text() for path in sorted(_HEADERS.glob("*.hpp")))
    key = hashlib.sha256("".join(texts).encode()).hexdigest()[:16]
    return kept_folder(f"cuda-emulation-{key}")


@cache
def _header() -> Path:
    """A copy of the device's, beside what g++ made of it: a small module then takes a fifth of the time."""
    header, ready = _folder() / "device.hpp", _folder() / "device.hpp.gch"
    with _alone("device"):
        if not ready.exists():
            for path in _HEADERS.glob("*.hpp"):
                shutil.copy(path, _folder())
            made = ready.with_suffix(".made")
            command = ["g++", *_OPTIONS, "-x", "c++-header", header, "-o", made]
            subprocess.run(command, check=True, timeout=300)
            made.rename(ready)
    return header


def entry(name: str) -> ctypes._CFuncPtr:
    """A kernel's entry: (parameters, grid, block, shared bytes) -> 0, or what was wrong."""
    function = compiled(module_of()[name])[name]
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint]
    return function


def parameter_bytes(name: str) -> int:
    """What a kernel takes its parameters to be."""
    return int(getattr(compiled(module_of()[name]), f"{name}_size")())
