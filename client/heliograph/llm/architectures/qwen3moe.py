"""Qwen 3 with experts."""

from __future__ import annotations

from heliograph.llm.architectures.llama import block as block
from heliograph.llm.architectures.qwen2 import ROPE_MODE
from heliograph.llm.configuration import Configuration, Fields, decoder


def configure(fields: Fields) -> Configuration:
    """The size of a feed-forward layer is that of an expert."""
    return decoder(
        fields,
        ROPE_MODE,
        hidden=fields.size("expert_feed_forward_length"),
        experts=fields.size("expert_count"),
        experts_used=fields.size("expert_used_count"),
    )
