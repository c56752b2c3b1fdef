"""Patterns of nodes' names, in words: what pins and taps share."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

#: How many near names an error lists.
_NEAR = 3


def pattern_words(pattern: object) -> str:
    """A pattern, or a function of a node, in words."""
    return (
        f"{pattern!r:.80}" if isinstance(pattern, str) else getattr(pattern, "__name__", f"{pattern!r:.80}")
    )


def near_names(pattern: str, names: Collection[str]) -> str:
    """What may be meant by a pattern that no name matches."""
    near = get_close_matches(pattern, names, _NEAR, cutoff=0.3)
    return f"near names: {', '.join(map(repr, near))}" if near else f"names are such as {list(names)[:_NEAR]}"
