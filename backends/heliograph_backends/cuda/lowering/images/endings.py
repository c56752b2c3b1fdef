"""Elementwise ops that a convolution's kernel runs on its results. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from heliograph_backends.cuda.lowering.launch import Located, aligned
from heliograph_backends.planning.fusion import other_operand
from heliograph_proto.graph import Graph, Node
from heliograph_proto.types import TensorType

#: The kernels' numbers of activations.
NO_ACTIVATION, RELU, CLAMP = range(3)
#: The dimensions of images, whose second one is that of channels.
PLANE_DIMENSIONS = 4


class Ending(NamedTuple):
    """The elementwise ops after a convolution that its kernel runs, in this order: it adds a number
    for each channel and a tensor, both with strides over the result, and bounds what it finds."""

    bias: Located | None = None
    addend: Located | None = None
    activation: int = NO_ACTIVATION
    low: float = 0.0
    high: float = 0.0

    def with_sum(self, other: Located) -> Ending | None:
        """Return the ending with another sum behind it; None if there is no place for it."""
        if self.activation or self.addend:
            return None
        repeats = not any(by for axis, by in enumerate(other.strides) if axis != 1)
        if repeats and other.type.ndim == PLANE_DIMENSIONS and not self.bias:
            return self._replace(bias=other)
        return self._replace(addend=other)

    def with_bounds(self, node: Node) -> Ending | None:
        """Return the ending with a relu or clamp behind it; None if there is no place for it."""
        if self.activation:
            return None
        if node.op == "relu":
            return self._replace(activation=RELU)
        return self._replace(activation=CLAMP, low=node.attributes["min"], high=node.attributes["max"])


def ending_of(
    graph: Graph, number: int, rest: Sequence[int], locate: Callable[[int], Located]
) -> Ending | None:
    """Return the nodes after a convolution as its ending; None if its kernels do not run them."""
    found: Ending | None = Ending()
    value, shape = len(graph.leaves) + number, graph.nodes[number].type.shape
    for after in rest:
        node = graph.nodes[after]
        if found is None or value not in node.operands:
            return None
        if node.op in ("relu", "clamp"):
            found = found.with_bounds(node)
        elif node.op == "add" and (other := other_operand(node.operands, value)) != value:
            one = locate(other)
            type, steps = TensorType(one.type.dtype, shape), aligned(one.type.shape, one.strides, shape)
            found = found.with_sum(Located(type, one.slot, one.offset, steps))
        else:
            return None
        value = len(graph.leaves) + after
    return found
