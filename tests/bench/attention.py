"""Attention over a long cache on the CPU device, beside ggml's CPU backend on as many threads; and
over pages, beside the same keys and values side by side.

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
#: A step of decoding: rows of the batch, heads, heads of the keys, positions of a page.
ROWS, QUERY_HEADS, KEY_HEADS, PAGE = 8, 16, 8, 128
#: By the number of positions of a row: rounds, and runs of each in one.
PAGED_REPEATS = {128: (20, 40), 1024: (20, 8), 4096: (12, 2)}
PAGED_BAR = 1.05
#: ggml rounds queries and sums of values to f16.
TOLERANCE = 5e-4


def figures() -> Iterator[Figure]:
    """Milliseconds a step."""
    device = CpuDevice("attention")
    try:
        for positions in PAGED_REPEATS:
            yield _paged_figure(device, positions)
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


def _paged_figure(device: CpuDevice, positions: int) -> Figure:
    """A step of decoding of some rows, whose pages lie in the order in which they were taken."""
    random = np.random.default_rng(13)
    count, shape = ROWS * positions // PAGE, (ROWS * positions, KEY_HEADS * WIDTH)
    k, v = (random.standard_normal(shape, np.float32).astype(np.float16) for _ in range(2))
    q = random.standard_normal((ROWS, QUERY_HEADS, 1, WIDTH), np.float32)
    mask = np.where(np.arange(positions) < positions * 7 // 8, 0, -np.inf)
    mask = np.tile(mask.astype(np.float32), (ROWS, 1, 1, 1))
    pages = np.arange(count, dtype=np.int32).reshape(-1, ROWS).T.copy()
    taken = [np.empty((count, PAGE * shape[1]), np.float16) for _ in range(2)]
    for to, each in zip(taken, (k, v), strict=True):
        to[pages.reshape(-1)] = each.reshape(count, -1)
    whole = [q, k, v, mask]
    paged = [q, *(each.reshape(shape) for each in taken), mask, pages]
    rounds, runs = PAGED_REPEATS[positions]
    with (
        _plan(device, paged, "flash_attn_paged", (count, PAGE)) as (run, result),
        _plan(device, whole, "flash_attn_ext", (ROWS, positions)) as (peer, wanted),
    ):
        ours, theirs = rested_turns(run, peer, rounds, runs)
        if not np.array_equal(result.view(np.uint32), wanted.view(np.uint32)):
            raise RuntimeError(f"pages of {positions} positions: the bits differ")
    medians = [statistics.median(found) * 1e3 for found in (ours, theirs)]
    note = f"pages of {PAGE}, {ROWS} rows; shortest {min(ours) * 1e3:.3f} and {min(theirs) * 1e3:.3f} ms"
    return Figure(f"attention/pages-{positions}", *medians, PAGED_BAR, "ms", "flash_attn_ext", note)


def _figure(device: CpuDevice, queries: int) -> Figure:
    arrays = operands(queries)
    rounds, runs = REPEATS[queries]
    with (
        Peer(arrays, device.threads) as theirs,
        _plan(device, arrays, "flash_attn_ext") as (run, result),
    ):
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
def _plan(
    device: CpuDevice, arrays: list[ggml.Array], op: str, rows: tuple[int, int] | None = None
) -> Iterator[tuple[Callable[[], object], ggml.Array]]:
    """A run of our plan, and the array that it writes. `rows`: what the rows of a cache are
    reshaped to before heads."""
    made = Maker()
    leaves = [made.input(each) for each in arrays]
    if rows is not None:
        apart = [made.node("reshape", each, shape=(*rows, KEY_HEADS, WIDTH)) for each in leaves[1:3]]
        leaves[1:3] = [made.node("permute", each, axes=(0, 2, 1, 3)) for each in apart]
    node = made.node(op, *leaves, scale=WIDTH**-0.5)
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
