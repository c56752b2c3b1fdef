"""A peer of a benchmark in a process of its own: it is asked in lines and answers each with one of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

PEERS = Path(__file__).parents[2] / ".venv-peers"
#: The interpreter of peers that need packages which are not ours.
PEER_PYTHON = PEERS / "bin" / "python"
#: The longest that a peer may take to start or to answer.
ANSWER_SECONDS = 180.0


class PeerProcess:
    """One of the scripts here under an interpreter; its first answer, `ready`, is what it says once it can
    be asked. It ends when its standard input does, and so with this process."""

    def __init__(
        self,
        script: str,
        *arguments: object,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = f"{script} {' '.join(map(str, arguments))}".strip()
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            text=True,
        )
        self.ready = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *words: object) -> object:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def seconds(self, *words: object) -> list[float]:
        """An answer that is a list of times."""
        found = self.ask(*words)
        assert isinstance(found, list)
        return found

    def _answer(self) -> object:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            self.close()
            raise SystemExit(f"the peer `{self._name}` did not answer; is {PEERS} set up? `make peers` does")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def client_and_server(
    script: str,
    *options: object,
    python: Path = Path(sys.executable),
    environment: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """The client of a peer whose server, in another process, is asked for nothing but its port."""
    with (
        PeerProcess(script, "server", *options, python=python, environment=environment) as server,
        PeerProcess(script, "client", server.ready, python=python, environment=environment) as client,
    ):
        yield client
