"""The process that renders templates, from this side: started at the first use, ended when it takes
too long, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from heliograph.errors import ConfigurationError, LimitExceededError

#: The memory of the process, in bytes of address space.
MEMORY_BYTES = 512 * 2**20
#: The longest text that a template makes, and the longest request, in characters.
MAX_TEXT = 8 * 2**20
MAX_REQUEST = 32 * 2**20
#: The longest reason of a failure, in characters.
MAX_WHY = 500
#: The longest answer, as JSON writes it: six characters for one.
_MAX_ANSWER = 6 * MAX_TEXT + 2**16
_PROGRAM = Path(__file__).with_name("rendering.py")
#: The environment variables that the process has of this one's.
_KEPT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "SYSTEMROOT")
_ADVICE = "give another template: chat_template=..."


class RenderingProcess:
    """One process, which does one request after the other. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        #: The process that started it: after a fork, the child starts its own.
        self._owner = 0
        self._end: weakref.finalize[Any, Any] | None = None

    def ask(self, template: str, variables: dict[str, Any], name: str) -> dict[str, str]:
        """Return the process's answer.

        Raises LimitExceededError where it takes more time or memory than it may, or `variables` are
        too long.
        """
        request = json.dumps({"template": template, "variables": variables, "most_characters": MAX_TEXT})
        if len(request) > MAX_REQUEST:
            raise LimitExceededError(
                f"messages and tools of {len(request):,} characters; at most {MAX_REQUEST:,} are rendered"
            )
        with self._lock:
            is_kept = self._process is not None
            answer, is_late = self._attempt(request)
            if not answer and not is_late and is_kept:
                # The system may have ended a process that was idle.
                answer, is_late = self._attempt(request)
        if answer:
            return answer
        what = f"{self._seconds:g} seconds" if is_late else f"{MEMORY_BYTES >> 20} MiB of memory"
        raise LimitExceededError(f"{name}: the chat template takes more than {what}", advice=_ADVICE)

    def close(self) -> None:
        """End the process. The next request starts another."""
        with self._lock:
            self._stop()

    def _attempt(self, request: str) -> tuple[dict[str, str], bool]:
        """Return the answer, empty if the process ended, and whether it was too late."""
        process = self._running()
        assert process.stdin and process.stdout
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._seconds, end)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline(_MAX_ANSWER)
            answer: dict[str, str] = json.loads(line) if line.endswith("\n") else {}
        except (OSError, ValueError):
            answer = {}
        finally:
            timer.cancel()
            timer.join()
        if is_late.is_set() or not answer:
            self._stop()
        return answer, is_late.is_set()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._stop()
        try:
            # Isolated: nothing of the folder it starts in, or of the user's own packages, comes in.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                env={key: os.environ[key] for key in _KEPT if key in os.environ},
            )
        except OSError as error:
            raise ConfigurationError(f"cannot start a process for chat templates: {error}") from None
        assert process.stdin
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        settings = {
            "path": sys.path,
            "memory_bytes": MEMORY_BYTES,
            "seconds": int(self._seconds) + 1,
            "most_why": MAX_WHY,
        }
        try:
            process.stdin.write(json.dumps(settings) + "\n")
        except OSError:  # it has ended already, and its answer says so
            pass
        return process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()
            self._end = None


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a process of ours, and in a fork of ours close our ends of its pipes alone."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe:
                pipe.close()
        except OSError:  # what was not written goes nowhere
            pass
