"""A daemon as a supervised child: restarted whenever it ends, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import IO

from heliograph_server.launchers import child_process

#: The pause between the end of a daemon and the next start: the first one, and the longest after
#: repeated failures.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
#: The uptime after which the next pause is the first one again.
STEADY_SECONDS = 10.0
#: The timeout after SIGKILL.
KILL_SECONDS = 5.0
#: The lines of a daemon's log that are kept for its status.
LAST_LINES = 5
LONGEST_LINE = 500


class SupervisorPhase(StrEnum):
    """The phase of a supervised daemon."""

    STARTING = "starting"
    SERVING = "serving"
    #: It ended by itself, and is about to be restarted.
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SupervisedDaemon:
    """The status of a daemon, as its supervisor knows it."""

    phase: SupervisorPhase = SupervisorPhase.STARTING
    #: Its address; empty unless it serves.
    url: str = ""
    #: The id of its process; 0 without one.
    pid: int = 0
    #: The number of daemons started so far, with this one.
    starts: int = 0
    #: How the last one ended, and its last lines; empty if none has ended.
    why: str = ""


class Supervisor:
    """Runs `heliograph serve` as a child, from a thread of its own, until it is stopped.

    The kernel kills the child when this process ends in any way. `on_change` is called on that
    thread whenever `child` changes.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        on_change: Callable[[SupervisedDaemon], None] = lambda child: None,
    ) -> None:
        self._arguments = tuple(arguments)
        self._environment = dict(os.environ if environment is None else environment)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._child = SupervisedDaemon()
        # A daemon thread: it does not keep the process alive, and the child ends with the process.
        self._thread = threading.Thread(target=self._run, name="heliograph-supervisor", daemon=True)
        self._thread.start()

    @property
    def child(self) -> SupervisedDaemon:
        """The current status."""
        return self._child

    def stop(self, seconds: float) -> bool:
        """Stop the child for good: SIGTERM, and SIGKILL after `seconds`. True if it ended before
        that."""
        with self._lock:
            self._stopping.set()
            process = self._process
            if process is not None:
                process.send_signal(signal.SIGTERM)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return True
        if process is not None:
            process.kill()
        self._thread.join(KILL_SECONDS)
        return False

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                if (process := self._started()) is None:
                    break
                why = self._follow(process)
            except (OSError, RuntimeError) as error:
                # Processes, descriptors or threads have run out for now; the loop tries again.
                why = f"it could not be started: {error}"
                self._discard()
            failures = 0 if time.monotonic() - begun >= STEADY_SECONDS else failures + 1
            if self._stopping.is_set():
                break
            self._change(phase=SupervisorPhase.RESTARTING, url="", pid=0, why=why)
            self._stopping.wait(pause_seconds(failures))
        self._change(phase=SupervisorPhase.STOPPED, url="", pid=0)

    def _started(self) -> subprocess.Popen[str] | None:
        """Start a new child, or return None if the supervisor is stopping."""
        command = child_process.command("heliograph.cli", ["serve", *self._arguments])
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        self._change(phase=SupervisorPhase.STARTING, url="", pid=process.pid, starts=self._child.starts + 1)
        return process

    def _discard(self) -> None:
        """Kill a child that cannot be followed."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _follow(self, process: subprocess.Popen[str]) -> str:
        """Follow a child to its end, and return how it ended."""
        assert process.stdout is not None and process.stderr is not None
        last: deque[str] = deque(maxlen=LAST_LINES)
        reader = threading.Thread(target=_forward, args=(process.stderr, last), daemon=True)
        reader.start()
        with process:
            for line in process.stdout:
                if line.startswith("listening on "):
                    self._change(
                        phase=SupervisorPhase.SERVING, url=line.removeprefix("listening on ").strip()
                    )
            status = process.wait()
            reader.join(KILL_SECONDS)
        with self._lock:
            self._process = None
        return f"{ending(status)}: {' / '.join(last)}" if last else ending(status)

    def _change(self, **changes: object) -> None:
        self._child = replace(self._child, **changes)  # type: ignore[arg-type]
        self._on_change(self._child)


def pause_seconds(failures: int) -> float:
    """The pause before the next start, after this number of short-lived daemons in a row."""
    doublings = min(max(0, failures - 1), 10)
    return float(min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS))


def ending(status: int) -> str:
    """The exit status of a process, for people."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def _forward(stream: IO[str], last: deque[str]) -> None:
    """Copy a daemon's log to stderr, and keep its last lines."""
    for line in stream:
        sys.stderr.write(line)
        if text := line.strip():
            last.append(text[:LONGEST_LINE])
