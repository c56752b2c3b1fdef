"""A daemon that is killed and started again on the same port, with a place of state or without."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

from forked_daemons import serve

import heliograph as hg
from heliograph.testing import wait_until_serving


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SurvivingDaemon:
    """`heliograph serve --state`, over its deaths; without a place it keeps no state."""

    def __init__(self, place: Path | str | None, *arguments: str) -> None:
        """`place`: a folder, or the URL of a daemon that keeps the state."""
        self.url = f"grpc://127.0.0.1:{free_port()}"
        self.folder = Path() if isinstance(place, str) or place is None else place
        state = () if place is None else ("--state", str(place))
        self._arguments = ("--listen", self.url, *state, *arguments)
        self.process: Any = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.process = serve(*self._arguments, stdout=subprocess.PIPE)
        wait_until_serving(self.url)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.process.stdout.close()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def stop(self) -> int:
        """End it as an operator does, and return its exit status."""
        self.process.terminate()
        status: int = self.process.wait(60)
        self.process.stdout.close()
        return status

    def connect(self, **how: Any) -> hg.Session:
        """A durable session."""
        return hg.connect(self.url, durable=True, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
