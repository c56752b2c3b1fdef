"""Daemons that start in a few milliseconds, for tests and benchmarks that need many or end them often.

    with MemberFactory() as factory:
        member = factory.start("--device", "fake")
        hg.connect(member.url)
        member.kill()
        member = factory.start("--device", "fake", port=member.port)

One process imports everything and then, before it has a thread or a connection, forks a daemon for each line
that it reads. So a daemon is a process of its own, as `heliograph serve` is, without the second that Python
takes to import it. Whatever ends the factory ends its daemons.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from heliograph.testing import wait_until_serving

START_SECONDS = 30
PR_SET_PDEATHSIG = 1


@dataclass
class FactoryMember:
    """A daemon's process."""

    pid: int
    port: int
    host: str = "127.0.0.1"
    _factory: MemberFactory = field(repr=False, default=None)  # type: ignore[assignment]

    @property
    def url(self) -> str:
        return f"grpc://{self.host}:{self.port}"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends it a signal; after SIGKILL it is gone when this returns, and its port is free."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._factory.ask({"wait": self.pid})


class MemberFactory:
    """A context. Not thread-safe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __repr__(self) -> str:
        return f"<MemberFactory {self._process.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=START_SECONDS)

    def ask(self, what: dict[str, Any]) -> Any:
        """One question to the process that forks, and its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        return json.loads(self._process.stdout.readline())

    def start(self, *arguments: str, host: str = "127.0.0.1", port: int = 0) -> FactoryMember:
        """A daemon that serves, with the options of `heliograph serve`; port 0 is any."""
        listen = ["--listen", f"grpc://{host}:{port}", "--log-level", "error"]
        told = self.ask({"start": [*listen, *arguments]})
        member = FactoryMember(told["pid"], told["port"], host, self)
        wait_until_serving(member.url, START_SECONDS)
        return member


def _serve(arguments: list[str], told: int) -> int:
    """A daemon, in the process that was forked for it; its port goes to a pipe."""
    import asyncio

    from heliograph_server.daemon.daemon import Daemon, serve
    from heliograph_server.daemon.main import _loop_factory

    def tell(daemon: Daemon) -> None:
        os.write(told, str(daemon.addresses[0].port).encode())
        os.close(told)

    config = _config(arguments)
    with asyncio.Runner(loop_factory=_loop_factory()[0]) as runner:
        runner.run(serve(config, tell))
    return 0


def _config(arguments: list[str]) -> Any:
    import argparse

    from heliograph_server.config.config import add_serve_arguments, config_from_arguments

    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


def _fork(arguments: list[str], parent: int) -> dict[str, int]:
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        with os.fdopen(reading) as pipe:
            port = pipe.read()
        if not port:
            raise SystemExit(f"the daemon {arguments} did not start")
        return {"pid": pid, "port": int(port)}
    # The daemon: it ends with whoever forked it, and must not read that one's questions.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(reading)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    status = 1
    try:
        if os.getppid() == parent:
            status = _serve(arguments, writing)
    finally:
        os._exit(status)


def main() -> None:
    """Reads questions until there are no more; then kills what is left."""
    import heliograph_server.daemon.main  # noqa: F401

    alive: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            answer: Any = _fork(question["start"], os.getpid())
            alive.add(answer["pid"])
        else:
            os.waitpid(question["wait"], 0)
            alive.discard(question["wait"])
            answer = None
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
