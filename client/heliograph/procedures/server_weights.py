"""Weights in files on the server: what `session.server_weights` gives, for both APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import DESCRIBE_MODEL, LIST_MODELS
from heliograph.graph.server_weights import ServerWeight
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.models import ModelInfo


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
    return ask(LIST_MODELS, None)


def describe_model(file: str) -> Procedure[ServerWeights]:
    """The tensors of one. Raises InvalidArgumentError, InvalidModelError."""
    if not isinstance(file, str):
        raise InvalidArgumentError(f"{file!r:.80} is no name of a file", advice="session.models() lists them")
    return ServerWeights((yield from ask(DESCRIBE_MODEL, file)))
