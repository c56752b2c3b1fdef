"""MiniLM through the daemon on loopback, timed at the client, against PyTorch with the same threads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
from figures import Figure, paired_medians, seconds_of
from peer_process import PEER_PYTHON, PeerProcess

import heliograph as hg
from heliograph.demo import SENTENCES, find_model
from heliograph.models.minilm import Embedder
from heliograph.testing import running_daemon

TOKENS = 16
BARS = {1: 0.7, 8: 0.9, 32: 0.9}
ROUNDS, RUNS = 5, 20
#: OpenMP's idle threads spin for a while after each of the peer's runs; ours must not pay for that.
SETTLE_SECONDS = 0.3


def threads() -> int:
    return len(os.sched_getaffinity(0))


def figures() -> Iterator[Figure]:
    """One figure for each batch size."""
    model = find_model()
    with (
        running_daemon("--log-level", "warning") as url,
        hg.connect(url) as session,
        PeerProcess("peer_minilm.py", model, threads(), python=PEER_PYTHON) as peer,
    ):
        embedder = Embedder(session, model)
        for batch, bar in BARS.items():
            yield _batch_figure(embedder, peer, batch, bar)


def _batch_figure(embedder: Embedder, peer: PeerProcess, batch: int, bar: float) -> Figure:
    plan = embedder.plan(batch, TOKENS)
    rng = np.random.default_rng(batch)
    ids = rng.integers(1000, 20000, (batch, TOKENS)).astype(np.int32)
    mask = np.ones((batch, TOKENS), np.float32)

    def ours(runs: int) -> list[float]:
        settled = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < settled:
            plan.run(ids=ids, mask=mask)
        return seconds_of(lambda: plan.run(ids=ids, mask=mask), runs)

    medians = {
        attention: paired_medians(
            ours, lambda runs, name=attention: peer.seconds(name, batch, runs), ROUNDS, RUNS
        )
        for attention in ("eager", "sdpa")
    }
    attention = min(medians, key=lambda name: medians[name][1])
    mine, theirs = medians[attention]
    name = f"minilm/batch-{batch}"
    against = f"PyTorch {attention}, {threads()} threads"
    return Figure(name, mine * 1e3, theirs * 1e3, bar, "ms", against)


def memory() -> Iterator[Figure]:
    """The daemon's resident memory after the demo's work."""
    model = find_model()
    with running_daemon("--log-level", "warning") as url, hg.connect(url) as session:
        Embedder(session, model).embed(SENTENCES)
        resident = _daemon_resident_bytes()
    weights = (model / "model.safetensors").stat().st_size
    limit = weights + 300e6
    yield Figure("memory/daemon", resident / 1e6, limit / 1e6, 1.0, "MB", "weights plus 300 MB")


def _daemon_resident_bytes() -> int:
    for child in psutil.Process().children(recursive=True):
        if "serve" in child.cmdline():
            return int(child.memory_info().rss)
    raise SystemExit(f"no daemon among the children of {sys.argv[0]}")
