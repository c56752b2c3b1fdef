"""Compiles entries in processes of their own, which keep the object code in a folder.

A compiler takes one entry at a time from a line of its input. So entries that a program waits for
go first, several processors are used, and this process needs no compiler. Only where no process can
be started, or all failed, this process compiles by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from heliograph_backends.cpu.kernels.runtime.objects import ObjectFolder
from heliograph_backends.host_memory.buffers import machine_memory_bytes

logger = logging.getLogger(__name__)

#: The most seconds that a process may take for one entry.
ENTRY_SECONDS = 120.0
#: The memory of a process that compiles.
PROCESS_BYTES = 2**29
_COMPILER = "from heliograph_backends.cpu.kernels.runtime import emitting; emitting.main()"


def why_no_process(folder: ObjectFolder | None) -> str:
    """Return the reason for compiling in this process, or an empty text."""
    if folder is None:
        return "no folder can be written to"
    if not sys.executable or getattr(sys, "frozen", False):
        return "the program is not a Python interpreter that takes commands"
    return ""


def process_count(entries: int) -> int:
    """Return the number of processes that compile so many entries."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(entries, processors, machine_memory_bytes() // (2 * PROCESS_BYTES)))


class Compiling:
    """The compiling of some entries into a folder; `run` blocks, the rest is for any thread."""

    def __init__(
        self, folder: ObjectFolder | None, entries: Iterable[str], done: Callable[[str, bytes], None]
    ) -> None:
        self._folder = folder
        self._done = done
        self._lock = threading.Lock()
        self._entries = list(entries)
        self._processes: list[subprocess.Popen[str]] = []
        self._stopped = False
        #: The error that ended a thread.
        self._failure: BaseException | None = None
        self._owner = os.getpid()

    def hasten(self, entries: Collection[str]) -> None:
        """Compile these entries before others that have not been begun."""
        with self._lock:
            self._entries.sort(key=lambda entry: entry not in entries)

    def run(self) -> None:
        """Compile all entries. Raises what the compiler raises in this process."""
        why_not = why_no_process(self._folder)
        if why_not:
            logger.debug("this process compiles the kernels: %s", why_not)
        else:
            count = process_count(len(self._entries))
            name = "heliograph-compiling"
            threads = [threading.Thread(target=self._feed, name=name, daemon=True) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
        while (entry := self._next()) is not None:
            emitting = importlib.import_module("heliograph_backends.cpu.kernels.runtime.emitting")
            code = emitting.compile_entry(entry)
            try:
                if self._folder is not None:
                    self._folder.write(entry, code)
            except OSError as error:
                logger.warning("a CPU kernel is not kept on disk: %s", error)
            self._done(entry, code)

    def stop(self) -> None:
        """End the processes; what they have not finished is not compiled. A fork of this process
        leaves them to it."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._stopped = True
            self._entries.clear()
            for process in self._processes:
                process.kill()

    def _next(self) -> str | None:
        with self._lock:
            return self._entries.pop(0) if self._entries else None

    def _feed(self) -> None:
        """Give entries to a process, one after the other."""
        assert self._folder is not None
        process = self._started(self._folder)
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        entry: str | None = None
        try:
            while (entry := self._next()) is not None:
                limit = threading.Timer(ENTRY_SECONDS, process.kill)
                limit.daemon = True
                limit.start()
                with suppress(OSError):
                    process.stdin.write(f"{entry}\n")
                    process.stdin.flush()
                answer = process.stdout.readline().strip()
                limit.cancel()
                code = self._folder.read(entry) if answer == entry else None
                if code is None:
                    break
                self._done(entry, code)
        except BaseException as error:
            self._failure = error
        finally:
            process.kill()
            process.wait()
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        if entry is not None and not self._stopped:
            logger.debug("a process that compiles kernels ended with status %s", process.returncode)
            with self._lock:
                self._entries.insert(0, entry)

    def _started(self, folder: ObjectFolder) -> subprocess.Popen[str] | None:
        """Start a process, with this process's import path."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = subprocess.Popen(
                # Nothing is imported from the current folder, which may be another user's.
                [sys.executable, "-P", "-c", _COMPILER, str(folder.path)],
                env=environment,
                cwd=folder.path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Ctrl-C drains a daemon, whose programs may still wait for entries.
                start_new_session=True,
            )
        except OSError as error:
            logger.debug("starting a process that compiles kernels failed: %s", error)
            return None
        with self._lock:
            self._processes.append(process)
            if self._stopped:
                process.kill()
        return process
