"""The difference of two results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize
from heliograph_proto.types import DType

Array = np.ndarray[Any, Any]

#: Elements, or blocks, that are compared at once, so that temporaries in f64 stay small.
_PART = 2**18


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of `b` from `a`, the reference."""

    #: The sum of squared differences over the sum of squares of `a`, of elements that are finite in
    #: both; where `a` is all zeros, the sum of squared differences.
    nmse: float
    #: The largest difference of two finite elements.
    max_difference: float
    #: How many elements are not equal; NaN equals NaN.
    different: int
    #: How many elements are NaN in one alone.
    nan_mismatches: int
    #: How many elements are infinite in one, and not the same in the other.
    infinity_mismatches: int

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph.comparison.notebook_view import difference_view

        return difference_view(self)

    def within(self, tolerance: float) -> bool:
        """True if NaN and infinities are in the same places and the error is small enough.

        With a tolerance of 0 every element must be equal.
        """
        if self.different == 0:
            return True
        mismatches = self.nan_mismatches + self.infinity_mismatches
        return mismatches == 0 and tolerance > 0 and self.nmse <= tolerance


def difference(a: Array, b: Array, dtype: DType) -> Difference:
    """The difference of raw elements (`DType.storage`) of one type and shape, computed in f64.

    Rows of blocks count as the numbers that they stand for.
    """
    unit = dtype.block_bytes if dtype.kind == "quantized" else 1
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    squares = scale = largest = 0.0
    counts = [0, 0, 0]
    for start in range(0, flat_a.size, _PART * unit):
        part = slice(start, start + _PART * unit)
        found = _part(_numbers(flat_a[part], dtype), _numbers(flat_b[part], dtype))
        squares, scale, largest = squares + found[0], scale + found[1], max(largest, found[2])
        counts = [total + more for total, more in zip(counts, found[3:], strict=True)]
    return Difference(_ratio(squares, scale), largest, *counts)


def _numbers(raw: Array, dtype: DType) -> Array:
    if dtype.kind == "quantized":
        return dequantize(raw, dtype)
    return blocks.from_bits(raw) if dtype.name == "bf16" else raw


def _part(a: Array, b: Array) -> tuple[float, float, float, int, int, int]:
    """Squared differences, squares of `a`, the largest difference, and the three counts."""
    unequal = a != b
    if a.dtype.kind != "f":
        error = np.abs(a.astype(np.float64) - b.astype(np.float64))
        scale = np.square(a.astype(np.float64)).sum()
        return float(np.square(error).sum()), float(scale), _largest(error), int(unequal.sum()), 0, 0
    nan = np.isnan(a), np.isnan(b)
    unequal &= ~(nan[0] & nan[1])
    nan_mismatches = int((nan[0] ^ nan[1]).sum())
    infinite = (np.isinf(a) | np.isinf(b)) & unequal & ~(nan[0] ^ nan[1])
    finite = np.isfinite(a) & np.isfinite(b)
    wide_a, wide_b = a[finite].astype(np.float64), b[finite].astype(np.float64)
    # Squares of f64 may overflow; the ratio is then NaN or infinite, which no tolerance admits.
    with np.errstate(over="ignore"):
        error = np.abs(wide_a - wide_b)
        sums = float(np.square(error).sum()), float(np.square(wide_a).sum())
    return *sums, _largest(error), int(unequal.sum()), nan_mismatches, int(infinite.sum())


def _largest(error: Array) -> float:
    return float(error.max(initial=0.0))


def _ratio(squares: float, scale: float) -> float:
    if squares == 0.0:
        return 0.0
    return math.inf if math.isinf(squares) else squares / (scale or 1.0)
