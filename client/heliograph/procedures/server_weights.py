"""`hg.ServerWeights`: weights in files on the server, for both APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property

from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import DESCRIBE_MODEL, LIST_MODELS
from heliograph.graph.server_weights import ServerWeight
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.gguf import GgufHeader, joined, parse_header
from heliograph_proto.models import ModelFile, ModelInfo


class ServerWeights(Mapping[str, ServerWeight]):
    """The tensors of a file on the server, by name, in the file's order.

    Made by `session.server_weights`.
    """

    def __init__(self, info: ModelInfo) -> None:
        #: The file's path in the server's folder.
        self.file = info.name
        #: Tensors of types that Heliograph lacks: name, type and shape.
        self.left_out = info.left_out
        self._info = info
        self._weights = {one.name: ServerWeight(info.name, one) for one in info.tensors}

    @cached_property
    def header(self) -> GgufHeader | None:
        """The header of a GGUF model, with its metadata; None for other formats.

        Raises InvalidModelError.
        """
        parts = [parse_header(one.header, one.size_bytes, one.name) for one in self._info.parts]
        return joined(parts) if parts else None

    def __getitem__(self, name: str) -> ServerWeight:
        """Return a tensor by name.

        Raises InvalidArgumentError, not KeyError, for an unknown name.
        """
        found = self._weights.get(name)
        if found is None:
            near = get_close_matches(str(name), self._weights, 1)
            raise InvalidArgumentError(
                f"{self.file} has no tensor {name!r:.100}",
                advice=f"did you mean {near[0]!r}?"
                if near
                else f"list(session.server_weights({self.file!r})) has the names",
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


def list_models() -> Procedure[tuple[ModelFile, ...]]:
    """Return the files that the server's operator offers."""
    return ask(LIST_MODELS, None)


def describe_model(file: str | ModelFile) -> Procedure[ServerWeights]:
    """Return the tensors of a file. Raises InvalidArgumentError and InvalidModelError."""
    name = file.name if isinstance(file, ModelFile) else file
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{file!r:.80} is not a file name", advice="session.models() lists them")
    return ServerWeights((yield from ask(DESCRIBE_MODEL, name)))
