"""Weights in files on the server: what `session.server_weights` gives, for both APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from heliograph._effects import DescribeModel, ListModels, Procedure
from heliograph_proto.description import ModelInfo, ModelTensor
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import DType

if TYPE_CHECKING:
    from heliograph.builder import Graph


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


class ServerWeights(Mapping[str, ServerWeight]):
    """The tensors of a file on the server, by name, in the file's order."""

    def __init__(self, info: ModelInfo) -> None:
        #: The file's path in the server's folder.
        self.file = info.name
        #: Tensors that cannot be used, since Heliograph lacks their type: name, type and shape.
        self.left_out = info.left_out
        self._weights = {one.name: ServerWeight(info.name, one) for one in info.tensors}

    def __getitem__(self, name: str) -> ServerWeight:
        """Raises InvalidArgumentError, which is no KeyError, for a name that is not there."""
        found = self._weights.get(name)
        if found is None:
            near = get_close_matches(str(name), self._weights, 1)
            raise InvalidArgumentError(
                f"{self.file} has no tensor {name!r:.100}",
                advice=f"did you mean {near[0]!r}?" if near else f"list({self.file!r}'s weights) names them",
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<ServerWeights {self.file}: {len(self)} tensors>"


def list_models() -> Procedure[tuple[str, ...]]:
    """The files that the server's operator allows."""
    found: tuple[str, ...] = yield ListModels()
    return found


def describe_model(file: str) -> Procedure[ServerWeights]:
    """The tensors of one. Raises InvalidArgumentError, InvalidModelError."""
    if not isinstance(file, str):
        raise InvalidArgumentError(f"{file!r:.80} is no name of a file", advice="session.models() lists them")
    found: ModelInfo = yield DescribeModel(file)
    return ServerWeights(found)


def check_here(graph: Graph) -> None:
    """Raises InvalidArgumentError for a graph whose weights lie on a server, where arrays are needed."""
    if files := sorted(set(graph.server_files.values())):
        raise InvalidArgumentError(
            f"weights of the graph lie on a server, in {files[0]}, and not here",
            advice="build it with arrays of that file, or keep the code that builds it",
        )
