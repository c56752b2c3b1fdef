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
class GgufSummary:
    """The model in a GGUF file, as its header describes it. Texts and numbers that the file does
    not have are empty and 0."""

    #: Such as "llama".
    architecture: str = ""
    #: The name that its maker gave it.
    title: str = ""
    #: Elements of all tensors.
    parameters: int = 0
    #: The most tokens that it was trained for.
    context_length: int = 0
    #: The type of most weights, such as "q4_k_m".
    quantization: str = ""
    #: The kind of its tokenizer, such as "gpt2".
    tokenizer: str = ""
    #: Words of its vocabulary.
    words: int = 0
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of tensors that the server offers, or a GGUF model that is split into several."""

    #: Its path in the models folder, for `session.server_weights`; of a split model, the first
    #: part's.
    name: str
    #: Of all parts.
    size_bytes: int
    #: None for safetensors.
    gguf: GgufSummary | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A GGUF file of a model, of which it has several if it is split."""

    #: Its path in the models folder.
    name: str
    #: Its bytes before the first tensor's.
    header: bytes
    #: Those of the whole file.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model file on the server."""

    #: Its path in the models folder.
    name: str
    tensors: tuple[ModelTensor, ...]
    #: Skipped tensors, of unsupported types or without elements: "name: type shape".
    left_out: tuple[str, ...] = ()
    #: The GGUF files that it is in, in order; none of another format.
    parts: tuple[ModelPart, ...] = ()
