"""Steps of 1, 4 and 8 answers at a time, and prompts of 128 and 512 tokens, beside llama.cpp on the
same file with as many threads.

`LLM_SHAPE=tinyllama` measures a larger model, and `taskset -c 0` one thread. Steps run in loops,
and attend to less than 40 tokens.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, paired_medians
from llm_shapes import chosen, write
from peer_process import PEER_PYTHON, PEERS, PeerProcess

import heliograph as hg
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.files.weights import open_file
from heliograph.llm.graphs import CARRIES
from heliograph.llm.loading import Loading, engine_of
from heliograph.llm.sampling import ENDS, Form
from heliograph.llm.serving.graphs import PagedDecoder
from heliograph_proto.devices import Activations

ACTIVATIONS: tuple[Activations, ...] = ("auto", "f32")
ROWS, PROMPTS, MOST_ROWS = (1, 4, 8), (128, 512), 8
#: The most that ours may take of llama.cpp's time.
BARS = {1: 1.0, 4: 1.2, 8: 1.2, 128: 1.0, 512: 1.0}
START, STEPS, CONTEXT, ROUNDS = 8, 24, 1024, 8


def figures() -> Iterator[Figure]:
    """Milliseconds of a step and of a prompt."""
    if not (PEERS / "ggml-rpc" / "llama_cpp" / "lib" / "libllama.so").exists():
        print("no figures beside llama.cpp: `make peers` builds it", file=sys.stderr)
        return
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-rows-") as folder, hg.connect("local:") as session:
        path = write(Path(folder) / "model.gguf", chosen())
        with PeerProcess("peer_llama.py", path, threads, MOST_ROWS, python=PEER_PYTHON) as peer:
            for activations in ACTIVATIONS:
                yield from beside(session, path, peer, activations)


def beside(session: hg.Session, path: Path, peer: PeerProcess, activations: Activations) -> Iterator[Figure]:
    """Both in turns."""
    engine: Any = engine_of(
        CurrentSession(session), open_file(path), Loading(CONTEXT, activations=activations)
    )
    for rows in ROWS:
        ours = steps(session, engine, rows)
        found = paired_medians(ours, partial(_theirs, peer, "rows", STEPS, rows), ROUNDS, 1)
        yield _figure(f"llm-rows/{rows}-{activations}", found, BARS[rows])
    llm = hg.llm.load(session, path, activations=activations)
    for count in PROMPTS:
        found = paired_medians(prompts(llm, count), partial(_theirs, peer, "prompt", count), ROUNDS, 1)
        yield _figure(f"llm-rows/prompt{count}-{activations}", found, BARS[count])


def steps(session: hg.Session, engine: Any, rows: int) -> Callable[[int], list[float]]:
    """Return a call that measures the seconds of a step, in a loop of them."""
    decoder = engine.decoder
    cache = replace(decoder.cache, name=f"{decoder.cache.name}-{rows}")
    paged = PagedDecoder(decoder.config, decoder.weights, cache, rows)
    plan = session.compile(paged.decode(rows, 1, Form(1)))
    inputs = {
        "token": np.arange(300, 300 + rows, dtype=np.int32),
        "position": np.full(rows, START, np.int32),
        "limit": np.full(rows, START + STEPS, np.int32),
        "ends": np.full((rows, ENDS), -1, np.int32),
        "table": np.arange(rows, dtype=np.int32)[:, None],
    }

    def measure(runs: int) -> list[float]:
        found = []
        for _ in range(runs):
            begin = time.perf_counter()
            plan.loop(inputs, steps=STEPS, carry=CARRIES, fetch=()).result()
            found.append((time.perf_counter() - begin) / STEPS)
        return found

    measure(1)
    return measure


def prompts(llm: hg.llm.LanguageModel, count: int) -> Callable[[int], list[float]]:
    """Return a call that measures the seconds until the first token after new prompts."""
    turn = 0

    def measure(runs: int) -> list[float]:
        nonlocal turn
        found = []
        for _ in range(runs):
            turn += 1
            tokens = [300 + turn, *range(301, 300 + count)]
            begin = time.perf_counter()
            llm.generate(tokens, max_tokens=1, temperature=0).result()
            found.append(time.perf_counter() - begin)
        return found

    measure(1)
    return measure


def _theirs(peer: PeerProcess, what: str, count: int, *numbers: int) -> list[float]:
    *rows, runs = numbers
    return peer.seconds(what, count, runs, *rows)


def _figure(name: str, found: tuple[float, float], bar: float) -> Figure:
    mine, theirs = found
    return Figure(name, mine * 1e3, theirs * 1e3, bar, "ms", "llama.cpp")
