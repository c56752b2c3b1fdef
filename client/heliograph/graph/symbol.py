"""The base of `hg.Value` without its operators.

The lowering recognises values, and the operators of values use the lowering. This small base keeps
the imports acyclic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph_proto.types import DType, TensorType

if TYPE_CHECKING:
    from heliograph.graph.builder import Graph


class Typed:
    """Something that has a shape and a data type: a value of a graph, or a tensor on a server."""

    __slots__ = ()

    #: Shape and data type.
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The data type of the elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.type.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.type.size

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.type.nbytes


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
