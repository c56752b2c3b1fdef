"""What everything with a tensor type says of it."""

from __future__ import annotations

from heliograph_proto.types import DType, TensorType


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
