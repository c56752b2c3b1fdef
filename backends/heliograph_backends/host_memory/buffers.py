"""Host memory with a budget: the CPU's buffer type and buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Chunks, Device, Tensor, Usage, access
from heliograph_backends.host_memory.huge_pages import HugePages
from heliograph_backends.host_memory.order import ByteOrder, Bytes, Form, Held
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.types import TensorType

ALIGNMENT = 64
#: The most bytes that are copied through other memory at once.
PIECE_BYTES = 2**20
#: Bytes after a block that may be read: kernels read whole vectors of a weight's last, narrow panel.
READ_BEYOND_BYTES = 128


#: The files with a control group's memory limit, in version 2 and version 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: The memory of a daemon beside its tensors: code, compiler, and transfers in flight.
PROCESS_BYTES = 512 * 2**20


def machine_memory_bytes(limits: Sequence[Path] = LIMITS) -> int:
    """Return the memory for tensors: the machine's, or less in a control group with a limit.

    The kernel kills processes that exceed such a limit, so PROCESS_BYTES, or half of the limit if
    that is less, stay free.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = []
    for path in limits:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    limit = min(found, default=total)
    return total if limit >= total else max(limit - PROCESS_BYTES, limit // 2)


class MemoryBudget:
    """A counter of a device's bytes, which refuses allocations beyond the total in advance."""

    def __init__(self, device_name: str, total_bytes: int, backend: str = "cpu") -> None:
        self.device_name = device_name
        self.backend = backend
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def take(self, size_bytes: int, use: str = "", advice: str = "") -> None:
        """Count bytes as used. Raises OutOfMemoryError with the shortage, `use` and `advice`."""
        with self._lock:
            free = self.total_bytes - self.used_bytes
            if size_bytes > free:
                more = f"--device {self.backend}:memory=...{advice and '; '}{advice}"
                needed = f"{size_bytes:,} are needed{use and ' '}{use}"
                raise OutOfMemoryError(
                    f"device {self.device_name} has {free:,} bytes free; {needed}",
                    advice=f"free tensors or plans, or give the device more: {more}",
                )
            self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


def array_over(memory: Bytes, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
    """Return an array over memory, see `Buffer.array`."""
    if type.size == 0:
        return np.empty(type.storage_shape, type.dtype.storage)
    steps = strides if type.dtype.block_size == 1 else (*strides[:-1], 1)
    return np.ndarray(type.storage_shape, type.dtype.storage, memory, offset_bytes, steps)


def aligned_bytes(size_bytes: int, *, zeros: bool = False, pages: HugePages | None = None) -> Bytes:
    """Return bytes at a multiple of ALIGNMENT, undefined or zero, of the pages if they have such a
    size. Raises MemoryError.

    Large blocks of zeros are fresh pages of the kernel, which take no time until they are used.
    """
    raw_bytes = size_bytes + ALIGNMENT + READ_BEYOND_BYTES
    if pages is not None and pages.fits(raw_bytes):
        raw = pages.take(raw_bytes)
    else:
        raw = (np.zeros if zeros else np.empty)(raw_bytes, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    # Two slices: NumPy does not keep the start of an empty slice.
    return raw[start:][:size_bytes]


class HostBufferType(BufferType):
    """Ordinary host memory."""

    is_host = True
    alignment = ALIGNMENT

    def __init__(self, device: Device, budget: MemoryBudget) -> None:
        self.name = device.name
        self.device = device
        self.budget = budget
        self._pages = HugePages()

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        return self.make_plain(size_bytes, usage)

    def make_plain(self, size_bytes: int, usage: Usage, *, zeros: bool = False) -> HostBuffer:
        """Return a buffer of ordinary memory, undefined or zero. Raises OutOfMemoryError."""
        self.budget.take(size_bytes)
        try:
            pages = self._pages if usage is Usage.WEIGHTS else None
            memory = aligned_bytes(size_bytes, zeros=zeros, pages=pages)
        except (MemoryError, ValueError):
            self.budget.give(size_bytes)
            raise OutOfMemoryError(
                f"the host refused {size_bytes:,} bytes", advice="use a smaller tensor"
            ) from None
        return HostBuffer(
            self,
            memory,
            usage,
            on_free=lambda: self.budget.give(size_bytes),
            reorders=True,
        )

    def wrap(self, memory: memoryview) -> HostBuffer:
        """Return a buffer over existing memory, which does not count against the budget."""
        array = np.frombuffer(memory, np.uint8) if memory.nbytes else aligned_bytes(0)
        return HostBuffer(self, array, Usage.ANY, on_free=lambda: None)


class HostBuffer(Buffer):
    """A block of host memory. With `reorders`, plans may change the order of weights in it."""

    buffer_type: HostBufferType

    def __init__(
        self,
        buffer_type: HostBufferType,
        memory: Bytes,
        usage: Usage,
        on_free: Callable[[], None],
        *,
        reorders: bool = False,
    ) -> None:
        self.buffer_type = buffer_type
        self.size_bytes = memory.nbytes
        self.usage = usage
        #: The bytes. If the buffer is not plain, their order is known only while it is held.
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self._lock = threading.Lock()
        #: The plans that hold the bytes while they are plain.
        self._plain_holders = 0
        self._held = Held(memory, self.address, release=self._release_plain)
        self._reorders = reorders
        self._order = self._new_order() if reorders and usage is Usage.WEIGHTS else None
        self._on_free: Callable[[], None] | None = on_free

    def __repr__(self) -> str:
        state = "freed" if self._on_free is None else self.usage.name.lower()
        return f"<HostBuffer {self.size_bytes} bytes, {state}>"

    @property
    def is_plain(self) -> bool:
        return self._order is None

    def hold(self, start: int, end: int, form: Form | None = None, *, writes: bool = False) -> Held:
        """As `ByteOrder.hold`, until the holder releases it."""
        if self._order is None:
            with self._lock:
                if self._order is None:
                    self._plain_holders += 1
                    return self._held
        return self._order.hold(start, end, form, writes=writes)

    def _release_plain(self) -> None:
        with self._lock:
            self._plain_holders -= 1

    def _new_order(self) -> ByteOrder:
        return ByteOrder(self.memory, self.buffer_type.budget, aligned_bytes)

    def set_usage(self, usage: Usage) -> None:
        """Set the usage. Plans may change the order of weights from then on, unless one holds the
        bytes now or an array of them was given."""
        super().set_usage(usage)
        with self._lock:
            may = self._reorders and self._order is None and not self._plain_holders
            if may and usage is Usage.WEIGHTS and self._on_free is not None:
                self._order = self._new_order()

    def set(self, offset_bytes: int, data: memoryview) -> None:
        if not data.nbytes:
            return
        if self._order is None:
            self.memory[offset_bytes : offset_bytes + data.nbytes] = np.frombuffer(data, np.uint8)
        else:
            self._order.write(offset_bytes, data)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        if not out.nbytes:
            return
        if self._order is None:
            np.frombuffer(out, np.uint8)[:] = self.memory[offset_bytes : offset_bytes + out.nbytes]
        else:
            self._order.read(offset_bytes, out)

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        if self._order is None:
            self.memory[offset_bytes : offset_bytes + size_bytes] = value
            return
        piece = memoryview(bytes([value]) * min(size_bytes, PIECE_BYTES))
        for offset in range(0, size_bytes, PIECE_BYTES):
            self.set(offset_bytes + offset, piece[: size_bytes - offset])

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        if self._order is not None:
            super().set_2d(offset_bytes, data, chunks)
        elif data.nbytes:
            self._strided(offset_bytes, chunks)[:] = np.frombuffer(data, np.uint8).reshape(chunks.count, -1)

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        if self._order is not None:
            super().get_2d(offset_bytes, out, chunks)
        elif out.nbytes:
            np.frombuffer(out, np.uint8).reshape(chunks.count, -1)[:] = self._strided(offset_bytes, chunks)

    def _strided(self, offset_bytes: int, chunks: Chunks) -> Bytes:
        shape, strides = (chunks.count, chunks.size_bytes), (chunks.stride_bytes, 1)
        return np.ndarray(shape, np.uint8, self.memory, offset_bytes, strides)

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        if not source.buffer.buffer_type.is_host:
            return False
        are_contiguous = source.is_contiguous and destination.is_contiguous
        if self.is_plain and source.buffer.is_plain:
            if are_contiguous:
                start = destination.offset_bytes
                source.buffer.get(source.offset_bytes, self.memory[start : start + source.type.nbytes].data)
            else:
                np.copyto(access.elements(destination), access.elements(source))
            return True
        if not are_contiguous:
            return False
        for start in range(0, source.type.nbytes, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, source.type.nbytes - start)))
            source.buffer.get(source.offset_bytes + start, piece)
            self.set(destination.offset_bytes + start, piece)
        return True

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        """Return an array of `type.dtype.storage`: bf16 as bits, rows of blocks as bytes.

        The bytes stay in their own order from then on: someone may read the array at any time.
        """
        with self._lock:
            if self._order is None:
                self._reorders = False
                return array_over(self.memory, type, offset_bytes, strides)
        extent = Tensor(type, self, offset_bytes, strides).extent_bytes
        held = self.hold(offset_bytes, offset_bytes + extent)
        return array_over(held.memory, type, offset_bytes - held.start, strides)

    def free(self) -> None:
        with self._lock:
            on_free, self._on_free = self._on_free, None
        if on_free is not None:
            if self._order is not None:
                self._order.free()
            self.memory = aligned_bytes(0)
            self._held = Held(self.memory, self.address)
            on_free()
