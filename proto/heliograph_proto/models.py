"""Models in a folder of the server: their names and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor in a model's file on the server."""

    name: str
    type: TensorType
    #: Of its bytes: what a graph's weight names.
    digest: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's file on the server."""

    #: Its path in the models' folder.
    name: str
    tensors: tuple[ModelTensor, ...]
    #: Tensors of types that Heliograph has not, or without elements: "name: type shape".
    left_out: tuple[str, ...] = ()
