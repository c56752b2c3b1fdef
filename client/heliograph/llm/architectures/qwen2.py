"""Qwen 2 and 2.5: Llama's block, with biases of queries, keys and values."""

from __future__ import annotations

from heliograph.llm.architectures.llama import block as block
from heliograph.llm.configuration import Configuration, Fields, decoder

#: Halves of a head are pairs.
ROPE_MODE = 2


def configure(fields: Fields) -> Configuration:
    """Each size is in the metadata."""
    return decoder(fields, ROPE_MODE)
