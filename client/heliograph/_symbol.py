"""What stands for a tensor while a graph is built, without the operators of `hg.Value`.

The lowering needs to recognise values and the values' operators need the lowering; this small base
keeps the imports going one way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph._typed import Typed
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph.builder import Graph


class Symbol(Typed):
    """A value of a graph: the result of a node, or a leaf."""

    __slots__ = ("_reference", "graph", "name", "op", "type")

    def __init__(self, graph: Graph, reference: int, op: str, name: str, type_: TensorType) -> None:
        #: The graph that it belongs to.
        self.graph = graph
        #: The node's number, or the complement (~) of the leaf's.
        self._reference = reference
        #: The op that computes it, or "input", "weight" or "variable".
        self.op = op
        #: Its name, with the scopes in front.
        self.name = name
        self.type = type_

    @property
    def reference(self) -> int:
        """For the builder: the node's number, or the complement (~) of the leaf's."""
        return self._reference
