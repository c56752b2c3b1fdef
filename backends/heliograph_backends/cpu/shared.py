"""Host memory that a client of the same host can map: a mailbox, in which nothing is computed.

Whoever maps it may change its bytes at any time, also while they are read. So plans compute on copies of
what lies there, and write results there when they are done; kernels trust what they have checked.
"""

from __future__ import annotations

from heliograph_backends.contract import Device, Usage
from heliograph_backends.cpu.memory import Budget, HostBuffer, HostBufferType
from heliograph_backends.sealed import SealedMemory, why_no_sealed
from heliograph_proto.errors import UnsupportedError

NAME = "shared"


class SharedBufferType(HostBufferType):
    """Memory that other processes can map, counted against the device's budget."""

    is_mappable = True
    makes_zeros = True

    def __init__(self, device: Device, budget: Budget) -> None:
        super().__init__(device, budget)
        self.name = NAME

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> SharedBuffer:
        self.budget.take(size_bytes)
        try:
            memory = SealedMemory(size_bytes)
        except BaseException:
            self.budget.give(size_bytes)
            raise
        return SharedBuffer(self, memory, usage)

    def wrap(self, memory: memoryview) -> HostBuffer:
        raise UnsupportedError("memory that exists already cannot be made to be shared")


class SharedBuffer(HostBuffer):
    """A block of it."""

    buffer_type: SharedBufferType

    def __init__(self, buffer_type: SharedBufferType, sealed: SealedMemory, usage: Usage) -> None:
        self.sealed = sealed
        super().__init__(buffer_type, sealed.array, usage, on_free=self._give_back)

    def descriptor(self) -> int:
        return self.sealed.descriptor()

    def _give_back(self) -> None:
        self.sealed.close()
        self.buffer_type.budget.give(self.sealed.size_bytes)


def shared_buffer_types(device: Device, budget: Budget) -> tuple[SharedBufferType, ...]:
    """One buffer type, or none: see `why_no_sealed`."""
    return () if why_no_sealed() else (SharedBufferType(device, budget),)
