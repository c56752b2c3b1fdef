"""Compiles the entries, or loads them from numba's cache.

Half of the code is in functions that are called by their address (see `lanes.ByAddress`). numba
compiles one function at a time in a process, so a second process compiles these into the cache at
the same time, if there is a processor for it. This process then loads them from the cache, or
compiles them if that failed.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from heliograph_backends.host_memory.buffers import machine_memory_bytes

logger = logging.getLogger(__name__)

#: Called for each of our functions that was compiled, with the number done, the number of all, its
#: name.
Progress: TypeAlias = Callable[[int, int, str], None]

#: The most seconds to wait for the other process when this one is done. Both take about as long.
WAIT_SECONDS = 120.0
#: The least memory of the machine for a second process, which takes 400 MB.
LEAST_MEMORY_BYTES = 2 * 2**30
_APART = "from heliograph_backends.cpu.kernels.runtime import compiling; compiling.compile_apart()"


def compile_entries(folder: Path | None, progress: Progress | None) -> tuple[Any, int]:
    """Compile or load the entries; return their module and the number of compiled functions.

    `folder` is that of numba's cache, None for no cache.
    """
    with _kernels_in(folder) as (runner, names):
        seen = Seen(names, progress)
        with _listening(seen):
            with meanwhile(folder, runner, seen):
                for entry, arguments in runner.ENTRIES.items():
                    entry.compile(arguments)
            for function in runner.BY_ADDRESS:
                function.compile()
    return runner, len(seen.names)


def compile_apart() -> None:
    """Compile the functions called by their address into the folder in `sys.argv` and print the
    name of each.

    This is the work of the process that `meanwhile` starts.
    """
    with _kernels_in(Path(sys.argv[1])) as (runner, names):
        seen = Seen(names, lambda _done, _all, name: print(name, flush=True))
        with _listening(seen):
            for function in runner.BY_ADDRESS:
                function.compile()


@contextmanager
def _kernels_in(folder: Path | None) -> Iterator[tuple[Any, Set[str]]]:
    """Import the module of the entries, and yield it with the names of all our functions.

    numba's cache folder is set during the import, when decorators read it, and until the end of the
    block.
    """
    config: Any = importlib.import_module("numba.core.config")
    before = config.CACHE_DIR
    config.CACHE_DIR = "" if folder is None else str(folder)
    try:
        lanes = importlib.import_module("heliograph_backends.cpu.kernels.vector.lanes")
        lanes.use_disk_cache(folder is not None)
        yield importlib.import_module("heliograph_backends.cpu.kernels.runtime.runner"), lanes.compiled_names
    finally:
        config.CACHE_DIR = before


class Seen:
    """Our functions that were compiled, in either process; numba's own do not count."""

    def __init__(self, ours: Set[str], progress: Progress | None) -> None:
        self.names: set[str] = set()
        self._ours, self._progress = ours, progress
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        with self._lock:
            if name not in self._ours or name in self.names:
                return
            self.names.add(name)
            if self._progress is not None:
                self._progress(len(self.names), len(self._ours), name)


def _listening(seen: Seen) -> Any:
    """Install a listener for the functions that numba compiles."""
    event: Any = importlib.import_module("numba.core.event")
    listener: Any = event.Listener

    class Watch(listener):  # type: ignore[misc]
        def on_start(self, found: Any) -> None:
            """Do nothing; required by numba."""

        def on_end(self, found: Any) -> None:
            seen.add(found.data["dispatcher"].py_func.__name__)

    return event.install_listener("numba:compile", Watch())


def why_not_apart(folder: Path | None, names: Set[str]) -> str:
    """Return the reason for not using a second process, or an empty text. `names`: its
    functions."""
    if folder is None:
        return "nothing is kept on disk"
    if all(any(folder.rglob(f"*.{name}-*.nbi")) for name in names):
        return "the cache has it"
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processors < 2:
        return "there is only one processor"
    if machine_memory_bytes() < LEAST_MEMORY_BYTES:
        return f"the machine has less than {LEAST_MEMORY_BYTES:,} bytes of memory"
    if not sys.executable or getattr(sys, "frozen", False):
        return "the program is not a Python interpreter that takes commands"
    return ""


@contextmanager
def meanwhile(folder: Path | None, runner: Any, seen: Seen) -> Iterator[None]:
    """Compile the functions called by their address in another process; wait for it at the end."""
    why_not = why_not_apart(folder, {function.name for function in runner.BY_ADDRESS})
    process = None if why_not else _started(str(folder))
    if process is None:
        logger.debug("this process compiles the kernels alone: %s", why_not or "another cannot be started")
        yield
        return
    reader = threading.Thread(target=_read, args=(process, seen), name="heliograph-compiling", daemon=True)
    reader.start()
    try:
        yield
        _wait(process)
    finally:
        process.kill()
        process.wait()
        reader.join()


def _started(folder: str) -> subprocess.Popen[str] | None:
    """Start the process, with this process's import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _APART, folder],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        logger.debug("starting a process that compiles kernels failed: %s", error)
        return None


def _read(process: subprocess.Popen[str], seen: Seen) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            seen.add(line.strip())


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        status = process.wait(WAIT_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("the process that compiles kernels took over %.0f seconds; it was ended", WAIT_SECONDS)
        return
    if status:
        logger.debug("the process that compiles kernels ended with status %s", status)
