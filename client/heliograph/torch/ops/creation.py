"""Rules of ops that make tensors; those of constants alone are computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.torch.node import Node, Number
from heliograph.torch.rules import rule


@rule("full")
def _full(node: Node, shape: Sequence[int], number: Number, *_: Any) -> hg.Value:
    return node.full([int(one) for one in shape], number, node.dtype())


@rule("full_like", "fill.Scalar")
def _full_like(node: Node, x: hg.Value, number: Number, *_: Any) -> hg.Value:
    return node.full(x.shape, number, node.dtype())


@rule("fill.Tensor")
def _fill(node: Node, x: hg.Value, number: hg.Value) -> hg.Value:
    return hg.broadcast_to(number, x.shape)


@rule("empty_like", "zeros_like", "new_zeros")
def _zeros_like(node: Node, x: hg.Value, *_: Any) -> hg.Value:
    return node.full(x.shape, 0, node.dtype())


@rule("ones_like")
def _ones_like(node: Node, x: hg.Value, *_: Any) -> hg.Value:
    return node.full(x.shape, 1, node.dtype())


@rule("empty", "empty_strided", "empty_permuted", "zeros")
def _zeros(node: Node, shape: Sequence[int], *_: Any) -> hg.Value:
    return node.full([int(one) for one in shape], 0, node.dtype())


@rule("ones")
def _ones(node: Node, shape: Sequence[int], *_: Any) -> hg.Value:
    return node.full([int(one) for one in shape], 1, node.dtype())


@rule("scalar_tensor")
def _scalar(node: Node, number: Number, *_: Any) -> hg.Value:
    return node.full((), number, node.dtype())
