"""What is bound by memory: a chain of ten elementwise ops, and bytes between the host and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from checkout import serving_cuda
from figures import Figure
from gpu_common import Call, copy_seconds_per_byte, gpu, in_turns, planned, type_of

import heliograph as hg
from heliograph.testing import running_daemon
from heliograph_proto.graph import LeafKind

CHAIN = ("relu", "abs", "sqr", "neg", "abs", "sqrt", "floor", "neg", "relu", "abs")
CHAIN_BYTES = HOST_BYTES = 2**30
CHAIN_BAR, HOST_BAR = 1 / 0.8, 1 / 0.7


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
    """Milliseconds to the GPU and back through the daemon, beside CuPy's copies of pinned memory: of a tensor
    that the client maps and the daemon pinned, and of an array of the client's own."""
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
        mapped = session.empty((HOST_BYTES,), "u8", buffer_type="shared")
        array = mapped.map()
        given, found = np.arange(HOST_BYTES, dtype=np.uint8), np.empty(HOST_BYTES, np.uint8)

        def straight() -> None:
            mapped.copy_to(there)
            there.copy_and_wait(mapped)

        def copied() -> None:
            there.set(given)
            there.get(out=found)

        np.copyto(array, given)
        mapped.copy_and_wait(there)
        array[:] = 0
        there.copy_and_wait(mapped)
        if not np.array_equal(array, given):
            raise RuntimeError("what came back is not what was sent")
        yield _host("gpu-host/mapped", straight, peer, HOST_BAR)
        # No bar: what the processor copies besides is no matter of the card.
        yield _host("gpu-host/array", copied, peer, float("inf"))


def _host(name: str, ours: Call, peer: Call, bar: float) -> Figure:
    import cupy

    mine, theirs = (seconds * 1e3 for seconds in in_turns(ours, peer))
    note = f"{2 * HOST_BYTES / mine / 1e6:.1f} GB/s both ways; pinned {2 * HOST_BYTES / theirs / 1e6:.1f}"
    return Figure(name, mine, theirs, bar, "ms", f"CuPy {cupy.__version__}, pinned", note)
