"""A module `cupy` whose CUDA is this host, so that `cupy_driver` runs where there is no GPU.

What is put on a stream happens at once, or is recorded. Nothing is here that CuPy has not, and arguments are
those that it takes (see `record`). It is as awkward as CuPy where that matters: an event says that it is not
done when the device failed, and memory for pinned copies comes in powers of 2.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_emulation.array import DeviceArray
from cuda_emulation.compiling import LAUNCHING, entry, library_of
from cuda_emulation.cupy_runtime import CUDARuntimeError, Runtime
from cuda_emulation.cupy_streams import devices, events, streams
from cuda_emulation.gemm import multiply, view
from cuda_emulation.library import Library
from heliograph_backends.cuda.driver.driver import Gemm
from heliograph_backends.cuda.driver.sources import CHAIN


class OutOfMemoryError(MemoryError):
    pass


class Memory:
    """Device memory on a multiple of 512."""

    def __init__(self, size: int) -> None:
        raw = np.full(size + 512, 0xFF, np.uint8)
        self.bytes = raw[-raw.ctypes.data % 512 :][:size]
        self.ptr, self.size = int(self.bytes.ctypes.data), size


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPool:
    def __init__(self) -> None:
        self._limit = 0

    def set_limit(self, size: int) -> None:
        self._limit = size

    def malloc(self, size: int) -> MemoryPointer:
        if size > self._limit > 0:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        return MemoryPointer(Memory(size), 0)

    def free_all_blocks(self) -> None:
        pass


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        self.bytes = (ctypes.c_uint8 * size)()


def pinned_pointer(mem: PinnedMemory, offset: int) -> Any:
    """What has the bytes as a buffer."""
    return mem.bytes


class PinnedMemoryPool:
    def malloc(self, size: int) -> Any:
        return pinned_pointer(PinnedMemory(1 << max(9, (size - 1).bit_length())), 0)

    def free_all_blocks(self) -> None:
        pass


class Cuda:
    """`cupy.cuda`. `failures` are statuses by the name of a call, each for its next one."""

    Memory, MemoryPointer, UnownedMemory, MemoryPool = Memory, MemoryPointer, UnownedMemory, MemoryPool
    PinnedMemory, PinnedMemoryPool = PinnedMemory, PinnedMemoryPool
    PinnedMemoryPointer = staticmethod(pinned_pointer)
    memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))

    def __init__(self) -> None:
        self.failures: dict[str, deque[int]] = {}
        self.streams: dict[int, Any] = {}
        self.here = threading.local()
        #: While it is, no event has happened; it is until somebody blocks, which is counted.
        self.is_busy = False
        self.blocked = 0
        self.driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (CUDARuntimeError,), {}))
        self.runtime = Runtime(self)
        self.Stream = streams(self)
        self.Event, self.Device = events(self), devices(self)

    def fail(self, name: str, *statuses: int) -> None:
        """The next such calls fail."""
        self.failures.setdefault(name, deque()).extend(statuses)

    def get_elapsed_time(self, start_event: Any, end_event: Any) -> float:
        """In milliseconds."""
        if not (start_event.has_time and end_event.has_time):
            raise CUDARuntimeError(400)
        return float(end_event.reached_at - start_event.reached_at) * 1e3

    def put(self, stream: int, work: Callable[[], Any]) -> None:
        """Does work, or records it."""
        captured = self.streams[stream].captured
        if captured is None:
            work()
        else:
            captured.append(work)

    @contextmanager
    def using_allocator(self, allocator: Any = None) -> Iterator[None]:
        yield


class Cupy(Library):
    """The module."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None)
        self.cuda = Cuda()
        #: The most shared memory that a kernel may have, by name, where it was asked for.
        self.shared: dict[str, int] = {}
        #: The data types that kernels were given as parameters.
        self.given_types: set[Any] = set()

    def ndarray(self, shape: Any, dtype: Any, memptr: Any, strides: Any) -> DeviceArray:
        return DeviceArray(view(memptr.ptr, shape, dtype, strides, memptr), self)

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        def get_function(name: str) -> RawKernel:
            return RawKernel(self, name, library_of(code)[name] if name == CHAIN else entry(name))

        return SimpleNamespace(get_function=get_function)


class RawKernel:
    """A kernel of ours, by its name."""

    #: What it has of shared memory whatever a launch asks for.
    shared_size_bytes = 128

    def __init__(self, cupy: Cupy, name: str, function: Any) -> None:
        self._cupy, self._name = cupy, name
        self._function = function
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint]

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._cupy.shared.get(self._name, 48 * 1024)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._cupy.shared[self._name] = size

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any) -> None:
        (parameters,) = args
        if shared_mem > self.max_dynamic_shared_size_bytes or parameters.size != 1:
            raise self._cupy.cuda.driver.CUDADriverError(1)
        self._cupy.given_types.add(parameters.dtype)
        copied = parameters.copy()

        def work() -> None:
            sizes = np.array([*grid], np.uint32), np.array([*block], np.uint32)
            arguments = copied.ctypes.data, sizes[0].ctypes.data, sizes[1].ctypes.data, shared_mem
            with LAUNCHING:
                if self._function(*arguments):
                    raise CUDARuntimeError(719)

        self._cupy.cuda.put(stream.ptr, work)


class Cublas:
    """In place of `cublas.Library`: it multiplies on the host, behind what is on the stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._stream = 0
        self.workspaces: list[int] = []

    def create(self) -> int:
        return 1

    def destroy(self, handle: int) -> None:
        pass

    def use(self, handle: int, stream: int, workspace: int, size_bytes: int) -> None:
        self._stream = stream
        self.workspaces.append(workspace)

    def multiply(self, handle: int, product: Gemm, a: int, b: int, c: int, *, tf32: bool) -> None:
        self._cuda.put(self._stream, lambda: multiply(product, a, b, c))


@contextmanager
def installed() -> Iterator[tuple[Any, Cupy, Cublas]]:
    """The module `cupy_driver` over this one; as it was before afterwards."""
    cupy = Cupy()
    libraries = SimpleNamespace(cublas=SimpleNamespace(__file__="libcublas.so"))
    names = ("cupy_gpus", "cupy_memory", "cupy_driver")
    ours = [f"heliograph_backends.cuda.driver.{name}" for name in names]
    before = {name: sys.modules.pop(name, None) for name in (*ours, "cupy", "cupy_backends.cuda.libs")}
    sys.modules.update({"cupy": cupy, "cupy_backends.cuda.libs": libraries})  # type: ignore[dict-item]
    try:
        module: Any = importlib.import_module(ours[-1])
        cublas = Cublas(cupy.cuda)
        module.Library = lambda path: cublas
        yield module, cupy, cublas
    finally:
        for name, old in before.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old
