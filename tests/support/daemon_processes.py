"""Daemons as processes, which a test signals and ends itself, and work for them that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from forked_daemons import serve

import heliograph as hg
from heliograph.testing import wait_until_serving

if TYPE_CHECKING:
    pass

SERVE = [sys.executable, "-m", "heliograph.cli", "serve"]
SECONDS = 60
ANYWHERE = "grpc://127.0.0.1:0"


@contextmanager
def started(*arguments: str) -> Iterator[tuple[Any, str]]:
    """A daemon on a free port that the test ends itself, and its URL."""
    process = serve("--listen", ANYWHERE, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with _ended(process) as url:
        yield process, url


@contextmanager
def command_started(
    *arguments: str, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The same by the command itself, behind `prefix`."""
    command = [*prefix, *SERVE, "--listen", ANYWHERE, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with _ended(process) as url:
        yield process, url


@contextmanager
def _ended(process: Any) -> Iterator[str]:
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), process.stderr.read()
        yield line.removeprefix("listening on ").strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        process.stdout.close()
        process.stderr.close()


def long_graph(products: int = 60, size: int = 1536) -> hg.Graph:
    """Some seconds of work, with places between nodes where it can be ended."""
    g = hg.Graph()
    x = y = g.input("x", (size, size), "f32")
    for _ in range(products):
        y = y @ x
    g.output("y", y[:1, :1])
    return g


def ready(url: str) -> hg.Session:
    """A session, once the daemon serves."""
    wait_until_serving(url)
    return hg.connect(url)


X = np.zeros((1536, 1536), np.float32)
