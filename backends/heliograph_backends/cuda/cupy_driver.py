"""The driver on CuPy 13 and 14: streams, events, the pool, cuBLAS, NVRTC and CUDA graphs.

CuPy's own kernels are compiled with their first use and kept in its cache on disk, as are ours. Nothing here
has names of ours in it but those of `driver`; what CuPy raises becomes `DriverError` in one place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver import (
    NOT_COMPILED,
    Block,
    Bytes,
    Driver,
    DriverError,
    Gemm,
    Kernel,
    Properties,
    Queue,
)
from heliograph_backends.cuda.failures import OUT_OF_MEMORY
from heliograph_backends.cuda.parameters import Parameters
from heliograph_backends.cuda.sources import (
    CHAIN,
    MODULES,
    kernels_of,
    module_of,
    options_of,
    text_of,
    text_of_chain,
)
from heliograph_proto.errors import ConfigurationError

try:
    import cupy
except ImportError as error:
    advice = "pip install 'heliograph[cuda12]', or [cuda13] for CUDA 13"
    raise ConfigurationError(f"CuPy cannot be imported: {error}", advice=advice) from None

#: Numbers of cudaDataType_t and cublasComputeType_t.
_DATA = {"f32": 0, "f64": 1, "f16": 2, "bf16": 14}
_COMPUTE_F32, _COMPUTE_F64, _COMPUTE_TF32 = 68, 70, 77
_DEFAULT_ALGORITHM = -1
#: What a block may have of shared memory without asking.
_PLAIN_SHARED_BYTES = 48 * 1024
_PEER_ALREADY_ENABLED = 704


def count_gpus() -> int:
    """How many GPUs there are. Raises ConfigurationError, saying why there are none."""
    try:
        there = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigurationError(f"there is no GPU that CUDA can use: {error}") from None
    if not there:
        raise ConfigurationError("there is no GPU that CUDA can use")
    return there


def versions() -> Mapping[str, str]:
    """Of CuPy, and of CUDA as it was built and as the driver has it."""
    runtime = cupy.cuda.runtime
    return {
        "cupy": cupy.__version__,
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "cuda_driver": _dotted(runtime.driverGetVersion()),
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def open_gpu(number: int) -> Driver:
    """The driver of a GPU."""
    return CupyDriver(number)


class CupyDriver(Driver):
    """One GPU through CuPy."""

    xp = cupy

    def __init__(self, number: int) -> None:
        self.number = number
        self._device = cupy.cuda.Device(number)
        self._functions: dict[str, Any] = {}
        self._loading = threading.Lock()
        self._peers: set[int] = set()
        with self._translated(), self._device:
            self._pool = cupy.cuda.MemoryPool()
            self._pinned = cupy.cuda.PinnedMemoryPool()
            # What the definition allocates comes from the same pool, under the same limit.
            self._allocating = self._pool.malloc
            self.properties = _properties(number, self._device)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """CuPy's errors as DriverError."""
        try:
            yield
        except Exception as error:
            found = self.failure(error)
            if found is None or found is error:
                raise
            raise found from error

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._translated(), self._device:
            yield

    def failure(self, error: Exception) -> DriverError | None:
        if isinstance(error, DriverError):
            return error
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            return DriverError(OUT_OF_MEMORY, str(error))
        kinds = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
        if isinstance(error, kinds):
            # The numbers of CUresult and cudaError_t are the same for what is told apart here.
            return DriverError(int(error.status), str(error))
        library = type(error).__name__
        return DriverError(-1, str(error)) if library in ("CUBLASError", "NVRTCError") else None

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
            pointer = self._pinned.malloc(size_bytes)
        return np.frombuffer(pointer, np.uint8, size_bytes)

    def register(self, memory: Bytes) -> Callable[[], None]:
        address = int(memory.ctypes.data)
        with self._here():
            cupy.cuda.runtime.hostRegister(address, memory.nbytes, 0)

        def release() -> None:
            with self._here():
                cupy.cuda.runtime.hostUnregister(address)

        return release

    # Queues

    def queue(self) -> Queue:
        with self._here():
            return cupy.cuda.Stream()

    @property
    def default_queue(self) -> Queue:
        return cupy.cuda.Stream.null

    @contextmanager
    def using(self, queue: Queue) -> Iterator[None]:
        with self._here(), queue, cupy.cuda.using_allocator(self._allocating):
            yield

    def mark(self, queue: Queue) -> Any:
        with self._here():
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(queue)
        return event

    def is_reached(self, mark: Any) -> bool:
        with self._here():
            return bool(mark.done)

    def wait(self, mark: Any) -> None:
        with self._here():
            mark.synchronize()

    def wait_for(self, queue: Queue, mark: Any) -> None:
        with self._here():
            queue.wait_event(mark)

    # Bytes

    def copy(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        runtime = cupy.cuda.runtime
        with self._here():
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, queue.ptr)

    def copy_2d(
        self,
        target: int,
        target_step: int,
        source: int,
        source_step: int,
        width: int,
        count: int,
        queue: Queue,
    ) -> None:
        runtime = cupy.cuda.runtime
        if count == 1:
            self.copy(target, source, width, queue)
            return
        with self._here():
            runtime.memcpy2DAsync(
                target, target_step, source, source_step, width, count, runtime.memcpyDefault, queue.ptr
            )

    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: Queue) -> None:
        with self._here():
            self._reach(peer)
            cupy.cuda.runtime.memcpyPeerAsync(target, self.number, source, peer, size_bytes, queue.ptr)

    def _reach(self, peer: int) -> None:
        """Lets this GPU read another one's memory directly, once; where it cannot, CUDA goes through the
        host."""
        runtime = cupy.cuda.runtime
        if peer in self._peers:
            return
        self._peers.add(peer)
        if not runtime.deviceCanAccessPeer(self.number, peer):
            return
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if error.status != _PEER_ALREADY_ENABLED:
                raise

    def fill(self, address: int, value: int, size_bytes: int, queue: Queue) -> None:
        with self._here():
            cupy.cuda.runtime.memsetAsync(address, value, size_bytes, queue.ptr)

    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        extent = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        with self._here():
            memory = cupy.cuda.UnownedMemory(address, extent + np.dtype(dtype).itemsize, owner, self.number)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    # Work

    def build(self, source: str) -> Kernel:
        with self._here():
            try:
                # CuPy keeps the code in its cache on disk, and the module as long as the process.
                module = cupy.RawModule(code=text_of_chain(source), options=options_of(CHAIN))
                return module.get_function(CHAIN)
            except cupy.cuda.compiler.CompileException as error:
                raise DriverError(NOT_COMPILED, str(error)) from error

    def launch(
        self,
        kernel: str | Kernel,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: Queue,
        shared_bytes: int = 0,
    ) -> None:
        with self._here(), queue:
            function = self._function(kernel) if isinstance(kernel, str) else kernel
            if shared_bytes > _PLAIN_SHARED_BYTES and function.max_dynamic_shared_size_bytes < shared_bytes:
                function.max_dynamic_shared_size_bytes = shared_bytes
            # An array of NumPy's is a parameter by value: its bytes are copied at the launch.
            function(grid, (threads, 1, 1), (parameters,), shared_mem=shared_bytes)

    def _function(self, kernel: str) -> Any:
        if kernel not in self._functions:
            self._load(module_of()[kernel])
        return self._functions[kernel]

    def _load(self, name: str) -> None:
        """Compiles a module, or takes it from CuPy's cache, and loads it."""
        with self._loading:
            module = cupy.RawModule(code=text_of(name), options=options_of(name))
            for kernel in kernels_of(name):
                self._functions[kernel] = module.get_function(kernel)

    def warmup(self) -> None:
        with self._here():
            for name in MODULES:
                self._load(name)

    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: Queue, *, tf32: bool) -> None:
        wide = product.types[2] == "f64"
        one, nothing = (np.array(value, np.float64 if wide else np.float32) for value in (1, 0))
        compute = _COMPUTE_F64 if wide else _COMPUTE_F32
        if tf32 and product.types[0] == "f32":
            compute = _COMPUTE_TF32
        m, n, k = product.sizes
        types = [_DATA[name] for name in product.types]
        turns = [int(turned) for turned in product.transposed]
        places = zip((a, b, c), types, product.leading, product.strides, strict=True)
        (first, second, third) = places
        with self._here():
            handle = self._cublas(queue)
            cublas = self._library
            cublas.gemmStridedBatchedEx(
                handle, *turns, m, n, k, one.ctypes.data, *first, *second, nothing.ctypes.data, *third,
                product.batch, compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip

    @cached_property
    def _library(self) -> Any:
        from cupy_backends.cuda.libs import cublas

        return cublas

    def _cublas(self, queue: Queue) -> int:
        """This thread's handle, which is CuPy's, on the queue."""
        handle = int(self._device.cublas_handle)
        self._library.setStream(handle, queue.ptr)
        return handle

    def capture(self, issue: Callable[[Queue], None]) -> Any:
        with self._here():
            # One that does not wait for the default queue: a capture may not.
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                try:
                    issue(stream)
                except BaseException:
                    self._abandon(stream)
                    raise
                return stream.end_capture()

    @staticmethod
    def _abandon(stream: Any) -> None:
        """Ends a capture that went wrong; that it did is known already."""
        try:
            stream.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError:
            pass

    def replay(self, recording: Any, queue: Queue) -> None:
        with self._here():
            recording.launch(queue)

    def close(self) -> None:
        try:
            with self._here():
                self._functions.clear()
                self._pool.free_all_blocks()
                self._pinned.free_all_blocks()
        except DriverError:
            pass  # a lost device gives nothing back; its process does


def _properties(number: int, device: Any) -> Properties:
    found = cupy.cuda.runtime.getDeviceProperties(number)
    name = found["name"]
    return Properties(
        name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        str(device.pci_bus_id).lower(),
        (int(found["major"]), int(found["minor"])),
        int(found["multiProcessorCount"]),
        int(found["l2CacheSize"]),
        int(found["sharedMemPerBlockOptin"]),
        bool(found["integrated"]),
    )
