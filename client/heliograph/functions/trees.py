"""Nested tuples, lists and dictionaries, whose leaves are values or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves in order, each with its place as text: "[0]['w']"."""
    if isinstance(tree, Mapping):
        for key, one in tree.items():
            yield from leaves_of(one, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for number, one in enumerate(tree):
            yield from leaves_of(one, f"{path}[{number}]")
    elif tree is not None:
        yield path, tree


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with a function applied to each leaf. None stays."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, one) for key, one in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, one) for one in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(function, one) for one in tree)
    return None if tree is None else function(tree)


def refilled(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return the tree with its leaves replaced by others, in order."""
    return mapped(lambda _: next(leaves), tree)
