"""Host memory that a client of the same host can map; nothing computes in it.

Any process that maps it may change its bytes at any time, even during a read. Plans therefore
compute on copies and write results when they are done; kernels rely on values that they have
checked.
"""

from __future__ import annotations

from heliograph_backends.contract import Abort, Device, Usage
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType, MemoryBudget
from heliograph_backends.host_memory.sealed import SealedMemory, whole_pages, why_no_sealed
from heliograph_proto.errors import UnsupportedError

NAME = "shared"


class SharedBufferType(HostBufferType):
    """Memory that other processes can map, counted against the device's budget in whole pages.

    `free` returns the bytes to the budget at once. The pages stay as long as a client maps them,
    which only the kernel knows: clients that keep arrays keep host memory that no device counts.
    Each buffer takes a descriptor; `sealed` bounds their number.
    """

    is_mappable = True

    def __init__(self, device: Device, budget: MemoryBudget) -> None:
        super().__init__(device, budget)
        self.name = NAME

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> SharedBuffer:
        taken_bytes = whole_pages(size_bytes)
        self.budget.take(taken_bytes)
        memory: SealedMemory | None = None
        try:
            memory = SealedMemory(size_bytes)
            return self.make(memory, usage)
        except BaseException:
            if memory is not None:
                memory.close()
            self.budget.give(taken_bytes)
            raise

    def zeros(self, size_bytes: int, usage: Usage = Usage.ANY, abort: Abort | None = None) -> SharedBuffer:
        return self.allocate(size_bytes, usage)

    def make(self, memory: SealedMemory, usage: Usage) -> SharedBuffer:
        """Return a buffer over new memory. Overridden by devices with their own access to it."""
        return SharedBuffer(self, memory, usage)

    def wrap(self, memory: memoryview) -> HostBuffer:
        raise UnsupportedError("existing memory cannot become shared memory")


class SharedBuffer(HostBuffer):
    """A block of shared memory."""

    buffer_type: SharedBufferType

    def __init__(self, buffer_type: SharedBufferType, sealed: SealedMemory, usage: Usage) -> None:
        self._sealed = sealed
        super().__init__(buffer_type, sealed.array, usage, on_free=self.give_back)

    def descriptor(self) -> int:
        return self._sealed.descriptor()

    def give_back(self) -> None:
        """Release the memory; called once, by `free`."""
        self._sealed.close()
        self.buffer_type.budget.give(whole_pages(self._sealed.size_bytes))


def shared_buffer_types(device: Device, budget: MemoryBudget) -> tuple[SharedBufferType, ...]:
    """Return the buffer type, or none if `why_no_sealed` gives a reason."""
    return () if why_no_sealed() else (SharedBufferType(device, budget),)
