"""Products of a model's stored tensors with rows, in f32 or in integers."""

from __future__ import annotations

from typing import Literal, TypeAlias

import heliograph as hg
from heliograph_proto.quantization import ROUNDED_ROWS

#: The precision of rows in products with blocks: "f32", or "q8", which rounds them to q8_0.
Activations: TypeAlias = Literal["f32", "q8"]


def multiply(weight: hg.Value, x: hg.Value, activations: Activations) -> hg.Value:
    """Multiply rows [n, k] by the transpose of a matrix [m, k]."""
    return hg.ops.mul_mat(weight, _rounded(weight, x, activations))


def multiply_chosen(weight: hg.Value, x: hg.Value, chosen: hg.Value, activations: Activations) -> hg.Value:
    """Multiply rows [n, 1 or used, k] by the matrices that each token chose: [n, used, m]."""
    return hg.ops.mul_mat_id(weight, _rounded(weight, x, activations), chosen)


def _rounded(weight: hg.Value, x: hg.Value, activations: Activations) -> hg.Value:
    """Return the rows as the product takes them. Those for other types stay as they are."""
    is_rounded = activations == "q8" and weight.dtype.name in ROUNDED_ROWS
    return hg.astype(x, "q8_0") if is_rounded else x
