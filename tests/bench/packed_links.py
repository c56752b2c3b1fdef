"""Tensors over a link of 100 Mbit/s, packed and as they are; over a fast one nothing may change.

The client runs as a process on its host: this file is its program too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import Figure, shared

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from virtual_hosts import Network, Wire, rights

SLOW = Wire(delay_seconds=0.002, rate_bits_per_second=100e6)
ROUNDS, FAST_ROUNDS = 3, 15
MIB = 2**20
SIZE, FAST_SIZE = 4 * MIB, 64 * MIB
PORT = 7070
SECONDS = 300
#: What must be gained of data that gets smaller, and may be lost of data that does not.
BARS = {"f32": 0.95, "bf16": 0.45, "q4": 1.02, "zeros": 0.1}
#: Packing on a fast link.
FAST_BAR = 1.02


def figures() -> Iterator[Figure]:
    """Uploads and downloads of four kinds of data."""
    if reason := rights():
        print(f"  skipped: {reason}", file=sys.stderr)
        return
    for kind, found in measured(SLOW, SIZE, ROUNDS).items():
        for way, (packed, plain) in found.items():
            bar = BARS[kind]
            yield Figure(f"links/{kind}_{way}", packed, plain, bar, "s", "compression=off, 100 Mbit/s")
    fast = measured(Wire(), FAST_SIZE, FAST_ROUNDS).values()
    for way in ("up", "down"):
        # The same code runs after the first transfer, so the kinds differ by noise alone.
        packed, plain = (sum(found[way][one] for found in fast) for one in (0, 1))
        yield Figure(f"links/fast_{way}", packed, plain, FAST_BAR, "s", "compression=off, a fast link")


def arrays(size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights in f32, those that are exact in bf16, four-bit blocks, and zeros."""
    rng = np.random.default_rng(1)
    f32 = rng.standard_normal(size // 4, np.float32) * np.float32(0.02)
    halves = (f32.view(np.uint32) & 0xFFFF0000).view(np.float32)
    q4 = rng.integers(0, 256, size // 18 * 18, np.uint8).reshape(-1, 18)
    q4[:, :2] = np.abs(f32[: len(q4)]).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return {"f32": f32, "bf16": halves, "q4": q4.reshape(-1), "zeros": np.zeros(size, np.uint8)}


def measured(wire: Wire, size: int, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """The median seconds with compression and without, by kind of data and way."""
    with Network(server=Wire(), client=wire) as network:
        server = network["server"]
        url = f"grpc://{server.address}:{PORT}"
        serve = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "warning"]
        daemon = server.popen([*serve, "--listen", url], stdout=subprocess.PIPE, text=True)
        assert daemon.stdout is not None and daemon.stdout.readline().startswith("listening on ")
        done = network["client"].run([sys.executable, __file__, url, str(size), str(rounds)], timeout=SECONDS)
        daemon.terminate()
        daemon.wait(SECONDS)
        found: dict[str, dict[str, tuple[float, float]]] = json.loads(done.stdout)
        return found


def client(url: str, size: int, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    found = {}
    for kind, array in arrays(size).items():
        seconds: dict[str, dict[str, list[float]]] = {"up": {}, "down": {}}
        with hg.connect(url) as auto, hg.connect(url, compression="off") as off:
            tensors = {one: one.empty(array.shape, array.dtype.name) for one in (auto, off)}
            for turn in range(shared(rounds) + 1):
                for name, session in (("auto", auto), ("off", off))[:: 1 if turn % 2 else -1]:
                    tensor = tensors[session]
                    start = time.perf_counter()
                    tensor.set(array)
                    session.synchronize()
                    middle = time.perf_counter()
                    assert np.array_equal(tensor.get(), array)
                    if turn:
                        seconds["up"].setdefault(name, []).append(middle - start)
                        seconds["down"].setdefault(name, []).append(time.perf_counter() - middle)
        found[kind] = {way: (median(one["auto"]), median(one["off"])) for way, one in seconds.items()}
    return found


if __name__ == "__main__":
    json.dump(client(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
