"""Compiling the entries, or loading them from numba's cache.

Half of the code is behind functions that are called by their address (see `lanes.ByAddress`), so another
process can compile it into the cache meanwhile, where there is a processor for it: numba compiles one thing
at a time in one process. What comes of it is taken from the cache; if nothing does, it is compiled here.
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

#: Is told of each function of ours that was compiled: how many are done, how many there are, its name.
Progress: TypeAlias = Callable[[int, int, str], None]

#: How long the other process is waited for when this one is done. Both take about as long.
WAIT_SECONDS = 120.0
#: Another process that compiles takes 400 MB: a small machine had better not.
LEAST_MEMORY_BYTES = 2 * 2**30
_APART = "from heliograph_backends.cpu.kernels import compiling; compiling.compile_apart()"


def compile_entries(folder: Path | None, progress: Progress | None) -> tuple[Any, int]:
    """Compile or load the entries; their module, and how many functions were compiled. `folder`: of numba's
    cache, None for no cache.
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
    """Compile what is called by its address into the folder that the command line names, and print the name
    of each function that was compiled: what the process does that `meanwhile` starts.
    """
    with _kernels_in(Path(sys.argv[1])) as (runner, names):
        seen = Seen(names, lambda _done, _all, name: print(name, flush=True))
        with _listening(seen):
            for function in runner.BY_ADDRESS:
                function.compile()


@contextmanager
def _kernels_in(folder: Path | None) -> Iterator[tuple[Any, Set[str]]]:
    """The module of the entries, and the names of all functions of ours, imported with numba's cache folder
    set while their decorators look at it; it stays set until the end.
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
    """The functions of ours that were compiled, here or there; numba's own do not count."""

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
    """Has numba tell what it compiles."""
    event: Any = importlib.import_module("numba.core.event")
    listener: Any = event.Listener

    class Watch(listener):  # type: ignore[misc]
        def on_start(self, found: Any) -> None:
            """Nothing is known yet."""

        def on_end(self, found: Any) -> None:
            seen.add(found.data["dispatcher"].py_func.__name__)

    return event.install_listener("numba:compile", Watch())


def why_not_apart(folder: Path | None, names: Set[str]) -> str:
    """Why no other process compiles anything; empty if it does. `names`: of what it would compile."""
    if folder is None:
        return "nothing is kept on disk"
    if all(any(folder.rglob(f"*.{name}-*.nbi")) for name in names):
        return "it lies in the cache"
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processors < 2:
        return "there is one processor"
    if machine_memory_bytes() < LEAST_MEMORY_BYTES:
        return f"there are less than {LEAST_MEMORY_BYTES:,} bytes of memory"
    if not sys.executable or getattr(sys, "frozen", False):
        return "the program is no Python that takes commands"
    return ""


@contextmanager
def meanwhile(folder: Path | None, runner: Any, seen: Seen) -> Iterator[None]:
    """Has another process compile what is called by its address; waits for it at the end."""
    why_not = why_not_apart(folder, {function.name for function in runner.BY_ADDRESS})
    process = None if why_not else _started(str(folder))
    if process is None:
        logger.debug("this process makes the kernels alone: %s", why_not or "another cannot be started")
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
    """With the packages where this process has them."""
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
        logger.debug("a process that compiles kernels: %s", error)
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
        logger.warning("the other process compiled for %.0f seconds too long; it was ended", WAIT_SECONDS)
        return
    if status:
        logger.debug("the other process that compiled kernels ended with status %s", status)
