"""The order of stored weights whose rows lie in groups of sixteen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.cpu.kernels.program.stored_types import FORMS, GROUP_ROWS, Stored
from heliograph_backends.cpu.kernels.runtime.memory import PackedForm
from heliograph_backends.host_memory.order import Bytes


@dataclass(frozen=True, slots=True)
class RowGroups:
    """An order of the bytes of a stored matrix, or of several: groups of sixteen rows.

    In a group, the blocks of all rows with one number are adjacent: `halves` vectors of 16 bits,
    then vectors of 32 bits, each with the same unit of sixteen rows. It takes the bytes of the
    matrix, and is made in place. Methods take all of its bytes.
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
        for group in self._groups(memory):
            self._pack(group, group.reshape(GROUP_ROWS, self.row_bytes).copy())

    def unpack(self, memory: Bytes) -> None:
        """Bring the rows from this order into their own."""
        for group in self._groups(memory):
            group[:] = self._unpacked(group).ravel()

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        """Read bytes of the rows in their own order."""
        target = np.frombuffer(out, np.uint8)
        for group, here, there in self._parts(memory, offset_bytes, out.nbytes):
            target[there] = self._unpacked(group).ravel()[here]

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        """Write bytes of the rows, given in their own order."""
        source = np.frombuffer(data, np.uint8)
        for group, here, there in self._parts(memory, offset_bytes, data.nbytes):
            rows = self._unpacked(group)
            rows.reshape(-1)[here] = source[there]
            self._pack(group, rows)

    def _groups(self, memory: Bytes) -> Iterator[Bytes]:
        size = GROUP_ROWS * self.row_bytes
        for start in range(0, self.size_bytes, size):
            yield memory[start : start + size]

    def _parts(self, memory: Bytes, offset: int, size: int) -> Iterator[tuple[Bytes, slice, slice]]:
        """Yield the groups that have some of these bytes, with the places of the bytes in the group
        and among them."""
        whole, end = GROUP_ROWS * self.row_bytes, offset + size
        for start in range(offset // whole * whole, end, whole):
            first, last = max(start, offset), min(start + whole, end)
            here, there = slice(first - start, last - start), slice(first - offset, last - offset)
            yield memory[start : start + whole], here, there

    def _pack(self, group: Bytes, rows: Bytes) -> None:
        """Write rows into a group."""
        for own, unit in self._units(group, rows):
            own[:] = unit

    def _unpacked(self, group: Bytes) -> Bytes:
        """Return a group's rows."""
        rows = np.empty((GROUP_ROWS, self.row_bytes), np.uint8)
        for own, unit in self._units(group, rows):
            unit[:] = own
        return rows

    def _units(self, group: Bytes, rows: Bytes) -> Iterator[tuple[Any, Any]]:
        """Yield views of the same units of a group and of its rows, as [block, unit, row]."""
        form = FORMS[self.kind]
        blocks = group.reshape(self.blocks, GROUP_ROWS * form.block_bytes)
        own = rows.reshape(GROUP_ROWS, self.blocks, form.block_bytes)
        for number, offset in enumerate(form.halves):
            shorts = blocks[:, 2 * GROUP_ROWS * number :][:, : 2 * GROUP_ROWS].view(np.uint16)
            yield shorts, own[:, :, offset : offset + 2].view(np.uint16)[:, :, 0].T
        short_bytes = 2 * len(form.halves)
        words = (form.block_bytes - short_bytes) // 4
        first = 0 if form.halves[:1] > (0,) else short_bytes
        if words:
            ours = blocks[:, GROUP_ROWS * short_bytes :].view(np.uint32).reshape(self.blocks, words, -1)
            theirs = own[:, :, first : first + 4 * words].view(np.uint32)
            yield ours, theirs.transpose(1, 2, 0)


#: The forms of weights that only products read.
WeightForm: TypeAlias = PackedForm | RowGroups
