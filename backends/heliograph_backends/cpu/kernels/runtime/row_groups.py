"""The order of stored weights whose rows lie in groups of sixteen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.cpu.kernels.program.stored_types import FORMS, GROUP_ROWS, Stored
from heliograph_backends.cpu.kernels.runtime.memory import PackedForm
from heliograph_backends.host_memory.order import Bytes

#: The most bytes that are reordered together, unless a group has more.
_PIECE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class RowGroups:
    """An order of the bytes of a stored matrix, or of several: groups of sixteen rows.

    In a group, the blocks of all rows with one number are adjacent: `halves` vectors of 16 bits,
    `exponents` vectors of bytes, then vectors of 32 bits, each with the same unit of sixteen rows.
    It takes the bytes of the matrix, and is made in place. Methods take all of its bytes.
    """

    kind: Stored
    rows: int
    #: Blocks in a row.
    blocks: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.blocks * FORMS[self.kind].block_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all rows."""
        return self.rows * self.row_bytes

    def pack(self, memory: Bytes) -> None:
        """Bring the rows from their own order into this one."""
        for groups in self._pieces(memory):
            self._pack(groups, groups.copy())

    def unpack(self, memory: Bytes) -> None:
        """Bring the rows from this order into their own."""
        for groups in self._pieces(memory):
            groups[:] = self._unpacked(groups)

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        """Read bytes of the rows in their own order."""
        target = np.frombuffer(out, np.uint8)
        for groups, here, there in self._parts(memory, offset_bytes, out.nbytes):
            target[there] = self._unpacked(groups)[here]

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        """Write bytes of the rows, given in their own order."""
        source = np.frombuffer(data, np.uint8)
        for groups, here, there in self._parts(memory, offset_bytes, data.nbytes):
            rows = self._unpacked(groups)
            rows[here] = source[there]
            self._pack(groups, rows)

    @property
    def _piece(self) -> int:
        """The bytes of the groups that are reordered together."""
        group = GROUP_ROWS * self.row_bytes
        return max(1, _PIECE_BYTES // group) * group

    def _pieces(self, memory: Bytes) -> Iterator[Bytes]:
        for start in range(0, self.size_bytes, self._piece):
            yield memory[start : start + self._piece]

    def _parts(self, memory: Bytes, offset: int, size: int) -> Iterator[tuple[Bytes, slice, slice]]:
        """Yield the groups that have some of these bytes, with the places of the bytes in the
        groups and among them."""
        whole, end = self._piece, offset + size
        for start in range(offset // whole * whole, end, whole):
            first, last = max(start, offset), min(start + whole, end)
            here, there = slice(first - start, last - start), slice(first - offset, last - offset)
            yield memory[start : start + whole], here, there

    def _pack(self, groups: Bytes, rows: Bytes) -> None:
        """Write rows into groups."""
        for own, unit in self._units(groups, rows):
            own[:] = unit

    def _unpacked(self, groups: Bytes) -> Bytes:
        """Return the rows of groups."""
        rows = np.empty_like(groups)
        for own, unit in self._units(groups, rows):
            unit[:] = own
        return rows

    def _units(self, groups: Bytes, rows: Bytes) -> Iterator[tuple[Any, Any]]:
        """Yield views of the same units of groups and of their rows, as [group, block, unit, row];
        the first ones have no dimension of units."""
        form = FORMS[self.kind]
        blocks = groups.reshape(-1, self.blocks, GROUP_ROWS * form.block_bytes)
        own = rows.reshape(-1, GROUP_ROWS, self.blocks, form.block_bytes)
        for number, offset in enumerate(form.halves):
            shorts = blocks[:, :, 2 * GROUP_ROWS * number :][:, :, : 2 * GROUP_ROWS].view(np.uint16)
            yield shorts, own[..., offset : offset + 2].view(np.uint16)[..., 0].transpose(0, 2, 1)
        for place in range(form.exponents):
            yield blocks[:, :, GROUP_ROWS * place :][:, :, :GROUP_ROWS], own[..., place].transpose(0, 2, 1)
        words = (form.block_bytes - form.lead_bytes) // 4
        first = 0 if form.halves[:1] > (0,) else form.lead_bytes
        if words:
            ours = blocks[:, :, GROUP_ROWS * form.lead_bytes :].view(np.uint32)
            theirs = own[..., first : first + 4 * words].view(np.uint32)
            yield ours.reshape(*blocks.shape[:2], words, GROUP_ROWS), theirs.transpose(0, 2, 3, 1)


#: The forms of weights that only products read.
WeightForm: TypeAlias = PackedForm | RowGroups
