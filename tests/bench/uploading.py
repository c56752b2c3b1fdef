"""Weights on their way: hashing them, and how long the second session with the same model waits.

The model is MiniLM's size, 90 MB in a hundred contents, of random numbers, and new arrays each time: what is
measured hashes them again, as another process would.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from figures import Figure, seconds_of, shared

import heliograph as hg
from heliograph.graph.digests import threads
from heliograph.testing import running_daemon
from heliograph_proto.digests import digest_of

HASH_BYTES_A_SECOND = 4e9
SECOND_UPLOAD_SECONDS = 0.1
ROUNDS = 7
#: As in MiniLM: a table of words, and six layers' matrices and vectors.
SHAPES = [(30522, 384), (512, 384), *[(384, 384), (384,)] * 24, *[(384, 1536), (1536, 384), (1536,)] * 6]


def hashing() -> Iterator[Figure]:
    """Milliseconds for each GB of one large array, with as many threads as the client uses."""
    data = np.random.default_rng(5).integers(0, 256, 90 * 2**20, np.uint8)
    times = seconds_of(lambda: digest_of(data, threads()), 15, warmup=2)
    found = statistics.median(times)
    rates = [data.nbytes / seconds / 1e9 for seconds in (found, min(times))]
    note = f"{rates[0]:.1f} GB/s, at best {rates[1]:.1f}, {threads()} threads"
    ours, limit = found / data.nbytes * 1e12, 1e12 / HASH_BYTES_A_SECOND
    yield Figure("uploads/hash", ours, limit, 1.0, "ms/GB", "4 GB/s", note)


def second_upload() -> Iterator[Figure]:
    """Compiling in a new session, beside one that has the same model, and after the daemon's restart."""
    with tempfile.TemporaryDirectory() as folder:
        cache = ("--cache", folder, "--log-level", "warning")
        with running_daemon(*cache) as url, hg.connect(url) as first:
            first.compile(model(0))
            beside = [upload_seconds(url) for _ in range(shared(ROUNDS))]
        found = []
        for _ in range(3):
            with running_daemon(*cache) as url:
                found.append(upload_seconds(url))
    limit = SECOND_UPLOAD_SECONDS
    for name, times, note in (
        ("second", beside, "beside a session that has it"),
        ("restarted", found, "from disk"),
    ):
        note += f"; at best {min(times):.3f} s"
        yield Figure(f"uploads/{name}", statistics.median(times), limit, 1.0, "s", "0.1 s", note)


def upload_seconds(url: str) -> float:
    """What a new session takes for its plan, above what it takes for one without weights."""
    graph = model(0)
    with hg.connect(url, progress=None) as session:
        session.compile(small())
        start = time.perf_counter()
        session.compile(graph)
        return time.perf_counter() - start


def model(seed: int) -> hg.Graph:
    """A graph that adds up a number of each weight, so that compiling it is little beside its contents."""
    rng = np.random.default_rng(seed)
    graph = hg.Graph()
    total = graph.input("x", (1,), "f32")
    for number, shape in enumerate(SHAPES):
        content = rng.random(shape, np.float32)
        total = total + graph.weight(f"w{number}", content)[(slice(0, 1),) * len(shape)].reshape((1,))
    graph.output("y", total)
    return graph


def small() -> hg.Graph:
    """A graph without weights."""
    graph = hg.Graph()
    graph.output("y", graph.input("x", (1,), "f32") + 1.0)
    return graph
