"""The architectures of language models: a module each, with a `configure` and a `block`.

`configure` makes a configuration of a file's metadata. `block` is a layer: from the tokens' rows
[n, w] to the next ones.
"""

from __future__ import annotations

from typing import Protocol, cast

import heliograph as hg
from heliograph.llm.architectures import bert as bert
from heliograph.llm.architectures import gemma2, gemma3, gpt_oss, llama, phi3, qwen2, qwen3, qwen3moe
from heliograph.llm.configuration import Configuration, Fields
from heliograph.llm.decoding_step import Step


class Architecture(Protocol):
    """A module of this package."""

    def configure(self, fields: Fields) -> Configuration:
        """Return the sizes of a model. Raises InvalidModelError and UnsupportedError."""

    def block(self, step: Step, layer: int, x: hg.Value) -> hg.Value:
        """Return the rows after a layer, [n, w] from [n, w]."""


#: By the name that files give.
ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": cast(Architecture, gemma2),
    "gemma3": cast(Architecture, gemma3),
    "gpt-oss": cast(Architecture, gpt_oss),
    "llama": cast(Architecture, llama),
    "phi3": cast(Architecture, phi3),
    "qwen2": cast(Architecture, qwen2),
    "qwen3": cast(Architecture, qwen3),
    "qwen3moe": cast(Architecture, qwen3moe),
}

#: Those that embed texts and write none: `bert` has their form.
ENCODERS = ("bert", "nomic-bert")


def architecture_of(name: str, file: str) -> Architecture:
    """Return an architecture by its name. Raises UnsupportedError, which names those that there
    are."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise hg.UnsupportedError(
            f"{file} is a model of the architecture {name!r:.40}",
            advice=f"supported are {', '.join((*ENCODERS, *ARCHITECTURES))}",
        )
    return found


def hidden(step: Step, tokens: hg.Value) -> hg.Value:
    """Return the rows of tokens after the last layer, not normed: [n, w] from i32 [n]."""
    block = ARCHITECTURES[step.config.architecture].block
    x = step.embedding(tokens)
    for layer in range(step.config.layers):
        with step.graph.scope(f"layer{layer}"):
            x = block(step, layer, x)
    return x
