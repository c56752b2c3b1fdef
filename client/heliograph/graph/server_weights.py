"""Weights in files on the server, as graphs name them: `session.server_weights` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.models import ModelTensor
from heliograph_proto.types import DType

if TYPE_CHECKING:
    from heliograph.graph.builder import Graph


class ServerWeight:
    """A tensor in a file on the server. `g.weight(name, it)` uses it, and uploads nothing."""

    def __init__(self, file: str, tensor: ModelTensor) -> None:
        self.file = file
        self.name = tensor.name
        self.type = tensor.type
        self.digest = tensor.digest

    def __repr__(self) -> str:
        return f"<ServerWeight {self.name!r} in {self.file}: {self.type}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """In numpy order, whatever order the file has."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Of its elements, or of its blocks."""
        return self.type.dtype


def check_here(graph: Graph) -> None:
    """Raises InvalidArgumentError for a graph whose weights lie on a server, where arrays are
    needed."""
    if files := sorted(set(graph._files.values())):
        raise InvalidArgumentError(
            f"weights of the graph lie on a server, in {files[0]}, and not here",
            advice="build it with arrays of that file, or keep the code that builds it",
        )
