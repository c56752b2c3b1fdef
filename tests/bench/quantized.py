"""Matrix products with stored weights on the CPU device, beside ggml's CPU backend on as many threads.

The two run in turn, so that a drift of the machine meets both; the note has the shortest run of each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, seconds_of

from heliograph_backends.contract import Abort, CompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_proto import bfloat16

sys.path.append(str(Path(__file__).parents[1]))

from backend_graphs import Maker, normalised_error, place
from peers import ggml

SIDE = 4096
#: By data type: the most that a product of 1 row and of 128 rows may take of ggml's time.
BARS = {
    "q4_0": {1: 1.5, 128: 1.3},
    "q8_0": {1: 1.5, 128: 1.3},
    "q4_k": {1: 1.5, 128: 1.3},
    "q6_k": {1: 1.5, 128: 1.3},
    "f16": {1: 1.5, 128: 1.0},
    "bf16": {1: 1.5, 128: 1.0},
}
#: Rounds, and runs of each in one, by the number of rows.
REPEATS = {1: (12, 10), 128: (6, 2)}
#: ggml quantizes the activations too.
TOLERANCE = 5e-4


def figures() -> Iterator[Figure]:
    """Milliseconds a product."""
    device = CpuDevice("quantized")
    try:
        for name, bars in BARS.items():
            weights = stored(name)
            for rows, bar in bars.items():
                yield _figure(device, name, weights, rows, bar)
    except ggml.MissingError as error:
        print(f"no figures of quantized products: {error}", file=sys.stderr)
    finally:
        device.close()


def stored(name: str) -> ggml.Array:
    """Normally distributed weights in the form of a data type."""
    values = np.random.default_rng(11).standard_normal((SIDE, SIDE), np.float32)
    if name == "bf16":
        return np.asarray(bfloat16.to_bits(values))
    return values.astype(np.float16) if name == "f16" else ggml.quantized(values, name)


def _figure(device: CpuDevice, name: str, weights: ggml.Array, rows: int, bar: float) -> Figure:
    x = np.random.default_rng(12).standard_normal((rows, SIDE), np.float32)
    rounds, runs = REPEATS[rows]
    ours: list[float] = []
    peer: list[float] = []
    with Peer(name, weights, x, device.threads) as theirs, _plan(device, name, weights, x) as (run, result):
        for _ in range(rounds):
            ours += seconds_of(run, runs, warmup=1)
            peer += seconds_of(theirs.compute, runs, warmup=1)
        if normalised_error(result, theirs.result()) > TOLERANCE:
            raise RuntimeError(f"{name}: the products differ")
    shortest = f"shortest {min(ours) * 1e3:.3f} and {min(peer) * 1e3:.3f} ms, {device.threads} threads"
    medians = [statistics.median(found) * 1e3 for found in (ours, peer)]
    return Figure(f"quantized/{name}-{rows}", *medians, bar, "ms", f"ggml {ggml.version()}", shortest)


@contextmanager
def _plan(
    device: CpuDevice, name: str, weights: ggml.Array, x: ggml.Array
) -> Iterator[tuple[Callable[[], object], ggml.Array]]:
    """A run of our plan, and the array that it writes."""
    made = Maker()
    weight = made.weight(weights, name if name not in ggml.NUMPY_TYPES else "")
    made.output(made.node("mul_mat", weight, made.input(x)))
    w, inner, y = (
        place(device, array, type)
        for array, type in (
            (weights, made.type(weight)),
            (x, None),
            (np.zeros((len(x), SIDE), np.float32), None),
        )
    )
    plan = device.compile(made.graph(), LeafBindings({weight: w}, {}), CompileOptions())
    abort = Abort()
    try:
        yield lambda: plan.compute([inner], [y], abort), y.array
    finally:
        plan.free()
        for each in (w, inner, y):
            each.buffer.free()


class Peer(ggml.Graph):
    """The same product in ggml, prepared once."""

    def __init__(self, name: str, weights: ggml.Array, x: ggml.Array, threads: int) -> None:
        super().__init__()
        self._product = self.node(
            "mul_mat", self.weight(name, (SIDE, SIDE), weights), given := self.input("f32", x.shape)
        )
        self._prepared_at = self._prepared([self._product], {given: x}, threads)

    def compute(self) -> None:
        ggml._compute(self._prepared_at)

    def result(self) -> Any:
        return ggml._values_of(self._product).reshape(-1, SIDE)
