"""Aligned memory, and weights packed for the matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .layout import CACHE_LINE_BYTES, PANEL_COLUMNS

# A transposed panel is written in whole groups of sixteen rows, so the last one may spill.
_SPILL_BYTES = 16 * PANEL_COLUMNS * 4


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes that start on a cache line."""
    raw = np.empty(size + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[start : start + size]


def aligned_words(count: int) -> NDArray[np.int64]:
    """Return `count` int64 zeros that start on a cache line."""
    words = aligned_bytes(8 * count).view(np.int64)
    words.fill(0)
    return words


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float32 matrix [depth, columns] as panels `[columns/32][depth][32]`, for all plans and
    shapes.
    """

    depth: int
    columns: int
    panels: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """The base address to bind a `PackedOperand`'s slot to."""
        return int(self.panels.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return int(self.panels.nbytes)


def pack_weight(matrix: NDArray[np.float32]) -> PackedWeight:
    """Pack a float32 matrix [depth, columns] of any strides. Needs numba; ValueError for anything
    else.
    """
    from .native import entries

    if matrix.ndim != 2 or matrix.dtype != np.float32:
        raise ValueError(f"a weight is a float32 matrix, not {matrix.dtype}{list(matrix.shape)}")
    depth, columns = matrix.shape
    panel_bytes = depth * PANEL_COLUMNS * 4
    panels = aligned_bytes(-(-columns // PANEL_COLUMNS) * panel_bytes + _SPILL_BYTES)
    row_step, column_step = matrix.strides
    entries().pack_matrix(
        panels.ctypes.data, panel_bytes, matrix.ctypes.data, row_step, column_step, depth, columns
    )
    return PackedWeight(depth, columns, panels)
