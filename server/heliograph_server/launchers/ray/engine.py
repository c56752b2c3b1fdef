"""The engine as others use it: an agent, a process that is killed if it takes too long, does each task."""

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
#: Beside what a task itself may take: importing Ray, joining the cluster, and taking away what was begun.
MARGIN_SECONDS = 60.0
#: An agent that was told to end.
END_SECONDS = 5.0
#: What is told of an agent's last words.
LAST_BYTES = 2000

Progress = Callable[[str], None]


def ignore(text: str) -> None:
    """For who does not want to know how it goes on."""


class RayEngine:
    """Pools on one Ray cluster. Methods wait, in bounded time, and raise errors of Heliograph alone.

    `address` is `auto`, `HOST:PORT` or `ray://HOST:PORT`. Raises InvalidArgumentError, and ConfigurationError
    where Ray is not installed.
    """

    def __init__(self, address: str = AUTO) -> None:
        endpoint(address)
        check_installed()
        self.address = address

    def up(
        self, wanted: PoolSpecification, *, seconds: float = 120.0, progress: Progress = ignore
    ) -> PoolStatus:
        """Makes the pool, or what is missing of it, and waits until all members serve.

        Raises ConfigurationError: another pool of this name is up, or too few nodes have room;
        ComputeFailedError: a daemon does not start; DeadlineExceededError; UnavailableError: no cluster. What
        this call began is then taken away again.
        """
        found = self._done("up", seconds, progress, specification=asdict(wanted))
        return pool_from_json(found)

    def status(self, name: str, *, seconds: float = 30.0) -> PoolStatus:
        """What a pool is now. Raises ConfigurationError if there is none, UnavailableError."""
        check_name(name)
        return pool_from_json(self._done("status", seconds, ignore, name=name))

    def down(self, name: str, *, seconds: float = 40.0, progress: Progress = ignore) -> tuple[int, int]:
        """Ends a pool: daemons may end what runs for so many seconds, then they are killed.

        How many members there were, and how many of them were killed: 0 and 0 if there is no such pool.
        Raises UnavailableError, DeadlineExceededError.
        """
        check_name(name)
        found = self._done("down", seconds, progress, name=name)
        return found["members"], found["killed"]

    def _done(self, what: str, seconds: float, progress: Progress, **task: Any) -> Any:
        task |= {"do": what, "address": self.address, "seconds": seconds}
        with tempfile.TemporaryFile() as errors:
            process = start_agent(task, errors)
            # A timer ends the agent, and so the reading below, however long it would say nothing.
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
    """Raises ConfigurationError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("the package 'ray' is not installed", advice="pip install 'heliograph[ray]'")


def start_agent(task: Mapping[str, Any], errors: IO[bytes] | int) -> subprocess.Popen[str]:
    """An agent at work. It is killed when the thread that calls this has ended."""
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
    """What an agent says in the end. Raises what it says went wrong."""
    with process.stdout or _nothing() as lines:
        for line in lines:
            said = json.loads(line)
            if "result" in said:
                return said["result"]
            if "error" in said:
                raise error_of(said["error"])
            progress(said["progress"])
    if late.is_set():
        raise DeadlineExceededError(
            "the Ray cluster did not answer in time",
            advice="check it with `ray status`, or give more --timeout",
        )
    raise UnavailableError(
        f"the agent that speaks to Ray ended with {process.wait(END_SECONDS)}: {last_words(errors)}",
        advice="Ray ends processes that lose their cluster: check that it runs, `ray status`",
    )


def _nothing() -> IO[str]:
    raise UnavailableError("the agent that speaks to Ray has no output")


def error_of(said: Mapping[str, Any]) -> HeliographError:
    """The error that an agent told."""
    return class_for(said["reason"])(said["message"], advice=said["advice"])


def last_words(errors: IO[bytes]) -> str:
    """The last line of what a process said."""
    size = errors.seek(0, 2)
    errors.seek(max(0, size - LAST_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
