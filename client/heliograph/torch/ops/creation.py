"""Rules of ops that make tensors; those of constants alone are computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.torch.node import Node, Number, shape_of
from heliograph.torch.rules import rule


@rule("full", "full_like")
def _full(node: Node, like: hg.Value | Sequence[int], number: Number, *_: Any) -> hg.Value:
    return node.full(shape_of(like), number, node.dtype())


@rule("empty", "empty_strided", "empty_permuted")
def _zeros(node: Node, shape: Sequence[int], *_: Any) -> hg.Value:
    return node.full(shape_of(shape), 0, node.dtype())


@rule("scalar_tensor")
def _scalar(node: Node, number: Number, *_: Any) -> hg.Value:
    return node.full((), number, node.dtype())
