"""Graphs in the order that a device wants."""

from __future__ import annotations

from heliograph_backends.contract import Device
from heliograph_proto.graph import Graph, reordered


def ordered(device: Device, graph: Graph) -> tuple[Graph, tuple[int, ...] | None]:
    """The graph in the order that the device wants, and that order; None: as it is."""
    order = tuple(device.optimize(graph))
    if order == tuple(range(len(graph.nodes))):
        return graph, None
    return reordered(graph, order), order
