"""A language model of a daemon: beside the same model in process, its load beside llama.cpp's, and
the memory of the daemon.

A load ends with the first token of an answer, on both sides; the file is in the system's cache.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from figures import Figure, paired_medians, shared
from language_models import Ours
from llm_served import daemon
from llm_shapes import Shape, chosen, write
from peer_process import PEER_PYTHON, PEERS, PeerProcess

import heliograph as hg

#: The most that a token and a prompt may take of their time in process, and a load of llama.cpp's.
DAEMON_BAR, LOAD_BAR = 1.03, 2.0
SECOND_SESSION_SECONDS = 0.5
#: Bytes that a daemon may hold beside weights and cache.
BESIDE_BYTES = 300e6
TOKENS, ROUNDS, LOADS = 200, 20, 3
NAME = "model.gguf"


def figures() -> Iterator[Figure]:
    """Milliseconds of tokens and prompts, seconds of loads, and MB."""
    shape = chosen()
    with tempfile.TemporaryDirectory(prefix="bench-daemon-") as folder:
        path = write(Path(folder) / NAME, shape)
        yield from loads(path, shape)
        with daemon("--models", folder) as (url, _), hg.connect(url) as far, hg.connect("local:") as near:
            ours = Ours(hg.llm.load(far, far.server_weights(NAME)))
            inside = Ours(hg.llm.load(near, path))
            tokens = paired_medians(
                lambda runs: ours.decode(runs, temperature=0),
                lambda runs: inside.decode(runs, temperature=0),
                ROUNDS,
                1,
            )
            prompts = paired_medians(ours.prompt, inside.prompt, ROUNDS, 1)
        for name, unit, (mine, theirs) in (("decode", "ms/token", tokens), ("prompt", "ms", prompts)):
            yield Figure(f"llm-daemon/{name}", mine * 1e3, theirs * 1e3, DAEMON_BAR, unit, "in process")


def loads(path: Path, shape: Shape) -> Iterator[Figure]:
    """The first and the second session of new daemons, and the memory of the last daemon."""
    first, second, used = list[float](), list[float](), list[float]()
    for _ in range(LOADS):
        with daemon("--models", path.parent) as (url, pid):
            for found in (first, second):
                begin, before = time.perf_counter(), cpu_seconds(os.getpid(), pid)
                with hg.connect(url) as session:
                    llm = hg.llm.load(session, session.server_weights(NAME))
                    llm.generate([300], max_tokens=1, temperature=0).result()
                    found.append(time.perf_counter() - begin)
                    used.append(cpu_seconds(os.getpid(), pid) - before)
                    llm.generate([300], max_tokens=TOKENS, temperature=0).result()
                    held = psutil.Process(pid).memory_info().rss
    if (PEERS / "ggml-rpc" / "llama_cpp").exists():
        with PeerProcess("peer_llama.py", path, len(os.sched_getaffinity(0)), python=PEER_PYTHON) as peer:
            before = cpu_seconds(peer.pid)
            times = peer.seconds("load", 1, shared(LOADS))
            theirs, theirs_used = statistics.median(times), (cpu_seconds(peer.pid) - before) / len(times)
        mine = statistics.median(used[::2])
        note = f"{path.stat().st_size / 1e6:.0f} MB; CPU {mine:.2f} against {theirs_used:.2f} s"
        yield Figure(
            "llm-daemon/load", statistics.median(first), theirs, LOAD_BAR, "s", "llama.cpp, mapped", note
        )
    else:
        print("no load beside llama.cpp's: `make peers` builds it", file=sys.stderr)
    again, note = statistics.median(second), f"CPU {statistics.median(used[1::2]):.2f} s"
    yield Figure("llm-daemon/second-session", again, SECOND_SESSION_SECONDS, 1.0, "s", "a limit", note)
    cache = 2 * 2 * shape.layers * shape.context * shape.kv_heads * shape.row
    most = path.stat().st_size + cache + BESIDE_BYTES
    against = "weights, cache and 300 MB"
    yield Figure("llm-daemon/memory", held / 1e6, most / 1e6, 1.0, "MB", against, f"after {TOKENS} tokens")


def cpu_seconds(*processes: int) -> float:
    """The processor time of processes so far."""
    times = (psutil.Process(one).cpu_times() for one in processes)
    return sum(one.user + one.system for one in times)
