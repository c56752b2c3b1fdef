"""Products of stored tensors with rows, in f32 or in integers."""

from __future__ import annotations

import heliograph as hg
from heliograph_proto.quantization import ROUNDED_ROWS


def multiply(weight: hg.Value, x: hg.Value, *, rounds_rows: bool) -> hg.Value:
    """Multiply rows [n, k] by the transpose of a matrix [m, k]."""
    return hg.ops.mul_mat(weight, _rounded(weight, x, rounds_rows=rounds_rows))


def multiply_chosen(weight: hg.Value, x: hg.Value, chosen: hg.Value, *, rounds_rows: bool) -> hg.Value:
    """Multiply rows [n, 1 or used, k] by the matrices that each token chose: [n, used, m]."""
    return hg.ops.mul_mat_id(weight, _rounded(weight, x, rounds_rows=rounds_rows), chosen)


def _rounded(weight: hg.Value, x: hg.Value, *, rounds_rows: bool) -> hg.Value:
    """Return the rows as the product takes them. Those for other types stay as they are."""
    return hg.astype(x, "q8_0") if rounds_rows and weight.dtype.name in ROUNDED_ROWS else x
