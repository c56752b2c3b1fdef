"""The memory planner: how long it takes, and what it reserves beside ggml's graph allocator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from figures import Figure, least_computing, seconds_of
from planner_graphs import MissingError, Pair, Twins, bert, chain, convolutions, elementwise, llama, wide

from heliograph_backends.contract import DeviceCompileOptions
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import plan_layout
from heliograph_proto.graph import Graph
from heliograph_server.daemon.garbage import take_over

#: Makes a graph's nodes and gives its result.
Shape: TypeAlias = Callable[[Twins], Pair]

NODES, RUNS = 10_000, 7
BAR_MS = 60.0
BAR_BYTES = 1.05
LARGE: dict[str, Shape] = {
    "chain": lambda g: chain(g, NODES),
    "wide": lambda g: wide(g, NODES),
    "elementwise": lambda g: elementwise(g, NODES, seed=0),
    "llama": lambda g: llama(g, layers=NODES // 31, tokens=32, width=64, heads=4, hidden=128),
    "bert": lambda g: bert(g, layers=NODES // 34, tokens=32, width=64, heads=4),
}
MODELS: dict[str, Shape] = {
    "llama-prefill": lambda g: llama(g, layers=8, tokens=512, width=512, heads=8, hidden=1408),
    "llama-long": lambda g: llama(g, layers=4, tokens=2048, width=256, heads=4, hidden=704),
    "llama-decode": lambda g: llama(g, layers=8, tokens=1, width=512, heads=8, hidden=1408),
    "llama-cache": lambda g: llama(g, layers=8, tokens=1, width=512, heads=8, hidden=1408, cached=1024),
    "llama-wide": lambda g: llama(g, layers=8, tokens=128, width=512, heads=8, hidden=4096),
    "bert-16": lambda g: bert(g, layers=6, tokens=16, width=384, heads=12),
    "bert-256": lambda g: bert(g, layers=6, tokens=256, width=384, heads=12),
    "convolutions": lambda g: convolutions(g, blocks=8, size=224, channels=64),
    **{f"elementwise-{seed}": lambda g, seed=seed: elementwise(g, 400, seed) for seed in range(4)},
}


def figures() -> Iterator[Figure]:
    """Milliseconds for 10,000 nodes of several shapes, then bytes of models' graphs and of random ones."""
    # As in a daemon, whose collections are rare.
    take_over()
    device = CpuDevice("planner", threads=1)
    try:
        for name, shape in LARGE.items():
            yield _time(device, name, shape)
        for name, shape in MODELS.items():
            yield _bytes(device, name, shape)
    except MissingError as error:
        print(f"no figures of the planner: {error}", file=sys.stderr)
    finally:
        device.close()


def _time(device: CpuDevice, name: str, shape: Shape) -> Figure:
    with Twins(nodes=2 * NODES) as twins:
        graph = _graph(twins, shape)
        seconds = least_computing(lambda: plan_layout(device, graph, DeviceCompileOptions()), RUNS)
        note = f"{len(graph.nodes):,} nodes"
        # ggml ends the process where more than 256 blocks are free at once.
        if name != "wide":
            (peer,) = seconds_of(twins.peer_bytes, 1, warmup=0)
            note += f"; ggml in C {peer * 1e3:.1f} ms, its graph included"
    found = seconds * 1e3
    return Figure(f"planner-time/{name}", found, BAR_MS, 1.0, "ms", f"{BAR_MS:.0f} ms", note)


def _bytes(device: CpuDevice, name: str, shape: Shape) -> Figure:
    with Twins() as twins:
        graph = _graph(twins, shape)
        fused, single = (_taken(device, graph, fusion=fusion) / 1e6 for fusion in (True, False))
        peer = twins.peer_bytes() / 1e6
    note = f"without fusion {single:.3f} MB"
    return Figure(f"planner-memory/{name}", fused, peer, BAR_BYTES, "MB", "ggml's graph allocator", note)


def _graph(twins: Twins, shape: Shape) -> Graph:
    """The graph, with a sum as its output, so that a large output's own memory decides nothing."""
    twins.output(twins.op("sum", shape(twins)))
    return twins.made.graph()


def _taken(device: CpuDevice, graph: Graph, *, fusion: bool) -> int:
    """Bytes of the plan's own, and of the outputs, which ggml counts too."""
    storage = plan_layout(device, graph, DeviceCompileOptions(fusion=fusion)).storage
    outputs: Any = (graph.type_of(output.value).nbytes for output in graph.outputs)
    return sum(storage.own_bytes) + sum(outputs)
