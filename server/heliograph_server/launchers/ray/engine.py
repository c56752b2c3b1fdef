"""The interface of the engine: an agent, a process that is killed if it takes too long, does each
task."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any

from heliograph_proto.errors import (
    ConfigurationError,
    DeadlineExceededError,
    HeliographError,
    UnavailableError,
    class_for,
)
from heliograph_server.launchers import child_process
from heliograph_server.launchers.ray.address import AUTO, endpoint
from heliograph_server.launchers.specification import (
    PoolSpecification,
    PoolStatus,
    check_name,
    pool_from_json,
)

AGENT = "heliograph_server.launchers.ray.agent"
#: The time beside that of a task itself: importing Ray, joining the cluster, and removing an
#: incomplete pool.
MARGIN_SECONDS = 60.0
#: The timeout for the end of a killed agent.
END_SECONDS = 5.0
#: The end of an agent's output that is searched for its last line.
LAST_BYTES = 2000

Progress = Callable[[str], None]


def ignore(text: str) -> None:
    """Ignore the progress."""


class RayEngine:
    """Pools on one Ray cluster. Methods block for a bounded time, and raise only errors of
    Heliograph.

    `address` is `auto`, `HOST:PORT` or `ray://HOST:PORT`. Raises InvalidArgumentError, and
    ConfigurationError if Ray is not installed.
    """

    def __init__(self, address: str = AUTO) -> None:
        endpoint(address)
        check_installed()
        self.address = address

    def up(
        self, specification: PoolSpecification, *, seconds: float = 120.0, progress: Progress = ignore
    ) -> PoolStatus:
        """Create the pool, or its missing parts, and wait until all members serve.

        Raises ConfigurationError: another pool of this name is up, or too few nodes have room;
        ComputeFailedError: a daemon does not start; DeadlineExceededError; UnavailableError: no
        cluster. A pool that this call created is then removed again.
        """
        found = self._done("up", seconds, progress, specification=asdict(specification))
        return pool_from_json(found)

    def status(self, name: str, *, seconds: float = 30.0) -> PoolStatus:
        """Return the status of a pool. Raises ConfigurationError if there is none,
        UnavailableError."""
        check_name(name)
        return pool_from_json(self._done("status", seconds, ignore, name=name))

    def down(self, name: str, *, seconds: float = 40.0, progress: Progress = ignore) -> tuple[int, int]:
        """Remove a pool. Running work may continue for `seconds`, then its daemons are killed.

        Returns the number of members and how many of them were killed: 0 and 0 if there is no such
        pool. Raises UnavailableError, DeadlineExceededError.
        """
        check_name(name)
        found = self._done("down", seconds, progress, name=name)
        return found["members"], found["killed"]

    def _done(self, what: str, seconds: float, progress: Progress, **task: Any) -> Any:
        task |= {"do": what, "address": self.address, "seconds": seconds}
        with tempfile.TemporaryFile() as errors:
            process = start_agent(task, errors)
            # A timer kills a silent agent, which ends the reading below.
            late = threading.Event()
            timer = threading.Timer(seconds + MARGIN_SECONDS, _end, (process, late))
            timer.start()
            try:
                return _result(process, progress, late, errors)
            finally:
                timer.cancel()
                process.kill()
                process.wait(END_SECONDS)
                timer.join()


def check_installed() -> None:
    """Raise ConfigurationError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("the package 'ray' is not installed", advice="pip install 'heliograph[ray]'")


def start_agent(task: Mapping[str, Any], errors: IO[bytes] | int) -> subprocess.Popen[str]:
    """Start an agent, which is killed when the thread that calls this ends."""
    return subprocess.Popen(
        child_process.command(AGENT, [json.dumps(task)]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def _end(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


def _result(
    process: subprocess.Popen[str], progress: Progress, late: threading.Event, errors: IO[bytes]
) -> Any:
    """Read the result of an agent. Raises its error."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            found = json.loads(line)
            if "result" in found:
                return found["result"]
            if "error" in found:
                raise error_of(found["error"])
            progress(found["progress"])
    if late.is_set():
        raise DeadlineExceededError(
            "the Ray cluster did not answer in time",
            advice="check it with `ray status`, or raise --timeout",
        )
    raise UnavailableError(
        f"the agent for Ray ended with {process.wait(END_SECONDS)}: {last_line(errors)}",
        advice="Ray ends processes that lose their cluster: check that it runs, `ray status`",
    )


def error_of(found: Mapping[str, Any]) -> HeliographError:
    """The error in an agent's output."""
    return class_for(found["reason"])(found["message"], advice=found["advice"])


def last_line(errors: IO[bytes]) -> str:
    """The last line of a process's output."""
    size = errors.seek(0, 2)
    errors.seek(max(0, size - LAST_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it has no output"
