"""Models in the server's models folder: their names and tensors."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph_proto.types import TensorType


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor in a model file on the server."""

    name: str
    type: TensorType
    #: The digest of its bytes, by which a graph names it as a weight.
    digest: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model file on the server."""

    #: Its path in the models folder.
    name: str
    tensors: tuple[ModelTensor, ...]
    #: Skipped tensors, of unsupported types or without elements: "name: type shape".
    left_out: tuple[str, ...] = ()
    #: Of a GGUF file: its bytes before the first tensor's, and the size of the whole.
    header: bytes = b""
    size_bytes: int = 0
