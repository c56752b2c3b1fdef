"""The measured steps of a plan: nodes that are computed together, with their time and work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from heliograph.explain.parts import ExplainedNode
from heliograph_proto.graph import Graph
from heliograph_proto.ops.work import flops_of, read_bytes

_SECOND_US = 1e6


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """Nodes that a device computes together, and their mean time in the measured runs."""

    #: In the graph's order.
    nodes: tuple[ExplainedNode, ...]
    #: In microseconds.
    took_us: float
    #: Its part of the time of all steps, from 0 to 1.
    share: float
    #: The operations on numbers, and the bytes that are read and written: what shapes and data
    #: types tell. Values that stay inside the step do not count as bytes.
    flops: int
    size_bytes: int

    @property
    def device(self) -> str:
        """The device's name."""
        return self.nodes[0].device

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops of its nodes."""
        return tuple(node.op for node in self.nodes)

    @property
    def name(self) -> str:
        """The name of its result."""
        return self.nodes[-1].name

    @property
    def flops_per_s(self) -> float:
        """The rate of operations."""
        return self.flops / self.took_us * _SECOND_US

    @property
    def bytes_per_s(self) -> float:
        """The rate of bytes."""
        return self.size_bytes / self.took_us * _SECOND_US


def steps_of(graph: Graph, nodes: Sequence[ExplainedNode]) -> tuple[ExplainedStep, ...]:
    """Return the measured steps, the longest first; none without a measured run."""
    together: dict[tuple[int, int, int], list[ExplainedNode]] = {}
    for node in nodes:
        if node.step_us:
            # A node without a step is one by itself.
            alone = 0 if node.step else node.number + 1
            together.setdefault((node.split, node.step, alone), []).append(node)
    readers = _readers(graph)
    found = [_step(graph, readers, tuple(members)) for members in together.values()]
    whole = sum(one.took_us for one in found)
    shared = (replace(one, share=one.took_us / whole) for one in found)
    return tuple(sorted(shared, key=lambda one: -one.took_us))


def _readers(graph: Graph) -> dict[int, set[int]]:
    """Return the nodes that read each value; -1 for an output of the graph."""
    found: dict[int, set[int]] = {}
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            found.setdefault(value, set()).add(number)
    for port in graph.outputs:
        found.setdefault(port.value, set()).add(-1)
    return found


def _step(graph: Graph, readers: dict[int, set[int]], members: tuple[ExplainedNode, ...]) -> ExplainedStep:
    leaves, inside = len(graph.leaves), {one.number for one in members}
    flops, read, written = 0, dict[int, int](), 0
    for number in sorted(inside):
        node = graph.nodes[number]
        types = [graph.type_of(value) for value in node.operands]
        flops += flops_of(node.op, types, node.type)
        for value, size in zip(node.operands, read_bytes(node.op, types, node.type), strict=True):
            if value - leaves not in inside:
                read[value] = max(size, read.get(value, 0))
        if readers.get(leaves + number, set()) - inside:
            written += node.type.nbytes
    return ExplainedStep(members, members[0].step_us, 0.0, flops, sum(read.values()) + written)


def ops_text(ops: Iterable[str], most: int) -> str:
    """The names of ops in order, of many the first ones."""
    names = list(ops)
    more = f" + {len(names) - most} more" if len(names) > most else ""
    return " + ".join(names[:most]) + more
