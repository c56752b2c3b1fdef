"""Aligned memory, and weights packed for the matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES, PANEL_COLUMNS

# Transposed panels are written in whole groups of sixteen rows, which may extend past the last
# panel.
_SPILL_BYTES = 16 * PANEL_COLUMNS * 4


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes that start at a cache line."""
    raw = np.empty(size + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[start : start + size]


def aligned_words(count: int) -> NDArray[np.int64]:
    """Return `count` int64 zeros that start at a cache line."""
    words = aligned_bytes(8 * count).view(np.int64)
    words.fill(0)
    return words


class Scratch:
    """Working memory of programs that run one after the other: a block for each worker."""

    def __init__(self) -> None:
        self._size = 0
        self._blocks: list[NDArray[np.uint8]] = []
        self.addresses: list[int] = []
        """The address of each worker's block, leader first."""
        self.table = aligned_words(0)
        """The addresses as words; replaced when there are more."""

    def require(self, size: int) -> None:
        """Require blocks of at least `size` bytes; before the first run."""
        if size > self._size:
            self._size = size
            self._blocks.clear()
            self.addresses.clear()

    def reserve(self, workers: int) -> None:
        """Allocate up to `workers` blocks."""
        while len(self._blocks) < workers:
            self._blocks.append(aligned_bytes(self._size))
            self.addresses.append(int(self._blocks[-1].ctypes.data))
        if len(self.table) < len(self.addresses):
            self.table = np.array(self.addresses, np.int64)


def packed_bytes(depth: int, columns: int) -> int:
    """Return the bytes of a packed weight, padded to whole panels."""
    return -(-columns // PANEL_COLUMNS) * depth * PANEL_COLUMNS * 4 + _SPILL_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float32 matrix [depth, columns] as panels `[columns/32][depth][32]`, for all plans and
    shapes."""

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
    """Pack a float32 matrix [depth, columns] of any strides. Needs numba. Raises ValueError for
    other arrays.
    """
    from heliograph_backends.cpu.kernels.runtime.native import entries

    if matrix.ndim != 2 or matrix.dtype != np.float32:
        raise ValueError(f"a weight is a float32 matrix, not {matrix.dtype}{list(matrix.shape)}")
    depth, columns = matrix.shape
    panel_bytes = depth * PANEL_COLUMNS * 4
    panels = aligned_bytes(packed_bytes(depth, columns))
    row_step, column_step = matrix.strides
    entries().pack_matrix(
        panels.ctypes.data, panel_bytes, matrix.ctypes.data, row_step, column_step, depth, columns
    )
    return PackedWeight(depth, columns, panels)
