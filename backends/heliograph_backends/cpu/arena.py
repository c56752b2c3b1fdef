"""Arenas of host memory, which plans use one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.contract import Arena, Buffer, Usage
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType


class HostArena(Arena):
    """Blocks of host memory that are lent to plans.

    Raises OutOfMemoryError, and then takes no memory.
    """

    def __init__(self, memory: HostBufferType, block_bytes: Sequence[int]) -> None:
        self.size_bytes = sum(block_bytes)
        self._blocks: list[HostBuffer] = []
        try:
            self._blocks.extend(memory.allocate(size, Usage.COMPUTE) for size in block_bytes)
        except BaseException:
            self.free()
            raise

    def __repr__(self) -> str:
        return f"<HostArena {self.size_bytes:,} bytes in {len(self._blocks)} blocks>"

    @property
    def blocks(self) -> Sequence[HostBuffer]:
        """The blocks that plans can use."""
        return self._blocks

    def give(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        """Return nothing: the arena keeps its blocks."""
        return []

    def free(self) -> None:
        for block in self._blocks:
            block.free()
        self._blocks.clear()


def lender_of(arena: Arena) -> HostArena:
    """Return an arena of host memory with its own type."""
    assert isinstance(arena, HostArena), "an arena of another kind of device"
    return arena
