"""What is bound by memory: a chain of ten elementwise ops, and bytes between the host and the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
from checkout import serving_cuda
from figures import Figure, seconds_of
from gpu_common import copy_seconds_per_byte, gpu, in_turns, planned, type_of

import heliograph as hg
from heliograph.testing import running_daemon
from heliograph_proto.graph import LeafKind

CHAIN = ("relu", "abs", "sqr", "neg", "abs", "sqrt", "floor", "neg", "relu", "abs")
CHAIN_BYTES = HOST_BYTES = 2**30
CHAIN_BAR, HOST_BAR = 1 / 0.8, 1 / 0.7
ROUNDS = 5


def chain() -> Iterator[Figure]:
    """Milliseconds of ten ops on 1 GiB of f32, beside a copy that reads and writes as much."""
    leaves = [(LeafKind.INPUT, type_of("f32", CHAIN_BYTES // 4))]
    nodes = [(op, (number,), {}) for number, op in enumerate(CHAIN)]
    with gpu() as device, planned(device, leaves, nodes) as ours:
        each = copy_seconds_per_byte(device)
        seconds, _ = in_turns(ours.run, lambda: None)
    note = f"{2 * CHAIN_BYTES / seconds / 1e9:.0f} GB/s; the copy: {1 / each / 1e9:.0f} GB/s"
    limit = 2 * CHAIN_BYTES * each
    yield Figure("gpu-chain", seconds * 1e3, limit * 1e3, CHAIN_BAR, "ms", "a copy's bandwidth", note)


def host() -> Iterator[Figure]:
    """Milliseconds to the GPU and back through the daemon, beside CuPy's copies of pinned memory."""
    import cupy

    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(HOST_BYTES), np.uint8, HOST_BYTES)
    pinned[:] = 1
    card = cupy.empty(HOST_BYTES, cupy.uint8)

    def peer() -> None:
        card.set(pinned)
        card.get(out=pinned)
        cupy.cuda.Device().synchronize()

    with running_daemon(*serving_cuda()) as url, hg.connect(url) as session:
        there = session.empty((HOST_BYTES,), "u8")
        given, found = np.ones(HOST_BYTES, np.uint8), np.empty(HOST_BYTES, np.uint8)

        def ours() -> None:
            there.set(given)
            there.get(out=found)

        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            mine += seconds_of(ours, 1, warmup=1)
            theirs += seconds_of(peer, 1, warmup=1)
    medians = [statistics.median(one) * 1e3 for one in (mine, theirs)]
    note = f"{2 * HOST_BYTES / medians[0] / 1e6:.1f} GB/s both ways; over whatever road the daemon offers"
    yield Figure("gpu-host", *medians, HOST_BAR, "ms", f"CuPy {cupy.__version__}, pinned", note)
