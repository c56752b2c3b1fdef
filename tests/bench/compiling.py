"""Compiles as the daemon does them, from the bytes of a request to the bytes of its answer.

New graphs of 10,000 nodes, graphs that the session knows, and the memory that a compile takes. One
thread computes, and its own time counts.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from unittest.mock import patch

from figures import Figure, least_computing
from planner import LARGE, NODES
from planner_graphs import MissingError, Twins
from scheduler import Accelerator, layers

from heliograph import Graph as ClientGraph
from heliograph_backends.contract import Buffer, Device, Usage
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto import codec
from heliograph_proto.digests import digest_of
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.v1 import plan_pb2
from heliograph_server.daemon.garbage import take_over
from heliograph_server.rpc.decoding import decode
from heliograph_server.rpc.plan_service import compile_request
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session

RUNS, AGAIN_RUNS = 7, 50
#: The planner's graphs that are compiled.
SHAPES = ("llama", "wide", "elementwise")
BAR_MS, BAR_AGAIN_MS, BAR_KIB = 250.0, 3.0, 2.0


class Compiled:
    """A session on some devices, and the numbers of its plans."""

    def __init__(self, devices: Sequence[Device], stack: ExitStack) -> None:
        self.devices = devices
        host = Host(Registry.of(*devices))
        stack.callback(host.close)
        self.session: Session = host.session(host.open_session().session)
        self.session.attach(lambda batch: None)
        self._numbers = count(1)

    def answered(self, data: bytes) -> bytes:
        """Perform a request and return the answer."""
        limits = self.session.limits
        request, graph = decode([data], plan_pb2.CompileRequest, limits, lambda _: None)
        request.plan = next(self._numbers)
        info = compile_request(self.session, request, graph)
        return codec.encode(info, plan_pb2.CompileResponse).SerializeToString()

    def uploaded(self, graph: Graph) -> Graph:
        """Return the graph with weights whose contents the session has: zeros."""
        digests = {leaf.type: digest_of(bytes(leaf.type.nbytes)) for leaf in graph.weights}
        for type, digest in digests.items():
            receiver = self.session.begin_upload(digest, type.nbytes)
            receiver.write(0, bytes(type.nbytes))
            receiver.finish()
        leaves = [
            replace(leaf, digest=digests[leaf.type]) if leaf.kind is LeafKind.WEIGHT else leaf
            for leaf in graph.leaves
        ]
        return replace(graph, leaves=tuple(leaves))


def figures() -> Iterator[Figure]:
    """Yield the figures of several graphs on one device, and of a pinned graph on three."""
    take_over()
    graphs = {"chain": _chain()}
    try:
        for name in SHAPES:
            with Twins(nodes=2 * NODES) as twins:
                twins.output(twins.op("sum", LARGE[name](twins)))
                graphs[name] = twins.made.graph()
    except MissingError:
        graphs["layers"] = layers(NODES)
    for name, graph in graphs.items():
        with ExitStack() as stack:
            yield from _on_one(name, graph, Compiled([CpuDevice("cpu0", 2)], stack))
    with ExitStack() as stack:
        fakes = [Accelerator(f"fake{number}", "", 2**30) for number in range(2)]
        devices: list[Device] = [*fakes, CpuDevice("cpu0", 1)]
        yield _pinned(Compiled(devices, stack), [device.name for device in devices])


def _chain() -> Graph:
    made = ClientGraph()
    x, y = made.input("x", (16,), "f32"), made.input("y", (16,), "f32")
    for _ in range(NODES):
        x = x + y
    made.output("z", x)
    return made._freeze()


def _on_one(name: str, graph: Graph, compiled: Compiled) -> Iterator[Figure]:
    graph = compiled.uploaded(graph)
    # Names are part of a graph, so each of these is a new one.
    requests = [_request(_named(graph, str(number))) for number in range(RUNS + 2)]
    fresh = iter(requests)
    compiled.answered(next(fresh))
    new = least_computing(lambda: compiled.answered(next(fresh)), RUNS)
    again = least_computing(lambda: compiled.answered(requests[RUNS]), AGAIN_RUNS)
    note = f"{len(graph.nodes):,} nodes, {len(requests[0]):,} bytes"
    yield Figure(f"compile-new/{name}", new * 1e3, BAR_MS, 1.0, "ms", f"{BAR_MS:.0f} ms", note)
    yield _again(name, again, note)
    kib = _most_bytes(compiled, next(fresh)) / len(graph.nodes) / 1024
    bar = f"{BAR_KIB:.0f} KiB"
    yield Figure(f"compile-memory/{name}", kib, BAR_KIB, 1.0, "KiB/node", bar, note)


def _most_bytes(compiled: Compiled, request: bytes) -> int:
    """Return the most bytes that a compile takes, without the buffers of its plan."""
    memory = compiled.devices[0].buffer_type
    found, held = [0], 0

    def allocate(size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
        nonlocal held
        found.append(tracemalloc.get_traced_memory()[1] - held)
        made = allocated(size_bytes, usage)
        held += size_bytes
        tracemalloc.reset_peak()
        return made

    with ExitStack() as stack:
        allocated = memory.allocate
        stack.enter_context(patch.object(memory, "allocate", allocate))
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        compiled.answered(request)
        return max(*found, tracemalloc.get_traced_memory()[1] - held)


def _pinned(compiled: Compiled, names: Sequence[str]) -> Figure:
    """Return the figure of a known graph of which thirds are pinned."""
    graph = compiled.uploaded(layers(NODES))
    third = len(graph.nodes) // 3 + 1
    pins = [
        plan_pb2.Pin(device=name, nodes=range(n * third, min((n + 1) * third, len(graph.nodes))))
        for n, name in enumerate(names)
    ]
    data = _request(graph, plan_pb2.PlanOptions(devices=names, pins=pins))
    first = least_computing(lambda: compiled.answered(data), 1)
    again = least_computing(lambda: compiled.answered(data), AGAIN_RUNS)
    nodes = f"{len(graph.nodes):,} nodes, all of them pinned"
    return _again("pinned", again, f"{nodes}; {first * 1e3:.0f} ms the first time")


def _again(name: str, seconds: float, note: str) -> Figure:
    bar = f"{BAR_AGAIN_MS:.0f} ms"
    return Figure(f"compile-again/{name}", seconds * 1e3, BAR_AGAIN_MS, 1.0, "ms", bar, note)


def _named(graph: Graph, name: str) -> Graph:
    outputs = tuple(replace(one, name=one.name + name) for one in graph.outputs)
    return replace(graph, outputs=outputs)


def _request(graph: Graph, options: plan_pb2.PlanOptions | None = None) -> bytes:
    request = plan_pb2.CompileRequest(graph=codec.encode_graph(graph), options=options)
    return request.SerializeToString()
