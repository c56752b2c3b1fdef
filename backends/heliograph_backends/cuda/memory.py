"""Device memory under the device's limit, pinned host memory that the device reads in place, and
pinned memory that a client maps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Chunks, Tensor, Usage
from heliograph_backends.cuda.driver.driver import Bytes, DeviceBlock
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType, MemoryBudget
from heliograph_backends.host_memory.sealed import SealedMemory
from heliograph_backends.host_memory.shared import SharedBuffer, SharedBufferType
from heliograph_proto.errors import ComputeFailedError, HeliographError, UnsupportedError
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_backends.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

#: The granularity of CuPy's pool: multiples of 512 bytes, aligned to 512.
GRAIN = 512
ALIGNMENT = 256


class CudaBufferType(BufferType):
    """The card's memory."""

    alignment = ALIGNMENT

    def __init__(self, device: CudaDevice, budget: MemoryBudget) -> None:
        self.name = device.name
        self.device: CudaDevice = device
        self.budget = budget

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> CudaBuffer:
        """Allocate device memory; the budget counts whole grains, as the pool does."""
        taken = max(1, -(-size_bytes // GRAIN)) * GRAIN
        self.budget.take(taken)
        try:
            with self.device.guarded():
                block = self.device.driver.allocate(taken)
        except BaseException:
            self.budget.give(taken)
            raise
        return CudaBuffer(self, block, size_bytes, usage)


class CudaBuffer(Buffer):
    """A block of the card's memory, which returns to the pool when nothing refers to it any
    more."""

    buffer_type: CudaBufferType

    def __init__(
        self, buffer_type: CudaBufferType, block: DeviceBlock, size_bytes: int, usage: Usage
    ) -> None:
        self.buffer_type = buffer_type
        self.device = buffer_type.device
        self.size_bytes = size_bytes
        self.usage = usage
        self.address = block.address
        self.owner: Any = block
        self._taken = block.size_bytes
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "freed" if self.owner is None else self.usage.name.lower()
        return f"<CudaBuffer {self.size_bytes} bytes, {state}>"

    def set(self, offset_bytes: int, data: memoryview) -> None:
        if data.nbytes:
            with self.device.queue() as queue:
                self.device.to_device(self.address + offset_bytes, data, queue)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        if out.nbytes:
            with self.device.queue() as queue:
                self.device.to_host(out, self.address + offset_bytes, queue)

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        if size_bytes:
            with self.device.queue() as queue:
                self.device.driver.fill(self.address + offset_bytes, value, size_bytes, queue)

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        """Write through packed bytes on the card, so that a row costs no call."""
        if not data.nbytes:
            return
        packed = self.buffer_type.allocate(data.nbytes)
        try:
            with self.device.queue() as queue:
                self.device.to_device(packed.address, data, queue)
                target, step = self.address + offset_bytes, chunks.stride_bytes
                self._copy_2d(target, step, packed.address, chunks.size_bytes, chunks)
                self.device.settle(queue)
        finally:
            packed.free()

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        if not out.nbytes:
            return
        packed = self.buffer_type.allocate(out.nbytes)
        try:
            source, step = self.address + offset_bytes, chunks.stride_bytes
            self._copy_2d(packed.address, chunks.size_bytes, source, step, chunks)
            packed.get(0, out)
        finally:
            packed.free()

    def _copy_2d(self, target: int, target_step: int, source: int, source_step: int, chunks: Chunks) -> None:
        with self.device.queue() as queue:
            self.device.driver.copy_2d(
                target, target_step, source, source_step, chunks.size_bytes, chunks.count, queue
            )

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        """Copy from this card, another one, or host memory, between contiguous tensors."""
        if not (source.is_contiguous and destination.is_contiguous):
            return False
        buffer, size = source.buffer, source.type.nbytes
        target = self.address + destination.offset_bytes
        if isinstance(buffer, CudaBuffer):
            self._copy_cards(buffer, source.offset_bytes, target, size)
        elif isinstance(buffer, HostBuffer) and buffer.is_plain:
            part = buffer.memory[source.offset_bytes : source.offset_bytes + size]
            self.set(destination.offset_bytes, part.data)
        else:
            return False
        return True

    def _copy_cards(self, source: CudaBuffer, offset_bytes: int, target: int, size_bytes: int) -> None:
        if not size_bytes:
            return
        if source.device is self.device:
            with self.device.queue() as queue:
                self.device.driver.copy(target, source.address + offset_bytes, size_bytes, queue)
            return
        with source.device.queue() as theirs:
            source.device.settle(theirs)
        with self.device.queue() as queue:
            peer = source.device.driver.number
            self.device.driver.copy_from_peer(target, source.address + offset_bytes, peer, size_bytes, queue)
            # The source may be written or freed when this returns.
            self.device.settle(queue)

    def copy_to(self, source: Tensor, destination: Tensor) -> bool:
        """Copy to host memory."""
        buffer = destination.buffer
        if not (isinstance(buffer, HostBuffer) and buffer.is_plain):
            return False
        if not (source.is_contiguous and destination.is_contiguous):
            return False
        start = destination.offset_bytes
        part = buffer.memory[start : start + source.type.nbytes]
        self.get(source.offset_bytes, part.data)
        return True

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        """Return an array of `type.dtype.storage`: bf16 as its bits, rows of blocks as contiguous
        bytes."""
        with self.device.guarded():
            return self.device.array(type, self.address + offset_bytes, strides, self.owner)

    def free(self) -> None:
        with self._lock:
            owner, self.owner = self.owner, None
        if owner is not None:
            self.buffer_type.budget.give(self._taken)


class PinnedBufferType(HostBufferType):
    """Host memory that the card can access: copies need no staging, and kernels read it in
    place."""

    def __init__(self, device: CudaDevice, budget: MemoryBudget) -> None:
        super().__init__(device, budget)
        self.name = f"{device.name}_host"
        self._cuda = device

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        self.budget.take(size_bytes)
        try:
            with self._cuda.guarded():
                memory = self._cuda.driver.allocate_pinned(max(1, size_bytes))[:size_bytes]
        except BaseException:
            self.budget.give(size_bytes)
            raise
        forget = self._cuda.staging.pinned.add(memory)

        def free() -> None:
            forget()
            self.budget.give(size_bytes)

        return HostBuffer(self, memory, usage, on_free=free)

    def wrap(self, memory: memoryview) -> HostBuffer:
        """Return a buffer over memory of this process, pinned in place until the buffer is
        freed."""
        array: Bytes = np.frombuffer(memory, np.uint8)
        if not array.nbytes:
            return self.allocate(0)
        if not array.flags.writeable:
            raise UnsupportedError("read-only memory cannot be pinned", advice="copy it first")
        return HostBuffer(self, array, Usage.ANY, on_free=pinned_in_place(self._cuda, array))


class CudaSharedBufferType(SharedBufferType):
    """Host memory that a client can map, pinned in place. Bytes move between the client and the
    card by the client's own stores and one copy by the card. Nothing is computed in it: see
    `cpu.shared`."""

    def __init__(self, device: CudaDevice, budget: MemoryBudget) -> None:
        super().__init__(device, budget)
        self._cuda = device

    def make(self, memory: SealedMemory, usage: Usage) -> SharedBuffer:
        return CudaSharedBuffer(self, self._cuda, memory, usage)


class CudaSharedBuffer(SharedBuffer):
    """A block of shared memory. If the system cannot pin it, copies go through staging."""

    def __init__(
        self, buffer_type: SharedBufferType, device: CudaDevice, sealed: SealedMemory, usage: Usage
    ) -> None:
        """Pin the memory. Raises DeviceLostError, OutOfMemoryError."""
        super().__init__(buffer_type, sealed, usage)
        self._unpin: Callable[[], None] | None = None
        try:
            self._unpin = pinned_in_place(device, self.memory) if self.size_bytes else None
        except (ComputeFailedError, UnsupportedError) as error:
            logger.warning("memory that a client maps is copied through staging: %s", error.message)

    def give_back(self) -> None:
        if self._unpin is not None:
            self._unpin()
        super().give_back()


def pinned_in_place(device: CudaDevice, memory: Bytes) -> Callable[[], None]:
    """Pin memory of this process in place. Returns a call that unpins it, once.

    Raises DeviceLostError, OutOfMemoryError, ComputeFailedError, UnsupportedError.
    """
    with device.guarded():
        release = device.driver.register(memory)
    forget = device.staging.pinned.add(memory)

    def unpin() -> None:
        forget()
        try:
            with device.guarded(alive=False):
                release()
        except HeliographError as error:
            # A lost device holds no memory, and the host's must still be given back.
            logger.debug("unpinning memory failed: %s", error)

    return unpin


def can_reach(tensor: Tensor, device: CudaDevice) -> bool:
    """True if the device's kernels can use a tensor's memory in place."""
    kind = tensor.buffer.buffer_type
    return kind.device is device and isinstance(kind, CudaBufferType | PinnedBufferType)


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's first byte."""
    buffer = tensor.buffer
    assert isinstance(buffer, CudaBuffer | HostBuffer), "its memory has an address"
    return buffer.address + tensor.offset_bytes


def owner_of(tensor: Tensor) -> Any:
    """Return the object that owns a tensor's memory."""
    buffer = tensor.buffer
    return buffer.owner if isinstance(buffer, CudaBuffer) else getattr(buffer, "memory", None)
