"""Host memory that a client of the same host can map: a mailbox, in which nothing is computed.

Whoever maps it may change its bytes at any time, also while they are read. So plans compute on copies of
what lies there, and write results there when they are done; kernels trust what they have checked.
"""

from __future__ import annotations

from heliograph_backends.contract import Device, Usage
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType, MemoryBudget
from heliograph_backends.host_memory.sealed import SealedMemory, whole_pages, why_no_sealed
from heliograph_proto.errors import UnsupportedError

NAME = "shared"


class SharedBufferType(HostBufferType):
    """Memory that other processes can map, counted against the device's budget in whole pages.

    `free` gives the budget its bytes back at once. The pages themselves stay as long as a client has them
    mapped, and who does, only the kernel knows: a client that keeps its arrays keeps memory of the host that
    no device counts any more. Each buffer takes a descriptor; see `sealed` for how many there may be.
    """

    is_mappable = True
    makes_zeros = True

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

    def make(self, memory: SealedMemory, usage: Usage) -> SharedBuffer:
        """The buffer over new memory. Devices that reach such memory in a way of their own make another."""
        return SharedBuffer(self, memory, usage)

    def wrap(self, memory: memoryview) -> HostBuffer:
        raise UnsupportedError("memory that exists already cannot be made to be shared")


class SharedBuffer(HostBuffer):
    """A block of it."""

    buffer_type: SharedBufferType

    def __init__(self, buffer_type: SharedBufferType, sealed: SealedMemory, usage: Usage) -> None:
        self._sealed = sealed
        super().__init__(buffer_type, sealed.array, usage, on_free=self.give_back)

    def descriptor(self) -> int:
        return self._sealed.descriptor()

    def give_back(self) -> None:
        """Lets go of the memory; called once, by `free`."""
        self._sealed.close()
        self.buffer_type.budget.give(whole_pages(self._sealed.size_bytes))


def shared_buffer_types(device: Device, budget: MemoryBudget) -> tuple[SharedBufferType, ...]:
    """One buffer type, or none: see `why_no_sealed`."""
    return () if why_no_sealed() else (SharedBufferType(device, budget),)
