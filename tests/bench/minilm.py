"""MiniLM through the daemon on loopback, timed at the client, against PyTorch, a model that PyTorch
compiled, and onnxruntime, all with the same threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import psutil
from figures import Figure, paired_medians, seconds_of
from limits import limits
from peer_process import PEER_PYTHON, PeerProcess

import heliograph as hg
from heliograph.demo import SENTENCES, find_model
from heliograph.models.minilm import Embedder
from heliograph.testing import running_daemon

TOKENS = 16
#: The most of PyTorch's time, by the number of sentences.
BARS = {1: 0.4, 8: 0.6, 32: 0.7}
#: The same of a compiled model's time.
COMPILED_BAR = 1.0
#: Peers by figure; of several, the fastest counts.
PEERS = {"": ("eager", "sdpa"), "-compile": ("compile",), "-onnxruntime": ("onnxruntime",)}
ROUNDS = 5
#: Runs in a round, by the number of sentences.
RUNS = {1: 20, 8: 12, 32: 6}
#: OpenMP's idle threads spin for a while after each of the peer's runs; ours must not pay for that.
SETTLE_SECONDS = 0.3


def threads() -> int:
    return len(os.sched_getaffinity(0))


def figures() -> Iterator[Figure]:
    """Figures for each batch size."""
    model = find_model()
    with (
        running_daemon("--log-level", "warning") as url,
        hg.connect(url) as session,
        PeerProcess("peer_minilm.py", model, threads(), python=PEER_PYTHON) as peer,
    ):
        embedder = Embedder(session, model)
        for batch in BARS:
            for suffix, names in PEERS.items():
                yield from _batch_figure(embedder, peer, batch, suffix, names)


def _batch_figure(
    embedder: Embedder, peer: PeerProcess, batch: int, suffix: str, names: tuple[str, ...]
) -> Iterator[Figure]:
    """The figure beside the fastest of some peers; none if there is no such peer here."""
    plan = embedder.plan(batch, TOKENS)
    rng = np.random.default_rng(batch)
    ids = rng.integers(1000, 20000, (batch, TOKENS)).astype(np.int32)
    mask = np.ones((batch, TOKENS), np.float32)

    def ours(runs: int) -> list[float]:
        settled = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < settled:
            plan.run(ids=ids, mask=mask)
        return seconds_of(lambda: plan.run(ids=ids, mask=mask), runs)

    medians = {}
    for name in names:
        # The first answer also compiles.
        answered = peer.ask(name, batch, 1)
        if isinstance(answered, str):
            print(f"no figure of MiniLM beside {name}: {answered}", file=sys.stderr)
            continue
        theirs: Callable[[int], list[float]] = partial(peer.seconds, name, batch)
        medians[name] = paired_medians(ours, theirs, ROUNDS, RUNS[batch])
    if not medians:
        return
    fastest = min(medians, key=lambda name: medians[name][1])
    mine, peers = (seconds * 1e3 for seconds in medians[fastest])
    bar = COMPILED_BAR if suffix else BARS[batch]
    against = f"{'' if fastest == 'onnxruntime' else 'PyTorch '}{fastest}, {threads()} threads"
    config = embedder.config
    widths = config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)
    products = 2.0 * batch * TOKENS * config.num_hidden_layers * widths
    note = limits().beside(mine / 1e3, operations=products)
    yield Figure(f"minilm/batch-{batch}{suffix}", mine, peers, bar, "ms", against, note)


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
