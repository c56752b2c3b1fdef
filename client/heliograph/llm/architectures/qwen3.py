"""Qwen 3: Llama's block, with norms of each head's queries and keys."""

from __future__ import annotations

from heliograph.llm.architectures.llama import block as block
from heliograph.llm.architectures.qwen2 import configure as configure
