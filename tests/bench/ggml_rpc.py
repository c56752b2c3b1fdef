"""llama.cpp with all layers on an RPC device: a daemon's, beside those of ggml's own rpc-server.

Both clients are llama.cpp itself, and both servers have as many threads. LLM_SHAPE names
the model's sizes; see `llm_shapes`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import Figure, paired_medians
from llm_shapes import chosen, write
from peer_process import PEER_PYTHON, PeerProcess

from heliograph.testing import serving

sys.path.append(str(Path(__file__).parents[1] / "support"))

from peers import backend_ops

STORED = ("f16", "q4_0")
PROMPT, DECODED, ROUNDS = 128, 24, 6
#: The most of the time that llama.cpp takes with its own server.
BAR = 1.0


def figures() -> Iterator[Figure]:
    """Milliseconds of a prompt and of a token, by the type of the weights."""
    if not backend_ops.HEADER.exists():
        print("no figures of ggml-rpc: `make peers` builds its client", file=sys.stderr)
        return
    threads = len(os.sched_getaffinity(0))
    for stored in STORED:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "model.gguf", chosen(), stored)
            with (
                served() as endpoint,
                PeerProcess("peer_rpc.py", "server", threads) as server,
                PeerProcess("peer_llama_rpc.py", path, endpoint, python=PEER_PYTHON) as ours,
                PeerProcess(
                    "peer_llama_rpc.py", path, f"127.0.0.1:{server.ready}", python=PEER_PYTHON
                ) as theirs,
            ):
                yield from _beside(ours, theirs, stored)


@contextmanager
def served() -> Iterator[str]:
    """A daemon, and the address of its RPC devices."""
    command = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", "grpc://127.0.0.1:0"]
    command += [
        "--ggml-rpc",
        "127.0.0.1:0",
        "--ggml-rpc-version",
        backend_ops.version(),
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with serving(process):
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]


def _beside(ours: PeerProcess, theirs: PeerProcess, stored: str) -> Iterator[Figure]:
    for name, count, unit in (("prompt", PROMPT, "ms"), ("decode", DECODED, "ms/token")):
        for one in (ours, theirs):
            one.seconds(name, count, 1)
        mine, other = paired_medians(
            lambda runs, name=name, count=count: ours.seconds(name, count, runs),
            lambda runs, name=name, count=count: theirs.seconds(name, count, runs),
            ROUNDS,
            1,
        )
        note = f"{count} tokens" if name == "prompt" else f"{1 / mine:.0f} tokens/s"
        figure = f"ggml-rpc/{name}-{stored}"
        yield Figure(figure, mine * 1e3, other * 1e3, BAR, unit, "ggml's rpc-server", note)
