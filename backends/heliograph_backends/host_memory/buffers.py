"""Host memory with a budget: the CPU's buffer type and buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Chunks, Device, Tensor, Usage, access
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.types import TensorType

ALIGNMENT = 64


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


def aligned_bytes(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uninitialised bytes at a multiple of ALIGNMENT. Raises MemoryError."""
    raw = np.empty(size_bytes + ALIGNMENT, np.uint8)
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

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        self.budget.take(size_bytes)
        try:
            memory = aligned_bytes(size_bytes)
        except (MemoryError, ValueError):
            self.budget.give(size_bytes)
            raise OutOfMemoryError(
                f"the host refused {size_bytes:,} bytes", advice="use a smaller tensor"
            ) from None
        return HostBuffer(self, memory, usage, on_free=lambda: self.budget.give(size_bytes))

    def wrap(self, memory: memoryview) -> HostBuffer:
        """Return a buffer over existing memory, which does not count against the budget."""
        array = np.frombuffer(memory, np.uint8) if memory.nbytes else aligned_bytes(0)
        return HostBuffer(self, array, Usage.ANY, on_free=lambda: None)


@dataclass(frozen=True, slots=True)
class _Extra:
    """Data that kernels keep beside a range of bytes."""

    made: Any
    size_bytes: int
    start: int
    end: int


class HostBuffer(Buffer):
    """A block of host memory, with data that kernels keep beside it, such as packed weights."""

    buffer_type: HostBufferType

    def __init__(
        self,
        buffer_type: HostBufferType,
        memory: np.ndarray[Any, np.dtype[np.uint8]],
        usage: Usage,
        on_free: Callable[[], None],
    ) -> None:
        self.buffer_type = buffer_type
        self.size_bytes = memory.nbytes
        self.usage = usage
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self._extras: dict[object, _Extra] = {}
        self._lock = threading.Lock()
        self._on_free: Callable[[], None] | None = on_free

    def __repr__(self) -> str:
        state = "freed" if self._on_free is None else self.usage.name.lower()
        return f"<HostBuffer {self.size_bytes} bytes, {state}>"

    def set(self, offset_bytes: int, data: memoryview) -> None:
        if data.nbytes:
            self.drop_extras(offset_bytes, offset_bytes + data.nbytes)
            self.memory[offset_bytes : offset_bytes + data.nbytes] = np.frombuffer(data, np.uint8)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        if out.nbytes:
            np.frombuffer(out, np.uint8)[:] = self.memory[offset_bytes : offset_bytes + out.nbytes]

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        self.drop_extras(offset_bytes, offset_bytes + size_bytes)
        self.memory[offset_bytes : offset_bytes + size_bytes] = value

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        if data.nbytes:
            self.drop_extras(offset_bytes, offset_bytes + chunks.extent_bytes)
            self._strided(offset_bytes, chunks)[:] = np.frombuffer(data, np.uint8).reshape(chunks.count, -1)

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        if out.nbytes:
            np.frombuffer(out, np.uint8).reshape(chunks.count, -1)[:] = self._strided(offset_bytes, chunks)

    def _strided(self, offset_bytes: int, chunks: Chunks) -> np.ndarray[Any, np.dtype[np.uint8]]:
        shape, strides = (chunks.count, chunks.size_bytes), (chunks.stride_bytes, 1)
        return np.ndarray(shape, np.uint8, self.memory, offset_bytes, strides)

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        if not source.buffer.buffer_type.is_host:
            return False
        self.drop_extras(destination.offset_bytes, destination.offset_bytes + destination.extent_bytes)
        np.copyto(access.elements(destination), access.elements(source))
        return True

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        """Return an array of `type.dtype.storage`: bf16 as bits, rows of blocks as bytes."""
        if type.size == 0:
            return np.empty(type.storage_shape, type.dtype.storage)
        steps = strides if type.dtype.block_size == 1 else (*strides[:-1], 1)
        return np.ndarray(type.storage_shape, type.dtype.storage, self.memory, offset_bytes, steps)

    def extra(self, key: object, span: tuple[int, int], size_bytes: int, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for this key, kept and counted as device memory until reset
        or free.

        It depends on the bytes of `span` (start, end), and is dropped when one of them is written.
        Raises OutOfMemoryError.
        """
        with self._lock:
            if key not in self._extras:
                self.buffer_type.budget.take(
                    size_bytes,
                    "for the packed form of a weight",
                    "use f16, bf16 or block weights with hg.ops.mul_mat, which are not packed",
                )
                try:
                    self._extras[key] = _Extra(make(), size_bytes, *span)
                except BaseException:
                    self.buffer_type.budget.give(size_bytes)
                    raise
            return self._extras[key].made

    def free_tensor(self, tensor: Tensor) -> None:
        self.drop_extras(tensor.offset_bytes, tensor.offset_bytes + tensor.extent_bytes)

    def drop_extras(self, start: int, end: int) -> None:
        """Drop data that kernels keep beside these bytes, before they are written."""
        if not self._extras:
            return
        with self._lock:
            gone = [key for key, one in self._extras.items() if one.start < end and start < one.end]
            for key in gone:
                self.buffer_type.budget.give(self._extras.pop(key).size_bytes)

    def reset(self) -> None:
        with self._lock:
            self.buffer_type.budget.give(sum(one.size_bytes for one in self._extras.values()))
            self._extras.clear()

    def free(self) -> None:
        with self._lock:
            on_free, self._on_free = self._on_free, None
        if on_free is not None:
            self.reset()
            self.memory = aligned_bytes(0)
            on_free()
