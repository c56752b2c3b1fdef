"""The driver on CuPy: memory of one GPU and of its host, and copies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.cublas import Workspace
from heliograph_backends.cuda.driver.cupy_gpus import OnGpu, cupy, failure, properties_of
from heliograph_backends.cuda.driver.driver import Bytes, DeviceBlock, Driver, DriverError

#: Of cudaError_t.
_PEER_ALREADY_ENABLED = 704
#: Of cudaHostRegister: for every GPU, and for kernels. CuPy has no names for them.
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2
#: What a copy of CUDA's may have from row to row.
_MOST_PITCH = 2**31 - 1
#: Pinned memory of so many bytes and more goes back when it is free: CuPy's pool keeps what it has, and takes
#: powers of 2.
_LARGE_PINNED_BYTES = 8 * 2**20


@dataclass(eq=False)
class CupyQueue:
    """A stream of CuPy's, and what cuBLAS needs to know of it."""

    stream: Any
    captures: bool = False
    workspace: Workspace | None = None

    @property
    def handle(self) -> int:
        return int(self.stream.ptr)


class CupyMemory(Driver):
    """What a GPU has, and what is moved there."""

    xp = cupy

    def __init__(self, number: int) -> None:
        self.number = number
        self._gpu = OnGpu(number)
        self._peers: set[int] = set()
        with self._here():
            self._pool = cupy.cuda.MemoryPool()
            self._pinned = cupy.cuda.PinnedMemoryPool()
            # What the definition allocates comes from the same pool, under the same limit.
            self._allocating = self._pool.malloc
            self.properties = properties_of(cupy.cuda.Device(number))

    def _here(self) -> OnGpu:
        """On this GPU, with CuPy's errors as DriverError."""
        return self._gpu

    def failure(self, error: Exception) -> DriverError | None:
        return failure(error)

    # Memory

    def memory(self) -> tuple[int, int]:
        with self._here():
            free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def set_limit(self, size_bytes: int) -> None:
        with self._here():
            self._pool.set_limit(size=size_bytes)

    def allocate(self, size_bytes: int) -> DeviceBlock:
        # In the default queue's arena: freed memory is taken again in whatever order, when nobody uses it.
        with self._here(), cupy.cuda.Stream.null:
            pointer = self._pool.malloc(size_bytes)
        return DeviceBlock(int(pointer.ptr), size_bytes, pointer)

    def allocate_pinned(self, size_bytes: int) -> Bytes:
        with self._here():
            if size_bytes < _LARGE_PINNED_BYTES:
                pointer = self._pinned.malloc(size_bytes)
            else:
                memory = cupy.cuda.PinnedMemory(size_bytes, cupy.cuda.runtime.hostAllocPortable)
                pointer = cupy.cuda.PinnedMemoryPointer(memory, 0)
        return np.frombuffer(pointer, np.uint8, size_bytes)

    def register(self, memory: Bytes) -> Callable[[], None]:
        address = int(memory.ctypes.data)
        with self._here():
            flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
            cupy.cuda.runtime.hostRegister(address, memory.nbytes, flags)

        def release() -> None:
            with self._here():
                cupy.cuda.runtime.hostUnregister(address)

        return release

    # Bytes

    def copy(self, target: int, source: int, size_bytes: int, queue: CupyQueue) -> None:
        runtime = cupy.cuda.runtime
        with self._here():
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
        with self._here():
            runtime.memcpy2DAsync(
                target, target_step, source, source_step, width, count, runtime.memcpyDefault, queue.handle
            )

    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: CupyQueue) -> None:
        with self._here():
            self._reach(peer)
            cupy.cuda.runtime.memcpyPeerAsync(target, self.number, source, peer, size_bytes, queue.handle)

    def _reach(self, peer: int) -> None:
        """Lets this GPU read another one's memory directly, once; where it cannot, CUDA goes through the
        host."""
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
        with self._here():
            cupy.cuda.runtime.memsetAsync(address, value, size_bytes, queue.handle)

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        extent = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        with self._here():
            memory = cupy.cuda.UnownedMemory(address, extent + np.dtype(dtype).itemsize, owner, self.number)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
