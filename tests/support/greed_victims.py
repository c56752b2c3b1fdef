"""Victims of greedy clients, and attackers as processes: for a benchmark and its short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import heliograph as hg
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token
from heliograph_server.resources.principals import Right

ATTACKER = Path(__file__).with_name("greedy_clients.py")
TENANTS = "attacker", "victim"
CALL_SECONDS = 60.0
#: Every victim of a case: what it does again and again.
VICTIMS: dict[str, tuple[str, ...]] = {
    "sessions": ("run", "session"),
    "staged": ("run", "upload"),
    "loops": ("run", "loop"),
    "compiles-20k": ("run", "compile", "session"),
    "compiles-200k": ("run", "compile", "session"),
    "announced": ("run", "upload"),
    "streams": ("run",),
    "pipelined": ("run",),
}


class Victim:
    """A client of another tenant, and its calls."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.session = hg.connect(url, timeout=CALL_SECONDS)
        self._x = np.zeros(16, np.float32)
        self._plan = self.session.compile(self._graph(1.0))
        self._large = np.zeros(2**18, np.float32)
        self._tensor = self.session.put(self._large)
        self._numbers = 0.0
        g = hg.Graph()
        y = g.input("x", (16,), "f32") + 1.0
        g.output("y", y)
        self._loop = self.session.compile(g)

    @staticmethod
    def _graph(number: float) -> hg.Graph:
        g = hg.Graph()
        g.output("y", g.input("x", (16,), "f32") + number)
        return g

    def run(self) -> None:
        assert self._plan.run(x=self._x, timeout=CALL_SECONDS)["y"][0] == 1.0

    def compile(self) -> None:
        self._numbers += 1
        self.session.compile(self._graph(self._numbers), timeout=CALL_SECONDS)

    def session_opened(self) -> None:
        hg.connect(self._url, timeout=CALL_SECONDS).close()

    def upload(self) -> None:
        self._tensor.set(self._large)
        self.session.synchronize(timeout=CALL_SECONDS)

    def loop(self) -> None:
        self._loop.loop(steps=5, carry={"y": "x"}, x=self._x).result(timeout=CALL_SECONDS)

    def call(self, name: str) -> Callable[[], None]:
        return self.session_opened if name == "session" else getattr(self, name)  # type: ignore[no-any-return]


def tenants_with_tokens(path: Path) -> dict[str, str]:
    """Write a file of tokens, and return each tenant's."""
    tokens = {name: new_token() for name in TENANTS}
    for name, secret in tokens.items():
        add_token(path, Token(name, hash_of(secret), name, frozenset((Right.USE,))))
    return tokens


@contextmanager
def attack(case: str, url: str, token: str, found: dict[str, dict[str, int]]) -> Iterator[None]:
    """An attacker under way. Its outcome is in `found` afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(ATTACKER), case, url, token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ATTACKER.parent)},
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()
        found |= json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
