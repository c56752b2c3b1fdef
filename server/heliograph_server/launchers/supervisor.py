"""A daemon as a supervised child: started again whenever it ends, and never left behind."""

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

#: Between the end of a daemon and the next start: the first, and the longest after it kept failing.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
#: Who served this long did not fail to start: the next pause is the first one again.
STEADY_SECONDS = 10.0
#: After SIGKILL.
KILL_SECONDS = 5.0
#: What is kept of a daemon's last words.
LAST_LINES = 5
LONGEST_LINE = 500


class SupervisorPhase(StrEnum):
    """Where a daemon is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    #: It ended by itself, and is about to be started again.
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SupervisedDaemon:
    """A daemon, as its supervisor knows it."""

    phase: SupervisorPhase = SupervisorPhase.STARTING
    #: Where it listens; empty unless it serves.
    url: str = ""
    #: Of its process; 0 while there is none.
    pid: int = 0
    #: How many were started, this one included.
    starts: int = 0
    #: How the last one ended, and its last words; empty if none has.
    why: str = ""


class Supervisor:
    """Runs `heliograph serve` as a child, in a thread of its own, until it is stopped.

    The child is killed by the kernel when this process ends, however it does. `on_change` is called, from
    that thread, whenever `child` is another.
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
        # A daemon: it never keeps the process, with whose end the child ends.
        self._thread = threading.Thread(target=self._run, name="heliograph-supervisor", daemon=True)
        self._thread.start()

    @property
    def child(self) -> SupervisedDaemon:
        """What is known now."""
        return self._child

    def stop(self, seconds: float) -> bool:
        """Ends the child for good: SIGTERM, and SIGKILL after so many seconds. Whether it ended by itself."""
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
                why = self._watched(process)
            except (OSError, RuntimeError) as error:
                # No process, descriptor or thread is left for now: without this one nobody would try again.
                why = f"it could not be started: {error}"
                self._discard()
            failures = 0 if time.monotonic() - begun >= STEADY_SECONDS else failures + 1
            if self._stopping.is_set():
                break
            self._tell(phase=SupervisorPhase.RESTARTING, url="", pid=0, why=why)
            self._stopping.wait(pause_seconds(failures))
        self._tell(phase=SupervisorPhase.STOPPED, url="", pid=0)

    def _started(self) -> subprocess.Popen[str] | None:
        """A new child; None if there is to be none any more."""
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
        self._tell(phase=SupervisorPhase.STARTING, url="", pid=process.pid, starts=self._child.starts + 1)
        return process

    def _discard(self) -> None:
        """Ends a child that nobody can follow."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _watched(self, process: subprocess.Popen[str]) -> str:
        """Follows a child to its end; what became of it."""
        assert process.stdout is not None and process.stderr is not None
        last: deque[str] = deque(maxlen=LAST_LINES)
        reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
        reader.start()
        with process:
            for line in process.stdout:
                if line.startswith("listening on "):
                    self._tell(phase=SupervisorPhase.SERVING, url=line.removeprefix("listening on ").strip())
            status = process.wait()
            reader.join(KILL_SECONDS)
        with self._lock:
            self._process = None
        return f"{ending(status)}: {' / '.join(last)}" if last else ending(status)

    def _tell(self, **changes: object) -> None:
        self._child = replace(self._child, **changes)  # type: ignore[arg-type]
        self._on_change(self._child)


def pause_seconds(failures: int) -> float:
    """How long to wait before the next start, after so many daemons in a row that did not last."""
    doublings = min(max(0, failures - 1), 10)
    return float(min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS))


def ending(status: int) -> str:
    """What a process' exit status says, for people."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def _pass_on(stream: IO[str], last: deque[str]) -> None:
    """What a daemon says goes where its supervisor's words go, and its last lines are kept."""
    for line in stream:
        sys.stderr.write(line)
        if text := line.strip():
            last.append(text[:LONGEST_LINE])
