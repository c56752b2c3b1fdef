"""Host memory in which plans lie one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.contract import Arena, Usage
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType


class HostArena(Arena):
    """Blocks that it lends to plans and never gives away. Raises OutOfMemoryError, with nothing taken."""

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
        """What plans can lie in."""
        return self._blocks

    def give(self, blocks: Sequence[HostBuffer]) -> list[HostBuffer]:
        """Nothing: what was borrowed stays the arena's."""
        return []

    def free(self) -> None:
        for block in self._blocks:
            block.free()
        self._blocks.clear()


def lender_of(arena: Arena) -> HostArena:
    """An arena of host memory."""
    assert isinstance(arena, HostArena), "an arena of another kind of device"
    return arena
