"""Aligned memory, and the order of weights that are packed for the matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES, PANEL_COLUMNS

Bytes: TypeAlias = NDArray[np.uint8]

_PANEL_ROW_BYTES = 4 * PANEL_COLUMNS
#: Transposed panels are written in whole groups of so many rows.
_GROUP_ROWS = 16
#: The most bytes that are moved through other memory at once, unless one row has more.
_PIECE_BYTES = 2**20


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
    """Working memory of programs that run one after the other: a block for each worker.

    A plan has a block for the worker that leads its runs. Helpers have theirs by themselves, and
    use them for the programs of all plans, since they run one at a time.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        """The bytes of each block."""
        self._blocks: list[NDArray[np.uint8]] = []
        self._table = aligned_words(0)

    def require(self, size: int) -> None:
        """Require blocks of at least `size` bytes; not during a run."""
        if size > self.size_bytes:
            self.size_bytes = size
            self._blocks.clear()

    def reserve(self, workers: int) -> int:
        """Allocate up to `workers` blocks, and return the address of the table of their addresses,
        which the next growth replaces."""
        if len(self._blocks) < workers:
            while len(self._blocks) < workers:
                self._blocks.append(aligned_bytes(self.size_bytes))
            self._table = np.array([block.ctypes.data for block in self._blocks], np.int64)
        return int(self._table.ctypes.data)

    @property
    def addresses(self) -> list[int]:
        """The address of each worker's block."""
        return [int(block.ctypes.data) for block in self._blocks]


@dataclass(frozen=True, slots=True)
class PackedForm:
    """An order of the bytes of a float32 matrix [depth, columns]: panels `[columns/32][depth][32]`,
    and one of `[depth][columns % 32]` for the columns that are left.

    It takes the bytes of the matrix itself, whose own order is by rows, or by columns. Memory is
    changed in place. Methods take its bytes, which are all that a matrix has. Needs numba.
    """

    depth: int
    columns: int
    #: True if the matrix's own order is by columns: each one is contiguous.
    by_columns: bool

    @property
    def size_bytes(self) -> int:
        """The size of the matrix."""
        return 4 * self.depth * self.columns

    @property
    def _panels(self) -> int:
        return self.columns // PANEL_COLUMNS

    @property
    def _left(self) -> int:
        """The columns of the last, narrow panel."""
        return self.columns % PANEL_COLUMNS

    def pack(self, memory: Bytes) -> None:
        """Bring the matrix from its own order into this one."""
        whole, last = self._parts(memory)
        if self.by_columns:
            scratch = aligned_bytes(-(-self.depth // _GROUP_ROWS) * _GROUP_ROWS * _PANEL_ROW_BYTES)
            _entries().pack_columns(memory.ctypes.data, self.depth, self._panels, scratch.ctypes.data)
            last[:] = last.reshape(self._left, self.depth).T.ravel()
            return
        rows, width = memory.view(np.float32).reshape(self.depth, self.columns), self.columns - self._left
        if self._left:
            kept = rows[:, width:].ravel()
            for first, count in self._pieces():
                whole[first * width :][: count * width] = rows[first : first + count, :width].ravel()
            last[:] = kept
        self._transpose(memory, self.depth, self._panels)

    def unpack(self, memory: Bytes) -> None:
        """Bring the matrix from this order back into its own."""
        whole, last = self._parts(memory)
        if self.by_columns:
            for panel in whole.reshape(self._panels, self.depth * PANEL_COLUMNS):
                panel[:] = panel.reshape(self.depth, PANEL_COLUMNS).T.ravel()
            last[:] = last.reshape(self.depth, self._left).T.ravel()
            return
        self._transpose(memory, self._panels, self.depth)
        rows, width = memory.view(np.float32).reshape(self.depth, self.columns), self.columns - self._left
        if self._left:
            kept = last.copy()
            for first, count in reversed(list(self._pieces())):
                rows[first : first + count, :width] = (
                    whole[first * width :][: count * width].copy().reshape(count, width)
                )
            rows[:, width:] = kept.reshape(self.depth, self._left)

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        """Read bytes of the matrix in its own order."""
        target = np.frombuffer(out, np.uint8)
        for start, wide, last in self._rows(memory, offset_bytes, out.nbytes):
            piece = _joined(wide, last).view(np.uint8).ravel()
            here, there = _overlap(start, piece.nbytes, offset_bytes, out.nbytes)
            target[there] = piece[here]

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        """Write bytes of the matrix, given in its own order."""
        source = np.frombuffer(data, np.uint8)
        for start, wide, last in self._rows(memory, offset_bytes, data.nbytes):
            rows, width = _joined(wide, last), wide.shape[1] * wide.shape[2]
            here, there = _overlap(start, rows.nbytes, offset_bytes, data.nbytes)
            rows.view(np.uint8).reshape(-1)[here] = source[there]
            wide[...] = rows[:, :width].reshape(wide.shape)
            last[...] = rows[:, width:]

    def _rows(self, memory: Bytes, offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield contiguous rows of the matrix in its own order that cover these bytes, a few at a
        time.

        The offset of the first one, and views: [rows, panels, columns] of the elements in whole
        panels, [rows, columns] of those in the last one.
        """
        whole, narrow = self._parts(memory)
        panels = whole.reshape(self._panels, self.depth, PANEL_COLUMNS)
        last = narrow.reshape(self.depth, self._left)
        row_bytes = 4 * (self.depth if self.by_columns else self.columns)
        first, end = offset_bytes // row_bytes, -(-(offset_bytes + size_bytes) // row_bytes)
        if not self.by_columns:
            step = max(1, _PIECE_BYTES // row_bytes)
            for row in range(first, end, step):
                rows = slice(row, min(row + step, end))
                yield row * row_bytes, panels[:, rows].transpose(1, 0, 2), last[rows]
            return
        for number in range(first // PANEL_COLUMNS, -(-end // PANEL_COLUMNS)):
            found = panels[number].T if number < self._panels else last.T
            yield number * PANEL_COLUMNS * row_bytes, found[:, None, :], found[:, :0]

    def _parts(self, memory: Bytes) -> tuple[Any, Any]:
        """Return the elements of the whole panels, and those of the last one."""
        cut = self._panels * PANEL_COLUMNS * self.depth
        elements = memory.view(np.float32)
        return elements[:cut], elements[cut:]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first row and number of rows of pieces that are moved at once."""
        step = max(1, _PIECE_BYTES // (4 * self.columns))
        for first in range(0, self.depth, step):
            yield first, min(step, self.depth - first)

    @staticmethod
    def _transpose(memory: Bytes, rows: int, columns: int) -> None:
        if min(rows, columns) > 1:
            visited, spare = np.zeros(rows * columns // 64 + 1, np.int64), aligned_bytes(_PANEL_ROW_BYTES)
            _entries().transpose_rows(
                memory.ctypes.data, rows, columns, visited.ctypes.data, spare.ctypes.data
            )


def _joined(wide: Any, last: Any) -> Any:
    """Return a copy of rows of which `PackedForm._rows` gave views."""
    flat = wide.reshape(len(wide), wide.shape[1] * wide.shape[2])
    return np.ascontiguousarray(np.concatenate([flat, last], axis=1))


def _overlap(start: int, size: int, other_start: int, other_size: int) -> tuple[slice, slice]:
    """Return the common bytes of two ranges, as a part of each one."""
    begin, end = max(start, other_start), min(start + size, other_start + other_size)
    return slice(begin - start, end - start), slice(begin - other_start, end - other_start)


def _entries() -> Any:
    from heliograph_backends.cpu.kernels.runtime.native import entries

    return entries()
