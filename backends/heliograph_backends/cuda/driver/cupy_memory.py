"""The driver on CuPy: memory of a GPU and of its host, and copies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.cublas import Workspace
from heliograph_backends.cuda.driver.cupy_gpus import OnGpu, cupy, failure, properties_of
from heliograph_backends.cuda.driver.driver import Bytes, DeviceBlock, Driver, DriverError

#: From cudaError_t.
_PEER_ALREADY_ENABLED = 704
#: Flags of cudaHostRegister: for every GPU, and for kernels. CuPy has no names for them.
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2
#: The largest distance between rows in a CUDA copy.
_MOST_PITCH = 2**31 - 1
#: Pinned memory of at least this size is freed directly: CuPy's pool never shrinks and rounds up to
#: powers of 2.
_LARGE_PINNED_BYTES = 8 * 2**20


@dataclass(eq=False)
class CupyQueue:
    """A CuPy stream, and the state that cuBLAS needs of it."""

    stream: Any
    captures: bool = False
    workspace: Workspace | None = None

    @property
    def handle(self) -> int:
        return int(self.stream.ptr)


class CupyMemory(Driver):
    """The memory of a GPU, and copies."""

    xp = cupy

    def __init__(self, number: int) -> None:
        self.number = number
        #: The context of this GPU, in which CuPy's errors become DriverError.
        self._gpu = OnGpu(number)
        self._peers: set[int] = set()
        with self._gpu:
            self._pool = cupy.cuda.MemoryPool()
            self._pinned = cupy.cuda.PinnedMemoryPool()
            # The reference definitions allocate from the same pool, under the same limit.
            self._allocating = self._pool.malloc
            self.properties = properties_of(cupy.cuda.Device(number))

    def failure(self, error: Exception) -> DriverError | None:
        return failure(error)

    # Memory

    def memory(self) -> tuple[int, int]:
        with self._gpu:
            free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def set_limit(self, size_bytes: int) -> None:
        with self._gpu:
            self._pool.set_limit(size=size_bytes)

    def allocate(self, size_bytes: int) -> DeviceBlock:
        # In the default queue's arena, where any freed memory that is no longer in use can be
        # reused.
        with self._gpu, cupy.cuda.Stream.null:
            pointer = self._pool.malloc(size_bytes)
        return DeviceBlock(int(pointer.ptr), size_bytes, pointer)

    def allocate_pinned(self, size_bytes: int) -> Bytes:
        with self._gpu:
            if size_bytes < _LARGE_PINNED_BYTES:
                pointer = self._pinned.malloc(size_bytes)
            else:
                memory = cupy.cuda.PinnedMemory(size_bytes, cupy.cuda.runtime.hostAllocPortable)
                pointer = cupy.cuda.PinnedMemoryPointer(memory, 0)
        return np.frombuffer(pointer, np.uint8, size_bytes)

    def register(self, memory: Bytes) -> Callable[[], None]:
        address = int(memory.ctypes.data)
        with self._gpu:
            flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
            cupy.cuda.runtime.hostRegister(address, memory.nbytes, flags)

        def release() -> None:
            with self._gpu:
                cupy.cuda.runtime.hostUnregister(address)

        return release

    # Bytes

    def copy(self, target: int, source: int, size_bytes: int, queue: CupyQueue) -> None:
        runtime = cupy.cuda.runtime
        with self._gpu:
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, queue.handle)

    def copy_2d(
        self,
        target: int,
        target_step: int,
        source: int,
        source_step: int,
        width: int,
        count: int,
        queue: CupyQueue,
    ) -> None:
        runtime = cupy.cuda.runtime
        steps = target_step, source_step
        if count == 1 or min(steps) < width or max(steps) > _MOST_PITCH:
            for row in range(count):
                self.copy(target + row * target_step, source + row * source_step, width, queue)
            return
        with self._gpu:
            runtime.memcpy2DAsync(
                target, target_step, source, source_step, width, count, runtime.memcpyDefault, queue.handle
            )

    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: CupyQueue) -> None:
        with self._gpu:
            self._reach(peer)
            cupy.cuda.runtime.memcpyPeerAsync(target, self.number, source, peer, size_bytes, queue.handle)

    def _reach(self, peer: int) -> None:
        """Let this GPU read another one's memory directly, once; where it cannot, CUDA copies
        through the host."""
        runtime = cupy.cuda.runtime
        if peer in self._peers:
            return
        if runtime.deviceCanAccessPeer(self.number, peer):
            try:
                runtime.deviceEnablePeerAccess(peer)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEER_ALREADY_ENABLED:
                    raise
        self._peers.add(peer)

    def fill(self, address: int, value: int, size_bytes: int, queue: CupyQueue) -> None:
        with self._gpu:
            cupy.cuda.runtime.memsetAsync(address, value, size_bytes, queue.handle)

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        extent = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        with self._gpu:
            memory = cupy.cuda.UnownedMemory(address, extent + np.dtype(dtype).itemsize, owner, self.number)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
