"""Sixteen clients of `heliograph llm-serve` and its daemon, beside as many of llama.cpp's server,
on the same file with as many threads.

Each client sends a prompt of tokens and reads a stream of events. A gap is the time between two
events of a stream, so tokens that arrive in one event count as one. The two servers take turns. The
peer is a wheel, which may be built for older processors than this one: its name says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from figures import Figure, shared
from llm_shapes import WORDS, chosen, write
from peer_process import PEER_PYTHON, PeerProcess

CLIENTS, TOKENS, PROMPT, CONTEXT = 16, 24, 24, 512
#: The most that all answers may take of llama.cpp's time, and a gap that 1 in 100 exceeds of its.
TIME_BAR, GAP_BAR = 1.0, 1.2
ROUNDS, SECONDS = 3, 120.0
COMMAND = [sys.executable, "-m", "heliograph.cli"]
ACTIVATIONS = ("auto", "f32")


def figures() -> Iterator[Figure]:
    """Milliseconds of a token of all answers together, and between events of a stream."""
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-served-") as folder, ExitStack() as stack:
        model = write(Path(folder) / "model.gguf", chosen())
        peer = stack.enter_context(
            PeerProcess("peer_llama_server.py", model, CLIENTS, CONTEXT, threads, python=PEER_PYTHON)
        )
        assert isinstance(peer.ready, list)
        peer_url, instructions = peer.ready
        against = f"llama.cpp's server for {instructions}"
        for activations in ACTIVATIONS:
            with endpoint(model, activations) as url:
                yield from compared(Asked(url), Asked(peer_url), f"llm-served/{activations}", against)


@dataclass
class Asked:
    """A server, and what its clients measured."""

    url: str
    turn: int = 0
    #: Seconds of a token of all answers together, in each turn, and between events.
    tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def ask(self, *, is_counted: bool = True) -> None:
        """Ask for all answers at a time."""
        self.turn += 1
        begin = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            found = list(clients.map(self._answer, range(CLIENTS)))
        took = time.perf_counter() - begin
        if is_counted:
            self.tokens.append(took / sum(count for count, _ in found))
            for _, times in found:
                self.gaps += np.diff(times).tolist()

    def _answer(self, number: int) -> tuple[int, Sequence[float]]:
        """Return how many tokens an answer has, and when its events came."""
        prompt = np.random.default_rng((self.turn, number)).integers(300, WORDS, PROMPT).tolist()
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0.8,
            # Those of the servers differ.
            "top_k": 40,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times, count = [], 0
        with closing(HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.url} answered {response.status}: {response.read()!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("choices"):
                        times.append(time.perf_counter())
                    if event.get("usage"):
                        count = event["usage"]["completion_tokens"]
        return count, times

    def p99(self) -> float:
        """Return the gap that 1 in 100 exceeds."""
        return float(np.percentile(self.gaps, 99))


def compared(ours: Asked, theirs: Asked, name: str, against: str) -> Iterator[Figure]:
    """Both in turns."""
    for one in (ours, theirs):
        one.ask(is_counted=False)
    for _ in range(shared(ROUNDS)):
        for one in (ours, theirs):
            one.ask()
    mine, peer = (statistics.median(one.tokens) for one in (ours, theirs))
    note = f"{1 / mine:.0f} against {1 / peer:.0f} tokens/s of {CLIENTS} clients"
    yield Figure(f"{name}-token", mine * 1e3, peer * 1e3, TIME_BAR, "ms/token", against, note)
    middles = [statistics.median(one.gaps) * 1e3 for one in (ours, theirs)]
    note = f"p50 {middles[0]:.0f} against {middles[1]:.0f} ms; {len(ours.gaps)} and {len(theirs.gaps)} gaps"
    yield Figure(f"{name}-p99", ours.p99() * 1e3, theirs.p99() * 1e3, GAP_BAR, "ms", against, note)


@contextmanager
def endpoint(model: Path, activations: str) -> Iterator[str]:
    """Serve a model by a daemon and an endpoint, each in its process."""
    with daemon() as (url, _):
        options = ["--context", CONTEXT, "--answers", CLIENTS, "--activations", activations]
        command = ["llm-serve", model, "--server", url, "--listen", "127.0.0.1:0", *options]
        with _started(command, "http") as (http, _):
            yield http


@contextmanager
def daemon(*options: object) -> Iterator[tuple[str, int]]:
    """A daemon on a free port of loopback: its URL and its process."""
    with _started(
        ["serve", "--listen", "grpc://127.0.0.1:0", "--log-level", "warning", *options], "grpc"
    ) as one:
        yield one


@contextmanager
def _started(command: Sequence[object], scheme: str) -> Iterator[tuple[str, int]]:
    """Run a command of ours until the end; its URL is the word of its output with the scheme."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*COMMAND, *map(str, command)], text=True, **pipe)  # type: ignore[call-overload]
    try:
        for line in process.stdout:
            if urls := [word for word in line.split() if word.startswith(f"{scheme}://")]:
                break
        else:
            raise RuntimeError(f"`heliograph {command[0]}` ended with {process.wait(SECONDS)}")
        yield urls[0], process.pid
    finally:
        process.terminate()
        process.wait(SECONDS)
        process.stdout.close()
