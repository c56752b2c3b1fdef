"""Advice for tensors and arrays of another type than a plan needs."""

from __future__ import annotations

import math
from typing import Any

from heliograph.graph.arguments import FIXED_SHAPES
from heliograph_proto.types import TensorType


def type_advice(needed: TensorType, given: TensorType) -> str:
    """Advise on a tensor of another type."""
    if needed.dtype is not given.dtype:
        return f"give it as {needed.dtype}: {new_tensor(needed)}, or convert it in the graph: hg.astype"
    return shape_advice(given.shape, needed.shape)


def shape_advice(given: tuple[int, ...], needed: tuple[int, ...]) -> str:
    """Advise on elements in another shape."""
    if math.prod(given) == math.prod(needed):
        return f"it has as many elements: reshape it, x.reshape({needed})"
    return FIXED_SHAPES


def new_tensor(type_: TensorType) -> str:
    """Return the call that makes a tensor of a type."""
    shape: Any = type_.shape
    return f"session.empty({shape}, {type_.dtype.name!r})"
