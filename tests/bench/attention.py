"""Attention over a long cache on the CPU device, beside ggml's CPU backend on as many threads.

The two run in turn, so that a drift of the machine meets both; the note has the shortest run of
each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, rested_turns
from limits import limits

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Maker, normalised_error, place
from peers import ggml

HEADS, WIDTH, KEYS = 32, 128, 4096
#: By the number of queries: rounds, and runs of each in one.
REPEATS = {1: (12, 10), 128: (5, 2)}
BAR = 1.5
#: ggml rounds queries and sums of values to f16.
TOLERANCE = 5e-4


def figures() -> Iterator[Figure]:
    """Milliseconds a step."""
    device = CpuDevice("attention")
    try:
        for queries in REPEATS:
            yield _figure(device, queries)
    except ggml.MissingError as error:
        print(f"no figures of attention: {error}", file=sys.stderr)
    finally:
        device.close()


def operands(queries: int) -> list[ggml.Array]:
    """Queries, keys, values and a mask under which each query sees the keys up to its own."""
    random = np.random.default_rng(13)
    q, k, v = (random.standard_normal((1, HEADS, rows, WIDTH), np.float32) for rows in (queries, KEYS, KEYS))
    hidden = np.arange(KEYS) > np.arange(KEYS - queries, KEYS)[:, None]
    mask = np.where(hidden, -np.inf, 0).astype(np.float16)
    return [q, k.astype(np.float16), v.astype(np.float16), mask]


def _figure(device: CpuDevice, queries: int) -> Figure:
    arrays = operands(queries)
    rounds, runs = REPEATS[queries]
    with Peer(arrays, device.threads) as theirs, _plan(device, arrays) as (run, result):
        ours, peer = rested_turns(run, theirs.compute, rounds, runs)
        if normalised_error(result, theirs.result().reshape(result.shape)) > TOLERANCE:
            raise RuntimeError(f"attention of {queries} queries: the results differ")
    shortest = f"shortest {min(ours) * 1e3:.3f} and {min(peer) * 1e3:.3f} ms, {device.threads} threads"
    medians = [statistics.median(found) * 1e3 for found in (ours, peer)]
    read_bytes = arrays[1].nbytes + arrays[2].nbytes
    beside = limits().beside(
        min(ours), read_bytes=read_bytes, operations=4.0 * HEADS * queries * KEYS * WIDTH
    )
    against, note = f"ggml {ggml.version()}", f"{shortest}; {beside}"
    return Figure(f"attention/f16-{queries}", *medians, BAR, "ms", against, note)


@contextmanager
def _plan(device: CpuDevice, arrays: list[ggml.Array]) -> Iterator[tuple[Callable[[], object], ggml.Array]]:
    """A run of our plan, and the array that it writes."""
    made = Maker()
    node = made.node("flash_attn_ext", *map(made.input, arrays), scale=WIDTH**-0.5)
    made.output(node)
    inputs = [place(device, array) for array in arrays]
    shape = made.type(node).shape
    y = place(device, np.zeros(shape, np.float32))
    plan = device.compile(made.graph(), LeafBindings({}, {}), DeviceCompileOptions())
    abort = Abort()
    try:
        yield lambda: plan.compute(inputs, [y], abort), y.array
    finally:
        plan.free()
        for each in (*inputs, y):
            each.buffer.free()


class Peer(ggml.Graph):
    """The same in ggml, prepared once."""

    def __init__(self, arrays: list[ggml.Array], threads: int) -> None:
        super().__init__()
        q, *rest = arrays
        given = self.input("f32", q.shape)
        leaves = [self.weight("f16", each.shape, each) for each in rest]
        self._node = self.node("flash_attn_ext", given, *leaves, WIDTH**-0.5, 0.0, 0.0)
        self._prepared_at = self._prepared([self._node], {given: q}, threads)

    def compute(self) -> None:
        ggml._compute(self._prepared_at)

    def result(self) -> Any:
        return ggml._values_of(self._node)
