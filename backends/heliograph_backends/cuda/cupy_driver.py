"""The driver on CuPy 13 and 14: streams, events, the pool, NVRTC and CUDA graphs.

CuPy's own kernels are compiled with their first use and kept in its cache on disk, as are ours. Nothing here
has names of ours in it but those of `driver`; what CuPy raises becomes `DriverError` in one place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heliograph_backends.cuda.cublas import (
    OLD_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    Library,
    Products,
    Workspace,
)
from heliograph_backends.cuda.cupy_gpus import count_gpus, cupy, failure, properties_of, translated, versions
from heliograph_backends.cuda.driver import Block, Bytes, Driver, DriverError, Gemm
from heliograph_backends.cuda.parameters import Parameters
from heliograph_backends.cuda.sources import MODULES, OPTIONS, kernels_of, module_of, text_of

__all__ = ["CupyDriver", "count_gpus", "open_gpu", "versions"]

#: What a block may have of shared memory without asking.
_PLAIN_SHARED_BYTES = 48 * 1024
#: Numbers of cudaError_t.
_NOT_READY, _PEER_ALREADY_ENABLED = 600, 704
#: Of cudaHostRegister: for every GPU, and for kernels. CuPy has no names for them.
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2
#: What a copy of CUDA's may have from row to row.
_MOST_PITCH = 2**31 - 1
#: Pinned memory of so many bytes and more goes back when it is free: CuPy's pool keeps what it has, and takes
#: powers of 2.
_LARGE_PINNED_BYTES = 8 * 2**20


def open_gpu(number: int) -> Driver:
    """The driver of a GPU."""
    return CupyDriver(number)


@dataclass(eq=False)
class _Queue:
    """A stream of CuPy's, and what cuBLAS needs to know of it."""

    stream: Any
    captures: bool = False
    workspace: Workspace | None = None

    @property
    def handle(self) -> int:
        return int(self.stream.ptr)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A graph, and the workspace of the products in it."""

    graph: Any
    workspace: Workspace | None


class CupyDriver(Driver):
    """One GPU through CuPy."""

    xp = cupy

    def __init__(self, number: int) -> None:
        self.number = number
        self._device = cupy.cuda.Device(number)
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}
        self._loading = threading.Lock()
        self._peers: set[int] = set()
        self._default = _Queue(cupy.cuda.Stream.null)
        with self._here():
            self._pool = cupy.cuda.MemoryPool()
            self._pinned = cupy.cuda.PinnedMemoryPool()
            # What the definition allocates comes from the same pool, under the same limit.
            self._allocating = self._pool.malloc
            self.properties = properties_of(self._device)

    @contextmanager
    def _here(self) -> Iterator[None]:
        with translated(), self._device:
            yield

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

    def allocate(self, size_bytes: int) -> Block:
        # In the default queue's arena: freed memory is taken again in whatever order, when nobody uses it.
        with self._here(), cupy.cuda.Stream.null:
            pointer = self._pool.malloc(size_bytes)
        return Block(int(pointer.ptr), size_bytes, pointer)

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

    # Queues

    def queue(self) -> _Queue:
        with self._here():
            return _Queue(cupy.cuda.Stream())

    @property
    def default_queue(self) -> _Queue:
        return self._default

    @contextmanager
    def using(self, queue: _Queue) -> Iterator[None]:
        with self._here(), queue.stream, cupy.cuda.using_allocator(self._allocating):
            yield

    def mark(self, queue: _Queue) -> Any:
        with self._here():
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(queue.stream)
        return event

    def is_reached(self, mark: Any) -> bool:
        runtime = cupy.cuda.runtime
        with self._here():
            # Event.done says False of a device that failed as of one that is busy.
            status = runtime.eventQuery(mark.ptr)
            if status not in (0, _NOT_READY):
                raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def wait(self, mark: Any) -> None:
        with self._here():
            mark.synchronize()

    def wait_for(self, queue: _Queue, mark: Any) -> None:
        with self._here():
            queue.stream.wait_event(mark)

    # Bytes

    def copy(self, target: int, source: int, size_bytes: int, queue: _Queue) -> None:
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
        queue: _Queue,
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

    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: _Queue) -> None:
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

    def fill(self, address: int, value: int, size_bytes: int, queue: _Queue) -> None:
        with self._here():
            cupy.cuda.runtime.memsetAsync(address, value, size_bytes, queue.handle)

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        extent = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        with self._here():
            memory = cupy.cuda.UnownedMemory(address, extent + np.dtype(dtype).itemsize, owner, self.number)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    # Work

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: _Queue,
        shared_bytes: int = 0,
    ) -> None:
        with self._here():
            function = self._function(kernel)
            if shared_bytes > self._shared.get(kernel, _PLAIN_SHARED_BYTES):
                function.max_dynamic_shared_size_bytes = self._shared[kernel] = shared_bytes
            # An array of NumPy's of one element is a parameter by value: its bytes are copied at the launch.
            function(grid, (threads, 1, 1), (parameters,), shared_mem=shared_bytes, stream=queue.stream)

    def _function(self, kernel: str) -> Any:
        if kernel not in self._functions:
            self._load(module_of()[kernel])
        return self._functions[kernel]

    def _load(self, name: str) -> None:
        """Compiles a module, or takes it from CuPy's cache, and loads it."""
        with self._loading:
            module = cupy.RawModule(code=text_of(name), options=OPTIONS)
            for kernel in kernels_of(name):
                self._functions[kernel] = module.get_function(kernel)

    def warmup(self) -> None:
        with self._here():
            for name in MODULES:
                self._load(name)

    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: _Queue, *, tf32: bool) -> None:
        with self._here():
            self._products.multiply(product, a, b, c, queue, tf32=tf32)

    @cached_property
    def _products(self) -> Products:
        # Loads cuBLAS, which takes a moment.
        from cupy_backends.cuda.libs import cublas

        modern = self.properties.compute_capability >= (9, 0)
        size_bytes = WORKSPACE_BYTES if modern else OLD_WORKSPACE_BYTES
        return Products(Library(cublas.__file__), lambda: self._workspace(size_bytes), size_bytes, self._order)

    def _workspace(self, size_bytes: int) -> Workspace:
        # Of the memory that is left to others, as cuBLAS's own would be.
        memory = cupy.cuda.Memory(size_bytes)
        return Workspace(int(memory.ptr), memory)

    def _order(self, queue: _Queue, other: _Queue) -> None:
        self.wait_for(queue, self.mark(other))

    def capture(self, issue: Callable[[_Queue], None]) -> _Recording:
        with self._here():
            # One that does not wait for the default queue: a capture may not.
            queue = _Queue(cupy.cuda.Stream(non_blocking=True), captures=True)
            with queue.stream:
                queue.stream.begin_capture()
                try:
                    issue(queue)
                except BaseException:
                    self._abandon(queue.stream)
                    raise
                return _Recording(queue.stream.end_capture(), queue.workspace)

    @staticmethod
    def _abandon(stream: Any) -> None:
        """Ends a capture that went wrong; that it did is known already."""
        try:
            stream.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError:
            pass

    def replay(self, recording: _Recording, queue: _Queue) -> None:
        with self._here():
            if recording.workspace is None:
                recording.graph.launch(queue.stream)
                return
            with self._products.in_order(recording.workspace, queue):
                recording.graph.launch(queue.stream)

    def close(self) -> None:
        try:
            with self._here():
                if "_products" in self.__dict__:
                    self._products.close()
                self._functions.clear()
                self._pool.free_all_blocks()
                self._pinned.free_all_blocks()
        except DriverError:
            pass  # a lost device gives nothing back; its process does
