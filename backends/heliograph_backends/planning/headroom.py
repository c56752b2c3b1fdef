"""How many more bytes may live at each step of a graph without raising the most that live at once.

Steps are those without fusion. Bytes are counted in float64: they are compared with each other alone, and
nothing overflows whatever sizes a graph names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import Place
from heliograph_backends.planning.liveness import live_blocks
from heliograph_proto.graph import Graph
from heliograph_proto.ops import OPS

#: The most steps over which something may be kept: bounds the work for each.
MOST_STEPS = 4096


class Headroom:
    """Room under the peak, step by step; what is taken is gone."""

    def __init__(self, graph: Graph, places: Sequence[Place], groups: Sequence[Group]) -> None:
        leaves = len(graph.leaves)
        elsewhere = {*range(leaves), *(output.value for output in graph.outputs)}
        elsewhere.update(
            value for value, node in enumerate(graph.nodes, leaves) if OPS[node.op].group == "source"
        )
        changes = np.zeros(len(groups) + 2)
        for size, first, last in live_blocks(graph, places, groups, elsewhere, ()).lifetimes:
            changes[first] += size
            changes[last + 1] -= size
        live = np.cumsum(changes)
        self._room = live.max() - live

    def take(self, first: int, last: int, size_bytes: int) -> bool:
        """Whether this many more bytes may live from step `first` to `last`; less than 0 gives room."""
        if last - first > MOST_STEPS:
            return size_bytes <= 0
        part = self._room[first : last + 1]
        fits = bool(size_bytes <= part.min())
        if fits:
            part -= size_bytes
        return fits
